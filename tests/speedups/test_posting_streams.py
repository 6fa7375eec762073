"""Our streams on their way to the carrier: what is opened, charged, written and released."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct._speedups.channels import VERSION
from aqueduct._speedups.channels.sender import SenderBase, SendQueue, SendStream
from aqueduct.config import DEFAULT, Flow
from aqueduct.protocol.common import effects

NOBODY = SimpleNamespace(outgoing=SendQueue([], DEFAULT.flow, DEFAULT.limits, object()))


class Half(SenderBase):
    """What pays for bytes."""

    def __init__(self, owner: Any) -> None:
        self.channel = 0
        self.left: list[SendStream] = []

    def stream_left(self, stream: SendStream) -> None:
        self.left.append(stream)


def streams(openable: int = 10, mark: int = 1000) -> tuple[SendQueue, list[tuple[Any, ...]]]:
    wanted: list[tuple[Any, ...]] = []
    flow = Flow(connection_high_water=mark, channel_high_water=mark)
    made = SendQueue(wanted, flow, DEFAULT.limits, object())
    made.connected = made.version_acknowledged = True
    made._allow(openable)
    return made, wanted


def test_a_stream_is_opened_by_its_first_write() -> None:
    made, wanted = streams()
    made.version_acknowledged = False
    half = Half(NOBODY)
    stream = SendStream(half, False)
    assert (stream.number, stream.unopened, stream.waiting) == (-1, True, ())
    made.write(stream, [b"abc"])
    assert wanted == [(effects.WRITE, 0, [VERSION, b"abc"], False)]
    assert (stream.number, stream.unopened) == (0, False)
    assert half.queued == stream.queued == made.queued == 3 + len(VERSION)
    made.write(stream, [b"de"], fin=True)
    assert wanted == [(effects.WRITE, 0, [VERSION, b"abc", b"de"], True)]
    other = SendStream(None, True)
    made.write(other, [b"x"], True)
    assert wanted[1:] == [(effects.WRITE, 1, [VERSION, b"x"], True)]
    assert made._control_queued == 1 + len(VERSION)


@pytest.mark.parametrize("control", [True, False])
def test_what_may_not_open_waits_and_is_charged(control: bool) -> None:
    made, wanted = streams(openable=0)
    half = None if control else Half(NOBODY)
    stream = SendStream(half, control)
    made.write(stream, [b"ab"])
    made.write(stream, [b"c"], fin=True)
    assert wanted == []
    assert stream.waiting == [b"ab", b"c"]
    assert stream.fin
    assert list(made._control_waiting if control else made._message_waiting) == [stream]
    assert made.queued == stream.queued == 3
    assert made.stalled_control == (3 + 512 if control else 0)
    made._allow(8)
    assert made._may_open(stream)
    assert not made._may_open(SendStream(None, control)), "behind who waits"


def test_a_share_is_left_to_control_streams() -> None:
    made, _ = streams(openable=8)
    opened = 0
    while made._may_open(SendStream(Half(NOBODY), False)):
        made.write(SendStream(Half(NOBODY), False), [b"x"])
        opened += 1
    assert opened == 6
    assert made._may_open(SendStream(None, True))


def test_what_is_dead_takes_nothing() -> None:
    made, wanted = streams()
    half = Half(NOBODY)
    stream = SendStream(half, False)
    stream.dead = True
    made.write(stream, [b"x"])
    made.append(stream, [b"x"], 1)
    assert (wanted, made.queued, half.queued, stream.unopened) == ([], 0, 0, False)


def test_the_sender_is_told_once_all_its_bytes_have_left() -> None:
    made, _ = streams()
    half = Half(NOBODY)
    stream = SendStream(half, False)
    made.write(stream, [b"abc"], True)
    assert made.written(0, 2) is half
    assert stream.half is half
    assert made.written(0, 1) is half
    assert stream.half is None, "or each would keep the other for the collector"
    assert half.left == [stream]
    assert (half.queued, made.queued, made._open) == (0, 0, {})
    assert made.written(0, 1) is None


def test_a_fall_below_the_mark_is_noted() -> None:
    made, _ = streams(mark=10)
    made.write(SendStream(Half(NOBODY), False), [bytes(12)])
    made.written(0, 2)
    assert not made.fell
    made.written(0, 1)
    assert made.fell


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["write", "append", "end", "left"]), st.integers(0, 3), st.binary()
        ),
        max_size=40,
    )
)
def test_what_is_charged_is_what_has_not_left(steps: list[tuple[str, int, bytes]]) -> None:
    """Against a model: the bytes of each stream, in order, and who pays for how many of them."""
    made, wanted = streams(openable=100)
    halves = [Half(NOBODY) for _ in range(4)]
    known = [SendStream(half, False) for half in halves]
    said: dict[int, bytes] = {}
    waiting = [0] * 4
    for step, which, data in steps:
        stream = known[which]
        if stream.fin and step != "left":
            continue
        if step == "left":
            if stream.number >= 0 and waiting[which]:
                made.written(stream.number, waiting[which] - 1)
                waiting[which] = 1
            continue
        if step == "append":
            made.append(stream, [data], len(data))
        else:
            made.write(stream, [data], step == "end")
        said[stream.number] = said.get(stream.number, b"") + data
        waiting[which] += len(data)
        assert [half.queued for half in halves] == waiting
        assert made.queued == sum(waiting)
    found: dict[int, bytes] = {}
    for kind, number, buffers, _ in wanted:
        assert kind == effects.WRITE
        found[number] = found.get(number, b"") + b"".join(buffers)
    assert found == said
