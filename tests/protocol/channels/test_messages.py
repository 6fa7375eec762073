"""Messages, order, acks, flow: what a channel does while it lives."""

from __future__ import annotations

import dataclasses
import random

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Flow, Limits
from aqueduct.errors import ConnectionLost, LocalProtocolError
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import Mode, SenderHalf
from tests.support.pair import Pair, Side


def tags_of(raw: bytes | bytearray, *, from_server: bool) -> list[int]:
    decoder = codec.FrameDecoder(from_server=from_server)
    decoder.feed(bytes(raw))
    tags = []
    while (frame := decoder.next()) is not None:
        tags.append(frame.TAG)
    return tags


def tags_sent(side: Side, *, from_server: bool) -> list[list[int]]:
    """The tags of every sequence that ``side`` received from its peer."""
    return [tags_of(raw, from_server=from_server) for raw in side.raw.values()]


@pytest.mark.requirement("AQ-26")
@pytest.mark.requirement("AQ-27")
@pytest.mark.requirement("AQ-29")
def test_the_version_and_headers_are_exchanged_at_the_start() -> None:
    pair = Pair(connect=False)
    pair.run()
    assert pair.client.core.ready and pair.server.core.ready
    assert pair.client.core.peer_headers == ((b"server-0", b""),)
    from_client = tags_sent(pair.server, from_server=False)
    from_server = tags_sent(pair.client, from_server=True)
    assert from_client[0] == [239, 2]
    assert [tags for tags in from_client if 1 in tags] == [[1]]  # acked once, VERSION not needed
    assert sum(tags.count(1) for tags in from_server) == 1
    assert sum(tags.count(2) for tags in from_server) == 1
    # Once acknowledged, sequences begin without VERSION.
    pair.client.send(pair.sender, b"x")
    pair.run()
    assert tags_sent(pair.server, from_server=False)[-1] == [3, 4]


@pytest.mark.requirement("AQ-30")
def test_messages_before_the_answer_wait_at_the_gate_and_are_not_lost() -> None:
    pair = Pair(connect=False)
    pair.server.answer_headers = None
    pair.client.flush()
    for index in range(3):
        pair.client.send(pair.sender, b"%d" % index)
    pair.run()
    assert pair.server.take(pair.receiver) is None
    assert not pair.server.core.ready
    pair.server.core.accept_headers((), pair.now)
    pair.run()
    assert [m.payload for m in pair.server.take_all(pair.receiver)] == [b"0", b"1", b"2"]


@pytest.mark.requirement("AQ-R10")
@pytest.mark.requirement("AQ-R30")
def test_refused_headers_close_with_their_code_and_reason() -> None:
    pair = Pair(connect=False)
    pair.server.answer_headers = None
    pair.run()
    pair.server.core.reject_headers("no such tenant")
    pair.run()
    error = pair.client.ended
    assert isinstance(error, ConnectionLost)
    assert (error.code, error.remote) == (4, True)
    assert "no such tenant" in error.reason


@pytest.mark.requirement("AQ-31")
@pytest.mark.requirement("AQ-32")
@pytest.mark.requirement("AQ-R34")
@pytest.mark.parametrize("chunk", [1, 7, 1000, 1 << 16])
def test_ordered_messages_arrive_in_order_on_one_stream(chunk: int) -> None:
    pair = Pair(chunk=chunk, seed=3)
    rng = random.Random(1)
    payloads = [rng.randbytes(rng.choice((0, 1, 200, 5000))) for _ in range(40)]
    streams = len(pair.server.raw)
    for payload in payloads:
        pair.client.send(pair.sender, payload, headers=((b"k-1", payload[:3]),))
    pair.run()
    received = pair.server.take_all(pair.receiver)
    assert [bytes(m.payload) for m in received] == payloads
    assert [m.number for m in received] == list(range(40))
    assert [m.headers for m in received] == [((b"k-1", p[:3]),) for p in payloads]
    assert len(pair.server.raw) == streams + 1


