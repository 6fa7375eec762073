"""What is done for each message of a row, and for the bytes that have left."""

from __future__ import annotations

from typing import Any

import pytest

from aqueduct._speedups.channels.sender import SenderBase, SendQueue, SendStream
from aqueduct.config import DEFAULT, Flow, Limits
from aqueduct.errors import LocalProtocolError
from aqueduct.protocol.common import effects

OPEN, OVER = object(), object()


class Streams(SendQueue):
    """Streams of which nothing waits for its turn."""

    def __init__(self, flow: Flow = DEFAULT.flow, limits: Limits = DEFAULT.limits) -> None:
        self.told: list[effects.Effect] = []
        super().__init__(self.told, flow, limits, OPEN)
        self.outgoing = self
        self.ceremonies: list[list[Any]] = []

    def write(self, stream: SendStream, buffers: list[Any], fin: bool = False) -> None:
        self.ceremonies.append(buffers)


class Half(SenderBase):
    """A half that is open, with its stream or without."""

    def __init__(self, streams: Streams, number: int | None = 0) -> None:
        self.state, self.channel, self.streams = OPEN, 0, streams
        self.left: list[SendStream] = []
        if number is not None:
            self.message_stream = SendStream(self, control=False)
            self.message_stream.number = number
            streams._open[number] = self.message_stream

    def stream_left(self, stream: SendStream) -> None:
        self.left.append(stream)


def test_messages_of_one_stream_in_a_row_are_one_effect() -> None:
    streams = Streams()
    half, other = Half(streams), Half(streams, 1)
    assert [half.post(b"a" * 10, ()) for _ in range(3)] == [0, 1, 2]
    assert other.post(b"b", ()) == 0
    assert half.post(b"c", ()) == 3
    assert [effect[:2] for effect in streams.told] == [
        (effects.WRITE, 0),
        (effects.WRITE, 1),
        (effects.WRITE, 0),
    ]
    sizes = [sum(map(len, effect[2])) for effect in streams.told]
    assert streams.queued == sum(sizes) and other.queued == sizes[1]
    assert half.queued == sizes[0] + sizes[2]
    assert not streams.ceremonies


def test_bytes_that_have_left_are_not_charged() -> None:
    streams = Streams(Flow(connection_high_water=1000))
    half = Half(streams)
    half.post(bytes(2000), ())
    stream, size = streams._open[0], half.queued
    assert streams.written(7, 10) is None  # no such stream
    assert streams.written(0, 100) is half
    assert (stream.queued, half.queued, streams.queued) == (size - 100,) * 3
    assert not streams.fell
    stream.fin = True
    assert streams.written(0, 1 << 40) is half
    assert (stream.queued, half.queued, streams.queued) == (0, 0, 0)
    assert streams.fell and not streams._open and half.left == [stream]
    control = SendStream(None, control=True)
    streams._charge(control, 50)
    assert (streams._control_queued, streams.queued, control.queued) == (50, 50, 50)
    streams._release(control, 20)
    assert (streams._control_queued, streams.queued, control.queued) == (30, 30, 30)


def test_what_is_not_plain_is_left_to_who_knows() -> None:
    streams = Streams()
    for change in (
        {"error": ValueError()},
        {"state": OVER},
        {"message_stream": None},
    ):
        half = Half(streams)
        for name, value in change.items():
            setattr(half, name, value)
        assert half.post(b"x", ()) is None and not streams.told
    unopened, dead = Half(streams, -1), Half(streams, 3)
    streams._open[3].dead = True
    assert [unopened.post(b"y", ()), dead.post(b"z", ())] == [0, 0]
    assert len(streams.ceremonies) == 2 and not streams.told and not streams.queued


def test_a_message_above_the_limit_uses_no_number() -> None:
    half = Half(Streams(limits=Limits(frame_bytes=100)))
    with pytest.raises(LocalProtocolError, match=r"10\d bytes is above Limits.frame_bytes"):
        half.post(bytes(97), ())
    assert half.post(b"", ()) == 0 and half.queued == len(b"".join(half.streams.told[0][2]))


def test_there_is_room_below_every_mark() -> None:
    flow = Flow(channel_high_water=100, connection_high_water=150)
    streams = Streams(flow, Limits(unacknowledged=3))
    one, other = Half(streams), Half(streams, 1)
    assert one.writable
    one.post(bytes(99), ())
    assert not one.writable and other.writable
    other.post(bytes(60), ())
    assert not other.writable  # the connection's
    streams.written(0, 1000)
    assert one.writable and other.writable
    one.post(b"", ())
    one.post(b"", ())
    assert not one.writable  # three without an acknowledgement
    one.numbers.ack(bytes((0, 1)))
    assert one.writable
    streams._open[0].dead = True
    assert not one.writable
    one.state = OVER
    assert one.writable
