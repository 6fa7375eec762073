"""Large messages of the draft: their credit, and their way to their memory."""

from __future__ import annotations

from aqueduct._speedups.base.buffers import bytes_copied
from aqueduct.protocol.common.receiver import ReceiverHalf
from tests.protocol.control_streams.lone import Lone, message
from tests.protocol.control_streams.pair import Pair

KiB = 1024


def test_several_large_messages_are_under_way_at_once() -> None:
    pair = Pair()
    sender, receiver = pair.client.core.entrypoint, pair.server.core.entrypoint
    for number in range(40):
        pair.client.send(sender, bytes(64 * KiB))
        pair.run()
        assert [each.number for each in pair.server.take_all(receiver)] == [number]
    pipe = next(pipe for pipe in pair.client.pipes.values() if pipe.sent > 30 * 64 * KiB)
    assert pipe.credit - pipe.sent > 1024 * KiB


def test_a_large_payload_is_read_straight_to_its_memory() -> None:
    lone = Lone("server")
    payload = bytes(range(256)) * 256
    frame = message(0, 0, payload)
    number = lone.say(frame[:20], fin=False)
    inlet = lone.core.inlet(number)
    assert inlet is not None
    at, before = 20, bytes_copied()
    while not inlet.stopped:
        room = inlet.room(30_000)
        assert room is not None
        room[:] = frame[at : at + len(room)]
        at += len(room)
        inlet.landed(len(room))
        if at == 30_020:  # in between the core may look
            lone.core.inlet_done(number, lone.now)
            inlet = lone.core.inlet(number)
            assert inlet is not None
    lone.core.inlet_done(number, lone.now)
    assert at == len(frame)
    assert bytes_copied() == before
    assert lone.core.inlet(number) is None
    receiver = lone.core.entrypoint
    assert isinstance(receiver, ReceiverHalf)
    received = lone.core.receive(receiver, lone.now)
    assert received is not None
    assert bytes(received.payload) == payload


def test_little_is_not_read_straight_to_its_memory() -> None:
    lone = Lone("server")
    frame = message(0, 0, bytes(64 * KiB))
    number = lone.say(frame[:-4095], fin=False)
    assert lone.core.inlet(number) is None
    assert lone.core.inlet(number + 1) is None
    lone.on(number, frame[-4095:])
    assert lone.core.inlet(number) is None


def test_the_payload_of_a_closed_receiver_is_not_read_to_its_memory() -> None:
    lone = Lone("server")
    frame = message(0, 0, bytes(64 * KiB))
    number = lone.say(frame[:20], fin=False)
    assert lone.core.inlet(number) is not None
    lone.core.inlet_done(number, lone.now)
    receiver = lone.core.entrypoint
    assert isinstance(receiver, ReceiverHalf)
    lone.core.close_receiver(receiver, lone.now)
    assert lone.core.inlet(number) is None
    lone.on(number, frame[20:])
    assert lone.core.error is None