@pytest.mark.requirement("AQ-31")
def test_unordered_messages_take_a_stream_each_and_at_most_so_many_at_once() -> None:
    config = dataclasses.replace(DEFAULT, flow=Flow(unordered_streams=4))
    pair = Pair(config)
    before = len(pair.server.raw)
    sent = {b"%d" % index for index in range(50)}
    for payload in sorted(sent):
        pair.client.send(pair.sender, payload, mode=Mode.UNORDERED)
    opened = [e for e in pair.client.applied if e[0] == effects.WRITE and e[1] >= before]
    assert len(opened) <= 4 + 1
    pair.run()
    assert {bytes(m.payload) for m in pair.server.take_all(pair.receiver)} == sent
    assert len(pair.server.raw) == before + 50
    assert pair.client.core.snapshot()["queued_bytes"] == 0


@pytest.mark.requirement("AQ-36")
def test_acks_go_out_within_the_delay_and_settle_the_sender() -> None:
    pair = Pair()
    for _ in range(10):
        pair.client.send(pair.sender, b"x")
    pair.run()
    assert pair.sender.unsettled
    pair.advance(DEFAULT.timing.ack_delay)
    assert not pair.sender.unsettled
    tags = tags_sent(pair.client, from_server=True)
    assert [3, 8] in tags  # one ACK_RELIABLE for all ten
    for _ in range(3):
        pair.client.send(pair.sender, b"y")
    pair.advance(1)
    assert not pair.sender.unsettled
    assert [3, 8, 8] in tags_sent(pair.client, from_server=True)


def test_small_windows_deliver_everything_and_never_exceed_the_budget() -> None:
    flow = Flow(
        receive_budget=200_000,
        channel_receive_bytes=100_000,
        initial_window=4096,
        admitted_window=16_384,
    )
    pair = Pair(dataclasses.replace(DEFAULT, flow=flow))
    rng = random.Random(5)
    payloads = [rng.randbytes(rng.choice((10, 3000, 30_000, 300_000))) for _ in range(40)]
    for payload in payloads:
        pair.client.send(pair.sender, payload)
    got: list[bytes] = []
    while len(got) < len(payloads):
        pair.run()
        # One message is always admitted, whatever its size.
        assert pair.receiver.queue.charged <= 100_000 + 300_000 + 512
        held = sum(len(raw) for raw in pair.server.raw.values()) - sum(map(len, got))
        assert held <= 100_000 + 300_000 + 64 * 1024
        taken = pair.server.take(pair.receiver)
        assert taken is not None
        got.append(bytes(taken.payload))
    assert got == payloads
    assert pair.receiver.queue.charged == 0
    assert pair.server.core.snapshot()["starved_receivers"] == 0


def test_a_full_channel_does_not_starve_another() -> None:
    flow = Flow(receive_budget=64 << 10, channel_receive_bytes=64 << 10, initial_window=4096)
    pair = Pair(dataclasses.replace(DEFAULT, flow=flow))
    first, second = (
        Attach(keep_sender=True, is_oneshot=False),
        Attach(keep_sender=True, is_oneshot=False),
    )
    pair.client.send(pair.sender, b"", first, second)
    pair.run()
    message = pair.server.take(pair.receiver)
    assert message is not None
    (slow, _), (fast, _) = message.attachments
    for _ in range(20):
        pair.client.send(first.half, bytes(30_000))
    for index in range(20):
        pair.client.send(second.half, b"%d" % index + bytes(20_000))
    for index in range(20):
        pair.run()
        taken = pair.server.take(fast)
        assert taken is not None and bytes(taken.payload).rstrip(b"\0") == b"%d" % index
    assert isinstance(slow, ReceiverHalf) and slow.queue
    for _ in range(20):
        pair.run()
        assert pair.server.take(slow) is not None


def test_a_sender_is_writable_below_its_high_water_mark_only() -> None:
    flow = Flow(channel_high_water=10_000, initial_window=4096)
    pair = Pair(dataclasses.replace(DEFAULT, flow=flow))
    half = pair.sender
    while half.writable:
        pair.client.send(half, bytes(3000))
    assert half.queued >= 10_000
    pair.client.core.wait_writable(half)
    pair.client.events.clear()
    pair.run()
    assert half.writable
    assert any(type(event).__name__ == "Writable" for event in pair.client.events)


