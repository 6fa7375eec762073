"""Memory that is not taken for a large payload before what is whole could be taken."""

from __future__ import annotations

import pytest

from aqueduct._speedups import channels as codec
from aqueduct._speedups.channels.receiver import DirectRead
from aqueduct._speedups.channels.tracker import ReceivedNumbers
from aqueduct.errors import FrameError, LocalProtocolError
from tests.protocol.channels.arriving import ROUTE, KiB, entry, server, taken
from tests.reference import codec as model
from tests.speedups.strategies import client_decoder, message

SIZE = 300_000
PAYLOAD = bytes(range(250)) * (SIZE // 250)


def opened() -> DirectRead:
    """One with room for all, of a decoder that asks for every message."""
    decoder = client_decoder()
    decoder.auto_admit = 0
    inlet = DirectRead(decoder, 0, ReceivedNumbers(100), 8 << 20)
    inlet.open(1 << 62, -1, None)
    return inlet


def put_off(size: int, begun: bytes) -> codec.FrameDecoder:
    """A decoder at a payload of ``size``, behind a whole one, whose memory is put off."""
    inlet = opened()
    inlet.feed(message(0, b"first") + b"\x04\x01\x00\x00" + model.varint(size) + begun)
    assert not inlet.stopped
    run = inlet.close()
    assert run is not None
    assert (len(run.messages), run.pending, run.follows) == (1, size, None)
    assert inlet.decoder is not None
    return inlet.decoder


def test_a_payload_whose_memory_was_put_off_is_taken_up() -> None:
    decoder = put_off(SIZE, PAYLOAD[:1000])
    assert (decoder.buffered, decoder.remaining) == (1000, SIZE)
    assert decoder.receive_buffer(0) is None
    assert decoder.buffer.take_up() == 0
    room = decoder.receive_buffer(0)
    assert room is not None and len(room) == SIZE - 1000
    assert decoder.buffer.take_up() == 0  # nothing is to be done
    room[:] = PAYLOAD[1000:]
    decoder.received(len(room))
    frame = decoder.next()
    assert isinstance(frame, codec.MessageFrame) and bytes(frame.payload) == PAYLOAD
    assert decoder.buffer.take_up() == 0


def test_a_payload_whose_memory_was_put_off_can_be_fed_as_well() -> None:
    decoder = put_off(SIZE, PAYLOAD[:1000])
    decoder.feed(PAYLOAD[1000:])
    frame = decoder.next()
    assert isinstance(frame, codec.MessageFrame) and bytes(frame.payload) == PAYLOAD


def test_memory_that_was_put_off_and_is_not_to_be_had() -> None:
    decoder = put_off(1 << 60, b"some of it")
    for _ in range(2):
        with pytest.raises(MemoryError):
            decoder.buffer.take_up()
    assert (decoder.error, decoder.buffered) == (None, 10)
    decoder.end()
    with pytest.raises(MemoryError):
        decoder.next()


def test_a_sequence_that_ends_before_memory_that_was_put_off() -> None:
    decoder = put_off(SIZE, b"some of it")
    decoder.end()
    with pytest.raises(FrameError, match="inside a frame") as found:
        decoder.next()
    assert found.value.truncated


@pytest.mark.parametrize(("size", "begun"), [(200_000, 100), (SIZE, SIZE), (SIZE, SIZE + 1)])
def test_a_payload_that_is_short_or_here_has_its_memory_at_once(size: int, begun: int) -> None:
    inlet = opened()
    wire = message(0, b"first") + message(1, bytes(size)) + message(2, b"third")
    inlet.feed(wire[: len(wire) - size - len(message(2, b"third")) + begun])
    run = inlet.close()
    assert run is not None
    assert len(run.messages) == (2 if begun >= size else 1)
    assert inlet.decoder is not None
    assert inlet.decoder.remaining == max(size - begun, 0)


def test_a_connection_whose_stream_is_reset_then_has_its_room_again() -> None:
    core = server()
    core.receive_stream(9, codec.VERSION + ROUTE, False, 200.0)
    inlet = core.inlet(9)
    assert inlet is not None
    inlet.feed(message(0, PAYLOAD) + message(1, PAYLOAD)[:1000])
    core.inlet_done(9, 200.0)
    assert entry(core).queue.charged > 2 * SIZE
    core.receive_reset(9, 0, 200.0)
    assert SIZE < entry(core).queue.charged < SIZE + KiB
    assert taken(core, 200.0) == [(0, PAYLOAD)]
    assert entry(core).queue.charged == 0


@pytest.mark.parametrize("fin", [False, True])
def test_a_connection_may_go_on_without_an_inlet(fin: bool) -> None:
    core = server()
    core.receive_stream(9, codec.VERSION + ROUTE, False, 200.0)
    inlet = core.inlet(9)
    assert inlet is not None
    data = message(1, PAYLOAD)
    inlet.feed(message(0, PAYLOAD) + data[:1000])
    core.inlet_done(9, 200.0)
    core.receive_stream(9, data[1000:], fin, 200.0)
    assert taken(core, 200.0) == [(0, PAYLOAD), (1, PAYLOAD)]
    assert core.error is None


def test_an_inlet_for_one_payload_takes_no_messages() -> None:
    inlet = DirectRead.landing(codec.FrameDecoder(from_server=True).buffer)
    with pytest.raises(LocalProtocolError, match="takes no messages"):
        inlet.open(100, -1, None)
    assert inlet.stopped
    with pytest.raises(TypeError, match="a decoder and numbers, or a buffer"):
        DirectRead(None, 0, None, 0)  # type: ignore[arg-type]
