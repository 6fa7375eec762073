"""Room that comes back reaches whoever waits for it, on either side, whatever freed it."""

from __future__ import annotations

import dataclasses

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Config, Flow, Limits
from aqueduct.errors import Finished
from aqueduct.protocol.common.events import Writable
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.send_streams import SendStream
from aqueduct.protocol.common.sender import Mode, SenderHalf
from tests.protocol.channels.test_lifecycle import open_channel
from tests.support.pair import Pair, Side


def small_room(budget: int = 100_000, channel: int = 100_000) -> Config:
    flow = Flow(
        receive_budget=budget,
        channel_receive_bytes=channel,
        initial_window=4096,
        message_overhead=100,
    )
    return dataclasses.replace(DEFAULT, flow=flow)


def few_streams(**limits: int) -> Config:
    return dataclasses.replace(DEFAULT, flow=Flow(streams=16, **limits))


def message(number: int, payload: bytes = b"") -> bytes:
    return b"".join(bytes(part) for part in codec.encode_message(number, payload))


def partial(side: Side, channel: int, number: int, size: int) -> SendStream:
    """Half a message, on a stream of its own."""
    whole = message(number, bytes(size))
    return side.inject(codec.encode_route_to(channel), whole[: size // 2], fin=False)


def give_up(side: Side, stream: SendStream) -> None:
    side.core._shared.outgoing.reset(stream, 0)


def budget_used(pair: Pair) -> int:
    return pair.server.core.snapshot()["budget_used_bytes"]


def test_a_reset_message_makes_room_for_the_next_of_its_channel() -> None:
    pair = Pair(small_room())
    big = partial(pair.client, 0, 0, 90_000)
    pair.run()
    pair.client.inject(codec.encode_route_to(0), message(1, bytes(50_000)))
    pair.run()
    assert pair.server.core.held_streams + len(pair.receiver.queue.waiting) > 0
    give_up(pair.client, big)
    pair.run()
    # The application took nothing and had nothing to take.
    taken = pair.server.take(pair.receiver)
    assert taken is not None and len(taken.payload) == 50_000
    assert budget_used(pair) == 0


@pytest.mark.parametrize("end", ["reset", "cancelled", "closed", "forgotten", "taken"])
def test_what_frees_the_budget_lets_another_channel_go_on(end: str) -> None:
    pair = Pair(small_room(budget=100_000))
    first, theirs = open_channel(pair, keep_sender=True)
    second, other = open_channel(pair, keep_sender=True)
    pair.client.send(second, bytes(10_000))
    pair.run()
    if end == "reset":
        stream = partial(pair.client, first.channel, 0, 85_000)
    else:
        pair.client.send(first, bytes(85_000))
    pair.run()
    pair.client.send(second, bytes(60_000))
    pair.run()
    assert pair.server.core.snapshot()["starved_receivers"] == 1
    if end == "reset":
        give_up(pair.client, stream)
    elif end == "cancelled":
        pair.client.cancel(first)
    elif end == "closed":
        pair.server.close_receiver(theirs)
    elif end == "forgotten":
        pair.client.inject(codec.encode_route_to(first.channel), codec.FORGET_CHANNEL)
    else:
        assert pair.server.take(theirs) is not None
    pair.run()
    assert [len(m.payload) for m in other.queue] == [10_000, 60_000]
    assert pair.server.core.snapshot()["starved_receivers"] == 0


def test_a_channel_that_ends_while_it_waits_leaves_the_queue() -> None:
    pair = Pair(small_room(budget=20_000))
    senders = [open_channel(pair, keep_sender=True) for _ in range(3)]
    for sender, _ in senders:
        pair.client.send(sender, bytes(10_000))
        pair.client.send(sender, bytes(10_000))
    pair.run()
    assert pair.server.core.snapshot()["starved_receivers"] == 3
    pair.client.cancel(senders[0][0])
    pair.server.close_receiver(senders[1][1])
    pair.run()
    last = senders[2][1]
    assert len(pair.server.take_all(last)) >= 1
    pair.run()
    pair.server.take_all(last)
    assert pair.server.core.snapshot()["starved_receivers"] == 0
    assert pair.server.core.held_streams == 0
    assert last.queue.charged == budget_used(pair) == 0


@pytest.mark.requirement("AQ-R31")
def test_small_messages_do_not_pass_by_a_large_one_for_ever() -> None:
    pair = Pair(small_room())
    pair.client.send(pair.sender, bytes(50_000), mode=Mode.UNORDERED)
    pair.run()
    pair.client.send(pair.sender, bytes(99_000), mode=Mode.UNORDERED)
    pair.run()
    sizes = []
    for _ in range(20):
        for _ in range(3):
            pair.client.send(pair.sender, bytes(10_000), mode=Mode.UNORDERED)
        pair.run()
        taken = pair.server.take(pair.receiver)
        assert taken is not None
        sizes.append(len(taken.payload))
    assert 99_000 in sizes[:3]


@pytest.mark.requirement("AQ-R31")
def test_datagrams_do_not_pass_by_a_large_message_for_ever() -> None:
    pair = Pair(small_room(channel=20_000))
    for _ in range(5):
        pair.client.send(pair.sender, bytes(1000), mode=Mode.UNRELIABLE)
    pair.client.send(pair.sender, bytes(50_000))
    pair.run()
    sizes = []
    for _ in range(10):
        pair.client.send(pair.sender, bytes(1000), mode=Mode.UNRELIABLE)
        pair.run()
        taken = pair.server.take(pair.receiver)
        pair.run()
        if taken is not None:
            sizes.append(len(taken.payload))
    assert 50_000 in sizes


@pytest.mark.requirement("AQ-R25")
@pytest.mark.requirement("AQ-R31")
def test_channels_that_nobody_holds_do_not_exceed_the_budget() -> None:
    """One message of each channel is always admitted - once the application has its handle."""
    pair = Pair(small_room(budget=200_000))
    attaches = [Attach(keep_sender=True, is_oneshot=False) for _ in range(50)]
    pair.client.send(pair.sender, b"", *attaches)
    for attach in attaches:
        assert isinstance(attach.half, SenderHalf)
        pair.client.send(attach.half, bytes(50_000))
        pair.client.finish(attach.half)
    pair.run()
    assert budget_used(pair) <= 200_000
    carrier = pair.server.take(pair.receiver)
    assert carrier is not None
    for half, _ in carrier.attachments:  # in any order, nobody waits for another
        assert isinstance(half, ReceiverHalf)
        pair.run()
        assert [len(m.payload) for m in pair.server.take_all(half)] == [50_000]
        pair.run()
        assert isinstance(half.error, Finished)
    assert budget_used(pair) == 0
    assert pair.client.core.channels == pair.server.core.channels == 1


def test_evicted_messages_cost_no_memory() -> None:
    pair = Pair(small_room(channel=10_000))
    pair.client.send(pair.sender, bytes(5000))
    for _ in range(3000):
        pair.client.send(pair.sender, bytes(1000), mode=Mode.UNRELIABLE)
        pair.run()
    assert len(pair.receiver.queue) < 50
    assert sum(len(m.payload) for m in pair.receiver.queue) <= 10_000
    assert len(pair.server.take_all(pair.receiver)[0].payload) == 5000
    assert budget_used(pair) == 0


def test_a_queue_of_nothing_but_evicted_messages_is_empty() -> None:
    pair = Pair(small_room(channel=2000, budget=2000))
    other, _ = open_channel(pair, keep_sender=True)
    for _ in range(2):
        pair.client.send(pair.sender, bytes(300), mode=Mode.UNRELIABLE)
    pair.run()
    pair.client.send(pair.sender, bytes(1900))  # waits for room
    pair.client.send(other, bytes(1800))
    pair.run()
    for _ in range(3):
        pair.client.send(pair.sender, bytes(1100), mode=Mode.UNRELIABLE)
    pair.run()
    live = [m for m in pair.receiver.queue if not m.dropped]
    assert bool(pair.receiver.queue) == bool(live)


@pytest.mark.requirement("AQ-R31")
def test_blocks_that_are_never_whole_are_bounded() -> None:
    config = dataclasses.replace(
        small_room(budget=100_000),
        limits=Limits(frame_bytes=200_000, header_bytes=60_000),
        calls=dataclasses.replace(DEFAULT.calls, fragment_bytes=1000),
    )
    pair = Pair(server_config=config)
    block = codec.encode_message(0, b"", ((b"k", bytes(59_000)),))
    cut = b"".join(bytes(part) for part in block)[:50_000]
    for _ in range(5):
        pair.client.inject(codec.encode_route_to(0), cut, fin=False)
        pair.run()
    assert pair.server.core.error is None
    for _ in range(5):
        pair.client.inject(codec.encode_route_to(0), cut, fin=False)
        pair.run()
    assert pair.server.close_code == 5


# The sender's side


def test_a_sender_that_waits_for_the_connection_goes_on_when_another_ends() -> None:
    flow = Flow(connection_high_water=50_000, initial_window=4096)
    pair = Pair(dataclasses.replace(DEFAULT, flow=flow))
    first, theirs = open_channel(pair, keep_sender=True)
    second, _ = open_channel(pair, keep_sender=True)
    pair.server.mute = True  # gives no credit
    pair.client.send(first, bytes(60_000))
    pair.client.send(second, bytes(10_000))
    assert not second.writable
    pair.client.core.wait_writable(second)
    pair.run()
    pair.client.events.clear()
    pair.server.mute = False
    pair.server.core._shared.effects.clear()
    pair.server.close_receiver(theirs)
    pair.run()
    assert second.writable
    halves = [e.half for e in pair.client.events if type(e).__name__ == "Writable"]
    assert second in halves


def test_a_sender_that_waits_for_the_connection_goes_on_when_another_is_cancelled() -> None:
    flow = Flow(connection_high_water=50_000, initial_window=4096)
    pair = Pair(dataclasses.replace(DEFAULT, flow=flow))
    first, _ = open_channel(pair, keep_sender=True)
    second, _ = open_channel(pair, keep_sender=True)
    pair.server.hold = 10_000
    pair.server.mute = True
    pair.client.send(first, bytes(60_000))
    pair.client.send(second, bytes(10_000))
    pair.client.core.wait_writable(second)
    pair.run()
    pair.client.events.clear()
    pair.client.cancel(first)
    pair.client.flush()
    assert second.writable
    assert second in [e.half for e in pair.client.events if isinstance(e, Writable)]


def test_a_message_of_a_channel_with_nothing_queued_has_room_whatever_others_have() -> None:
    """Who reads may read nothing else before: the merge of many channels would stand still."""
    flow = Flow(connection_high_water=50_000, initial_window=4096)
    pair = Pair(dataclasses.replace(DEFAULT, flow=flow))
    first, _ = open_channel(pair, keep_sender=True)
    second, _ = open_channel(pair, keep_sender=True)
    pair.server.mute = True  # gives no credit
    pair.client.send(first, bytes(60_000))
    assert not first.writable
    assert second.writable
    pair.client.send(second, bytes(10_000))
    assert not second.writable


@pytest.mark.requirement("AQ-R31")
def test_a_peer_that_lets_no_control_frame_out_is_stopped() -> None:
    """It makes us say ever more, and has no stream for it: that must not grow for ever."""
    tight = Flow(connection_high_water=10_000)
    pair = Pair(
        dataclasses.replace(DEFAULT, flow=Flow(streams=8)),
        server_config=dataclasses.replace(DEFAULT, flow=tight),
    )
    pair.client.hold = 1_000_000
    pair.run()
    pair.client.mute = True
    carrier = pair.link.client
    most = 0
    for index in range(20_000):
        # Cancelled, so closed by the server; then forgotten, so that it counts no more.
        ended = [codec.encode_route_to(8 + 8 * index), codec.CANCEL_SENDER]
        carrier.write(carrier._opened, ended, True)
        gone = [codec.encode_route_to(8 + 8 * index), codec.FORGET_CHANNEL]
        carrier.write(carrier._opened, gone, True)
        if carrier.openable < 2:
            carrier.flush()
            pair.run()
            most = max(most, pair.server.core.snapshot()["streams_waiting"])
            if pair.server.core.error is not None:
                break
    assert pair.server.close_code == 5
    assert 1000 < most < 10_000


def test_streams_in_effects_that_wait_are_not_given_twice() -> None:
    """The carrier counts what it was told of; the core has opened more by then."""
    pair = Pair(dataclasses.replace(DEFAULT, flow=Flow(streams=16)))
    core, carrier = pair.client.core, pair.link.client
    core.send(pair.sender, b"one", pair.now, mode=Mode.UNORDERED)
    core.openable_changed(carrier.openable, pair.now)
    for _ in range(40):
        core.send(pair.sender, b"more", pair.now, mode=Mode.UNORDERED)
        core.openable_changed(carrier.openable, pair.now)
    pair.client.flush()
    pair.run()
    assert len(pair.server.take_all(pair.receiver)) == 41


def test_headers_count_when_it_is_asked_whose_room_is_missing() -> None:
    """A message that waits for its own channel must not stand in the way of the others."""
    pair = Pair(small_room(budget=100_000, channel=20_000))
    first, _ = open_channel(pair, keep_sender=True)
    second, other = open_channel(pair, keep_sender=True)
    third, theirs = open_channel(pair, keep_sender=True)
    pair.client.send(first, bytes(10_000))
    pair.client.send(first, bytes(6_000), headers=((b"k", bytes(5_000)),))
    pair.run()
    assert pair.server.core.snapshot()["starved_receivers"] == 0
    for sender in (second, third):
        pair.client.send(sender, bytes(100))
    pair.run()
    assert len(other.queue) == len(theirs.queue) == 1


@pytest.mark.requirement("AQ-31")
@pytest.mark.requirement("AQ-36")
def test_more_live_channels_than_streams_do_not_keep_each_other_waiting() -> None:
    """Each keeps a stream for its messages and one for its acks, in both directions."""
    pair = Pair(few_streams())
    to_server = [Attach(keep_sender=True, is_oneshot=False) for _ in range(100)]
    to_client = [Attach(keep_sender=False, is_oneshot=False) for _ in range(100)]
    pair.client.send(pair.sender, b"", *to_server, *to_client)
    pair.run()
    call = pair.server.take(pair.receiver)
    assert call is not None
    at_server = [half for half, _ in call.attachments]
    ours = [attach.half for attach in (*to_server, *to_client)]
    for index in range(100):
        pair.client.send(ours[index], b"up")
        pair.server.send(at_server[100 + index], b"down")
    pair.advance(1.0)
    for index in range(100):
        up, down = pair.server.take(at_server[index]), pair.client.take(ours[100 + index])
        assert up is not None and up.payload == b"up"
        assert down is not None and down.payload == b"down"
        for sender in (ours[index], at_server[100 + index]):
            assert isinstance(sender, SenderHalf) and not sender.unsettled
    for index in range(100):
        pair.client.finish(ours[index])
        pair.client.close_receiver(ours[100 + index])
    pair.advance(3.0)
    assert pair.server.core.channels == pair.client.core.channels == 1
    for side in (pair.client, pair.server):
        assert side.core.incoming.extra == 1  # the entrypoint's messages, or its acks
        assert side.carrier.openable == 16


@pytest.mark.requirement("AQ-R31")
def test_what_lasts_is_lent_up_to_a_limit_and_twice_at_most_for_a_channel() -> None:
    pair = Pair(few_streams(channel_streams=40))
    attachments = [Attach(keep_sender=True, is_oneshot=False) for _ in range(200)]
    pair.client.send(pair.sender, b"", *attachments)
    for attach in attachments:
        pair.client.send(attach.half, b"up")
    pair.advance(1.0)
    assert pair.server.core.incoming.extra == 40
    open_now = len(pair.server.core._reader.incoming.streams)
    assert open_now <= 16 + 40
    one = Pair(few_streams())
    for _ in range(10):
        one.client.inject(codec.encode_route_to(0), fin=False)
    one.run()
    assert one.server.core.incoming.extra == 2


@pytest.mark.requirement("AQ-R31")
def test_small_messages_count_while_they_land() -> None:
    pair = Pair(small_room(channel=50_000))
    streams = [partial(pair.client, 0, number, 10_000) for number in range(20)]
    pair.run()
    assert budget_used(pair) == pair.receiver.queue.charged <= 50_000
    for stream in streams:
        rest = message(0, bytes(10_000))[5_000:]
        pair.client.core._shared.outgoing.write(stream, [rest], fin=True)
    pair.run()
    assert 10_000 < pair.receiver.queue.charged <= 50_000
    numbers = set()
    for _ in streams:
        taken = pair.server.take(pair.receiver)
        assert taken is not None and len(taken.payload) == 10_000
        numbers.add(taken.number)
        pair.run()
        assert pair.receiver.queue.charged <= 50_000
    assert numbers == set(range(20))
    assert budget_used(pair) == 0


@pytest.mark.requirement("AQ-R31")
def test_what_carries_channels_goes_before_what_is_sent_on_them() -> None:
    """Or that could take every stream, wait for its handle, and so keep the handle away."""
    pair = Pair(few_streams(unordered_streams=1, receive_budget=2_000))
    attach = Attach(keep_sender=True, is_oneshot=False)
    pair.client.send(pair.sender, b"first", mode=Mode.UNORDERED)
    pair.run()
    pair.client.send(pair.sender, bytes(200_000), mode=Mode.UNORDERED)  # waits for room
    pair.client.send(pair.sender, b"carrier", attach, mode=Mode.UNORDERED)
    for _ in range(30):
        pair.client.send(attach.half, bytes(1_500), mode=Mode.UNORDERED)
    pair.run()
    assert pair.client.core.snapshot()["streams_waiting"] > 0
    taken = {}
    for _ in range(3):
        for received in pair.server.take_all(pair.receiver):
            taken[received.number] = received
        pair.run()
    assert sorted(taken) == [0, 1, 2]
    ((half, _),) = taken[2].attachments
    for _ in range(30):
        assert isinstance(half, ReceiverHalf) and pair.server.take(half) is not None
        pair.run()


@pytest.mark.requirement("AQ-R31")
@pytest.mark.parametrize("size", [10, 1000, 20_000])
def test_a_full_queue_stops_the_reading_of_its_channel(size: int) -> None:
    """Whether messages are small and come in runs, or large and ask for room each."""
    pair = Pair(small_room(budget=1_000_000, channel=50_000))
    count = 200_000 // (size + 100)
    for index in range(count):
        pair.client.send(pair.sender, index.to_bytes(size, "big"))
    pair.run()
    cost = size + 100
    assert 50_000 - 2 * cost < pair.receiver.queue.charged <= 50_000
    assert budget_used(pair) - pair.receiver.queue.charged in range(50_001)  # beside read-ahead
    taken = []
    while (received := pair.server.take(pair.receiver)) is not None:
        taken.append(int.from_bytes(received.payload, "big"))
        pair.run()
    assert taken == list(range(count))
    assert pair.receiver.queue.charged == 0


@pytest.mark.requirement("AQ-R31")
def test_small_messages_that_come_at_once_stop_at_a_full_queue() -> None:
    """Whatever a peer's window lets come: what is read is what there is room for."""
    pair = Pair(small_room(budget=1_000_000, channel=50_000))
    data = codec.encode_route_to(0) + b"".join(message(n, bytes(10)) for n in range(2000))
    pair.server.core.receive_stream(10_000, codec.VERSION + data, False, pair.now)
    assert 0 < pair.receiver.queue.charged <= 50_000
    taken = 0
    while pair.server.core.receive(pair.receiver, pair.now) is not None:
        taken += 1
    assert taken == 2000


@pytest.mark.requirement("AQ-R31")
def test_headers_of_messages_that_wait_for_room_are_bounded_in_sum() -> None:
    flow = Flow(receive_budget=1 << 20, initial_window=65536, streams=200)
    limits = Limits(frame_bytes=1 << 20)
    calls = dataclasses.replace(DEFAULT.calls, fragment_bytes=1 << 19)
    pair = Pair(dataclasses.replace(DEFAULT, flow=flow, limits=limits, calls=calls))
    headers = ((b"k", bytes(60_000)),)
    for number in range(100):
        sent = b"".join(map(bytes, codec.encode_message(number, bytes(5000), headers)))
        pair.client.inject(codec.encode_route_to(0), sent[:-5000], fin=False)
        pair.run()
        waiting = pair.server.core.incoming.streams.values()
        kept = sum(stream.head.overhead for stream in waiting if stream.head is not None)
        assert kept < 3 << 20
        if pair.server.core.error is not None:
            break
    assert pair.server.core.error is not None
    assert "or for room; Flow.receive_budget" in str(pair.server.core.error)