@pytest.mark.parametrize("plain_first", [None, True, False])
def test_a_sender_is_told_when_half_of_its_queue_is_free(plain_first: bool | None) -> None:
    """And nobody waits longer for the sake of another who asked for more."""
    flow = Flow(channel_high_water=10_000)
    pair = Pair(dataclasses.replace(DEFAULT, flow=flow), connect=False)
    half = pair.sender
    while half.writable:
        pair.client.send(half, bytes(1000))
    core = pair.client.core
    (stream,) = core._shared.outgoing._message_waiting
    ways = {None: [True], True: [False, True], False: [True, False]}[plain_first]
    for ample in ways:
        core.wait_writable(half, ample=ample)
    core.events_received()
    while half.queued >= 10_000:
        core._shared.outgoing._release(stream, 100)
    core._reader.endings.unblock((half,))
    told = [type(event).__name__ for event in core.events_received()]
    assert told == ([] if plain_first is None else ["Writable"])
    while half.queued > 5_000:
        assert not core.events_received()
        core._shared.outgoing._release(stream, 100)
        core._reader.endings.unblock((half,))
    assert half.queued <= 5_000
    told += [type(event).__name__ for event in core.events_received()]
    assert told == ["Writable"]


def test_posts_are_plain_messages() -> None:
    """Where there is a stream; what cannot be sent is refused as by a send."""
    config = dataclasses.replace(DEFAULT, limits=Limits(frame_bytes=5 << 20))
    pair = Pair(config)
    headers = ((b"key", b"value"),)
    assert pair.sender.post(b"0", headers) is None  # nothing was done: there is no stream yet
    assert pair.client.core.send(pair.sender, b"0", pair.now, headers=headers) == 0
    for index in range(1, 4):
        assert pair.sender.post(b"%d" % index, headers) == index
    with pytest.raises(LocalProtocolError, match=r"above Limits\.frame_bytes"):
        pair.sender.post(bytes(6 << 20), ())
    pair.client.flush()
    pair.run()
    for index in range(4):
        taken = pair.server.take(pair.receiver)
        assert taken is not None
        assert (taken.number, bytes(taken.payload)) == (index, b"%d" % index)
        assert taken.headers == headers
    pair.sender.finish()
    assert pair.sender.post(b"late", ()) is None


@pytest.mark.requirement("AQ-R31")
def test_unacknowledged_messages_are_limited() -> None:
    config = dataclasses.replace(DEFAULT, limits=Limits(unacknowledged=5))
    pair = Pair(config)
    for _ in range(5):
        assert pair.sender.writable
        pair.client.send(pair.sender, b"x")
    assert not pair.sender.writable
    pair.client.core.wait_writable(pair.sender)
    pair.advance(1)
    assert pair.sender.writable


def test_placement_decides_where_payloads_land() -> None:
    pair = Pair()
    whole = bytearray(10)
    asked: list[tuple[object, int]] = []

    def place(headers: object, size: int) -> memoryview:
        offset = sum(size for _, size in asked)
        asked.append((headers, size))
        return memoryview(whole)[offset : offset + size]

    pair.receiver.queue.placement = place
    pair.client.send(pair.sender, b"hello", headers=((b"k", b"v"),))
    pair.client.send(pair.sender, b"world")
    pair.run()
    assert bytes(whole) == b"helloworld"
    assert asked == [(((b"k", b"v"),), 5), ((), 5)]
    assert len(pair.server.take_all(pair.receiver)) == 2


@pytest.mark.parametrize("size", [5, 5000, 50_000])
def test_a_placement_may_be_for_some_messages_alone(size: int) -> None:
    pair = Pair()
    whole = bytearray(size)
    asked: list[object] = []

    def place(headers: object, size: int) -> bytearray:
        asked.append(headers)
        return whole

    pair.receiver.queue.placement, pair.receiver.queue.placement_key = place, b"key"
    headers = [(), ((b"other", b"key"),), ((b"other", b"1"), (b"key", b"2")), ((b"k", b""),)]
    for number, pairs in enumerate(headers):
        pair.client.send(pair.sender, bytes([number]) * size, headers=pairs)
    pair.run()
    taken = pair.server.take_all(pair.receiver)
    assert [bytes(each.payload) for each in taken] == [bytes([k]) * size for k in range(4)]
    assert [each.payload is whole for each in taken] == [False, False, True, False]
    assert asked == [headers[2]]


def test_a_stream_of_large_messages_runs_ahead_further_and_further() -> None:
    """So that many are under way, however far the peer is; within a quarter of the budget."""
    cases = {64 << 20: [256, 512, 1024, 2048, 4096], 2 << 20: [256], 1 << 20: [128]}
    for budget, granted in cases.items():
        flow = dataclasses.replace(DEFAULT.flow, receive_budget=budget)
        pair = Pair(dataclasses.replace(DEFAULT, flow=flow))
        seen = set()
        for number in range(200):
            pair.client.send(pair.sender, bytes(64 << 10))
            pair.run()
            taken = pair.server.take(pair.receiver)
            assert taken is not None and taken.number == number
            (stream,) = pair.receiver.streams
            seen.add(stream.granted)
        assert seen == {size << 10 for size in granted}
        credits = [effect for effect in pair.server.applied if effect[0] == effects.CREDIT]
        assert len(credits) < (25 if budget == 64 << 20 else 210)  # not one for each
        assert pair.server.core.snapshot()["budget_used_bytes"] == max(seen)


def test_what_a_placement_raises_ends_the_channel_and_no_more() -> None:
    pair = Pair()

    def refuse(headers: object, size: int) -> None:
        raise ValueError("too much")

    pair.receiver.queue.placement = refuse
    pair.client.send(pair.sender, b"hello")
    pair.run()
    assert isinstance(pair.receiver.error, ValueError)
    assert type(pair.sender.error).__name__ == "ReceiverClosed"
    assert pair.server.core.error is None


@pytest.mark.requirement("AQ-R30")
@pytest.mark.requirement("AQ-R31")
def test_a_frame_above_the_limit_closes_with_code_5() -> None:
    small = dataclasses.replace(
        DEFAULT,
        limits=Limits(frame_bytes=100_000),
        calls=dataclasses.replace(DEFAULT.calls, fragment_bytes=1000),
    )
    pair = Pair(server_config=small)
    pair.client.send(pair.sender, bytes(200_000))
    pair.run()
    assert pair.server.close_code == 5
    assert pair.client.ended is not None and "frame_bytes" in pair.client.ended.reason


@pytest.mark.requirement("AQ-R31")
def test_attachment_limits_are_the_senders_error() -> None:
    config = dataclasses.replace(DEFAULT, limits=Limits(attachments=2, channels=10))
    pair = Pair(config)
    attaches = [Attach(keep_sender=True, is_oneshot=False) for _ in range(3)]
    with pytest.raises(LocalProtocolError, match=r"Limits\.attachments"):
        pair.client.send(pair.sender, b"", *attaches)
    for _ in range(4):
        pair.client.send(pair.sender, b"", *attaches[:2])
    with pytest.raises(LocalProtocolError, match=r"Limits\.channels"):
        pair.client.send(pair.sender, b"", *attaches[:2])
    pair.run()
    assert pair.server.core.error is None


@pytest.mark.requirement("AQ-R31")
def test_channels_above_the_limit_close_with_code_5() -> None:
    small = dataclasses.replace(DEFAULT, limits=Limits(channels=10))
    pair = Pair(server_config=small)
    for _ in range(10):
        pair.client.send(pair.sender, b"", Attach(keep_sender=True, is_oneshot=False))
    pair.run()
    assert pair.server.close_code == 5
    assert pair.client.ended is not None and "Limits.channels" in pair.client.ended.reason


@pytest.mark.requirement("AQ-35")
def test_streams_wait_above_the_transport_and_control_goes_first() -> None:
    config = dataclasses.replace(DEFAULT, flow=Flow(streams=8, unordered_streams=100))
    pair = Pair(config)
    pair.server.hold = 8  # the server gives no slot back
    for index in range(30):
        pair.client.send(pair.sender, b"%d" % index, mode=Mode.UNORDERED)
    pair.run()
    assert pair.client.core.snapshot()["streams_waiting"] > 0
    assert pair.link.client.openable >= 1  # a quarter is left for control
    pair.client.cancel(pair.sender)
    pair.run()
    assert type(pair.receiver.error).__name__ == "Cancelled"
    assert isinstance(pair.sender, SenderHalf)
    assert pair.client.core.snapshot()["queued_bytes"] == 0


def test_in_debug_a_buffer_that_changes_before_it_left_is_found() -> None:
    config = dataclasses.replace(DEFAULT, debug=True)
    for change in (False, True):
        pair = Pair(config)
        buffer = bytearray(100_000)
        pair.client.send(pair.sender, buffer)
        if change:
            buffer[50_000] = 1
        pair.run()
        if not change:
            assert pair.client.core.error is None
            assert len(pair.server.take_all(pair.receiver)) == 1
            continue
        assert pair.client.close_code == 6
        assert "copy=True" in str(pair.client.core.error)
