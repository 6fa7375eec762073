"""How a connection begins and ends, what breaks it, and its limits."""

from __future__ import annotations

from typing import Any

import pytest

from aqueduct._speedups.reactivesocket import reactive_frames as codec
from aqueduct.config import ReactiveSocket as Settings
from aqueduct.errors import ConfigError, FrameError, LimitExceeded, LocalProtocolError, VersionError
from aqueduct.protocol.reactivesocket import events, reasons
from aqueduct.protocol.reactivesocket.connection import ReactiveConnection
from tests.protocol.reactivesocket.peers import CODES, Lone, Pair, frame, response
from tests.reference.reactivesocket import Frame, decode, encode

STREAM, ONE, FIRE = codec.REQUEST_STREAM, codec.REQUEST_RESPONSE, codec.REQUEST_FNF


# The beginning


@pytest.mark.requirement("RS-12")
@pytest.mark.requirement("RS-R5")
def test_a_client_sends_setup_first_and_requests_at_once() -> None:
    lone = Lone(client=True, begun=False, setup=b"\x00any\xff")
    lone.core.request(ONE, b"x")
    assert [(each.name, each.stream, each.data) for each in lone.sent()] == [
        ("SETUP", 0, b"\x00any\xff"),
        ("REQUEST_RESPONSE", 1, b"x"),
    ]


@pytest.mark.requirement("RS-12")
@pytest.mark.requirement("RS-R5")
def test_a_server_answers_and_requests_once_it_has_accepted() -> None:
    lone = Lone(begun=False)
    heard = lone.receive(frame("SETUP", data=b"\x00any\xff") + frame("REQUEST_RESPONSE", 1))
    assert heard[0] == (events.SETUP, b"\x00any\xff")
    assert heard[1][:2] == (events.REQUEST, 1)
    says = "the SETUP is not accepted yet"
    with pytest.raises(LocalProtocolError, match=says):
        lone.core.request(ONE)
    with pytest.raises(LocalProtocolError, match=says):
        lone.core.complete(1, b"x")
    with pytest.raises(LocalProtocolError, match=says):
        lone.core.fail_stream(1, "x")
    lone.core.accept()
    assert lone.core.idle
    assert lone.core.complete(1, b"x")
    assert lone.core.request(ONE) == 2
    with pytest.raises(LocalProtocolError, match="no SETUP to reject"):
        lone.core.reject("late")


@pytest.mark.requirement("RS-12")
@pytest.mark.requirement("RS-R13")
def test_a_setup_is_rejected() -> None:
    server = Lone(begun=False)
    server.receive(frame("SETUP") + frame("REQUEST_RESPONSE", 1))
    server.core.reject("who are you?")
    assert not server.core.responding
    (sent,) = server.sent()
    assert (sent.name, sent.stream) == ("ERROR", 0)
    assert sent.data == b"REJECTED_SETUP: who are you?"
    assert server.receive(frame("REQUEST_RESPONSE", 3)) == []
    with pytest.raises(LocalProtocolError, match="the connection has ended"):
        server.core.request(ONE)
    client = Lone(client=True)
    client.core.request(ONE)
    assert client.receive(encode(sent)) == [(events.REJECTED, sent.data)]
    assert not client.core.requested
    assert reasons.decode_reason(sent.data) == ("REJECTED_SETUP", "who are you?")


@pytest.mark.parametrize(
    ("data", "event"),
    [
        (b"REJECTED_SETUP: who are you?", events.REJECTED),
        (b"INVALID_SETUP: too large", events.REJECTED),
        (b"go away", events.REJECTED),
        (b"", events.REJECTED),
        (b"\xff" * 100, events.REJECTED),
        (b"INVALID: a frame is too large", events.PEER_FAILED),
        (b"CANCELED: it closes", events.PEER_FAILED),
    ],
)
def test_an_error_that_does_not_mean_the_setup_does_not_reject_it(data: bytes, event: str) -> None:
    client = Lone(client=True)
    assert client.receive(frame("ERROR", 0, data)) == [(event, data)]


@pytest.mark.requirement("RS-12")
@pytest.mark.parametrize(
    "data",
    [response(1), frame("ERROR", 1), frame("REQUEST_FNF", 2), frame("REQUEST_STREAM", 2, n=1)],
)
def test_a_client_knows_that_it_is_accepted(data: bytes) -> None:
    lone = Lone(client=True)
    lone.core.request(ONE)
    assert lone.receive(frame("REQUEST_N", 9, n=1), frame("CANCEL", 9)) == []
    assert lone.receive(data)[0] == (events.ACCEPTED,)
    assert (events.ACCEPTED,) not in lone.receive(data)
    assert lone.receive(frame("ERROR", 0, b"bye")) == [(events.PEER_FAILED, b"bye")]


def test_accept_and_reject_are_for_servers_that_were_asked() -> None:
    for lone in (Lone(client=True), Lone(begun=False)):
        with pytest.raises(LocalProtocolError, match="no SETUP to accept"):
            lone.core.accept()
        with pytest.raises(LocalProtocolError, match="no SETUP to reject"):
            lone.core.reject("no")


def test_a_connection_may_end_right_behind_its_setup() -> None:
    """The application has not heard of it yet when it answers the SETUP."""
    for answer in (ReactiveConnection.accept, lambda core: core.reject("no")):
        lone = Lone(begun=False)
        lone.receive(frame("SETUP") + frame("RESPONSE", 0))
        answer(lone.core)
        (sent,) = lone.sent()
        assert sent.data.startswith(b"INVALID: a RESPONSE frame on stream 0")


@pytest.mark.requirement("RS-R12")
@pytest.mark.parametrize(
    "first", [frame("REQUEST_RESPONSE", 1), frame("CANCEL", 1), response(1), frame("ERROR", 1)]
)
def test_a_first_frame_that_is_no_setup(first: bytes) -> None:
    lone = Lone(begun=False)
    assert "and no SETUP (RS-12)" in lone.fails(first)
    (sent,) = lone.sent()
    assert (sent.name, sent.stream) == ("ERROR", 0)
    assert sent.data.startswith(b"INVALID_SETUP: the first frame is")
    lenient = Lone(begun=False, setup_required=False)
    lenient.receive(first)
    assert lenient.core.error is None
    assert lenient.core.request(ONE) == 2


# The end


@pytest.mark.requirement("RS-R12")
@pytest.mark.parametrize(
    ("data", "kind", "says"),
    [
        (b"\x00\x00\x00\x0b", FrameError, "a frame of 11 bytes"),
        (b"\x00\x00\x00\x10\x01\x00\x00\x11" + bytes(8), VersionError, "version 1"),
        (b"\x00\x00\x00\x10" + bytes(12), FrameError, "type 0, which is reserved"),
        (frame("SETUP", 1), FrameError, "a SETUP frame on stream 1"),
        (frame("REQUEST_STREAM", 0, n=1), FrameError, "a REQUEST_STREAM frame on stream 0"),
        (frame("RESPONSE", 0), FrameError, "a RESPONSE frame on stream 0"),
        (encode(Frame(0x30, 5)), FrameError, "type 0x30, which is not known"),
        (encode(Frame(0xFFFF, extended_type=7)), FrameError, "an extension of type 0x7"),
        (frame("CANCEL", 1, b"x"), FrameError, "a CANCEL frame of 17 bytes; it has 16"),
        (b"GET / HTTP/1.1\r\n\r\n", LimitExceeded, "ReactiveSocket.frame_bytes"),
    ],
)
def test_what_ends_a_connection(data: bytes, kind: type[Exception], says: str) -> None:
    """A server says why on stream 0, a client just closes; nothing else leaves."""
    for client in (False, True):
        lone = Lone(client=client)
        lone.core.request(STREAM, n=1)
        lone.receive(frame("REQUEST_STREAM", 7, n=1))
        assert says in lone.fails(data)
        assert isinstance(lone.core.error, kind)
        sent = lone.sent()
        assert [(each.name, each.stream) for each in sent] == [("ERROR", 0)] * (not client)
        assert all(each.data == f"INVALID: {lone.core.error}".encode() for each in sent)
        assert lone.receive(frame("REQUEST_STREAM", 9, n=1)) == []
        assert lone.core.room() is None
        lone.core.landed(5, 0.0)
        lone.core.receive_eof()
        assert lone.drain() == []


@pytest.mark.requirement("RS-R4")
@pytest.mark.requirement("RS-R12")
def test_what_may_be_ignored_is() -> None:
    lone = Lone(extensions={7})
    ignore = codec.IGNORE
    for each in (Frame(0x30, 0, ignore), Frame(0x30, 5, ignore, data=b"x")):
        assert lone.receive(encode(each)) == []
    assert lone.receive(encode(Frame(0xFFFF, flags=ignore, extended_type=8, data=b"x"))) == []
    for flags in (0, ignore):
        known = encode(Frame(0xFFFF, flags=flags, extended_type=7, data=b"x"))
        assert lone.receive(known) == [(events.EXTENSION, 7, b"x", 257)]
    assert lone.core.error is None


@pytest.mark.requirement("RS-R13")
def test_an_error_has_any_bytes() -> None:
    lone = Lone(client=True)
    stream = lone.core.request(ONE)
    assert lone.receive(frame("ERROR", stream, b"\xff\x00"))[-1] == (
        events.ERROR,
        stream,
        b"\xff\x00",
        258,
    )
    assert reasons.decode_reason(b"\xff") == ("", "\ufffd")
    assert reasons.decode_reason(b"OOPS: x") == ("", "OOPS: x")
    assert reasons.decode_reason("REJECTED: größer".encode()) == ("REJECTED", "größer")
    with pytest.raises(LocalProtocolError, match="an error begins with 'OOPS'; known: REJECTED_"):
        reasons.encode_reason("OOPS", "x", 100)
    assert reasons.encode_reason("INVALID", "äää", 12) == "INVALID: ä".encode()


def test_the_end_of_the_bytes() -> None:
    lone = Lone()
    lone.core.receive_eof()
    assert lone.drain() == [(events.ENDED,)]
    lone = Lone()
    lone.receive(frame("CANCEL", 1)[:9])
    lone.core.receive_eof()
    assert "inside a frame" in str(lone.core.error)


def test_messages_carry_one_frame_each() -> None:
    client = ReactiveConnection(client=True, framed=False)
    server = ReactiveConnection(client=False, framed=False)
    stream = client.request(STREAM, b"x" * 5000, n=2)
    while (message := client.take_message()) is not None:
        data = b"".join(map(bytes, message[0]))
        assert len(decode(data, framed=False)) == 1
        server.receive_data(data, 0.0)
    assert [event[0] for event in server.events_received()] == [events.SETUP, events.REQUEST]
    server.accept()
    assert server.complete(stream, b"y")
    message = server.take_message()
    assert message is not None
    client.receive_data(b"".join(message[0]), 0.0)
    assert client.events_received()[-1] == (events.COMPLETED, stream)


def test_large_data_is_read_to_its_place() -> None:
    lone = Lone()
    data = frame("REQUEST_RESPONSE", 1, bytes(range(200)) * 50)
    assert lone.receive(data[:100]) == []
    room = lone.core.room()
    assert room is not None
    assert lone.core.held_bytes >= 10_000
    room[:] = data[100:]
    lone.core.landed(len(room), 0.0)
    (event,) = lone.drain()
    assert event[4] == bytes(range(200)) * 50
    assert lone.core.room() is None


@pytest.mark.requirement("RS-R15")
def test_silence_has_no_deadline() -> None:
    """Nothing leaves and nothing ends by time alone, while a stream waits for items."""
    pair = Pair()
    stream = pair.client.core.request(STREAM, n=1)
    pair.move()
    for lone in (pair.client, pair.server):
        assert lone.core.next_deadline() is None
        lone.core.handle_deadline(1e9)
        assert lone.core.idle
    assert list(pair.server.core.responding) == [stream]


# Limits


def limited(**limits: Any) -> Settings:
    return Settings(**limits)


def test_a_large_setup_is_refused_before_it_takes_memory() -> None:
    lone = Lone(limited(setup_bytes=100), begun=False)
    head = codec.encode_head(codec.SETUP, 0, 101)
    assert "113 bytes is above 112 (ReactiveSocket.setup_bytes)" in lone.fails(head)
    assert lone.core.held_bytes < 1000
    lone = Lone(limited(setup_bytes=100), begun=False, setup_required=False)
    assert "a SETUP of 101 bytes is above 100" in lone.fails(frame("SETUP", data=bytes(101)))
    with pytest.raises(LocalProtocolError, match="a SETUP of 101 bytes is above 100"):
        Lone(limited(setup_bytes=100), client=True, setup=bytes(101))


def test_a_frame_above_the_limit() -> None:
    lone = Lone(limited(frame_bytes=256))
    says = "a frame of 257 bytes is above 256 (ReactiveSocket.frame_bytes)"
    assert says in lone.fails(frame("REQUEST_FNF", 1, bytes(245)))
    lone = Lone(limited(frame_bytes=256), client=True)
    assert lone.core.request(ONE, bytes(244)) == 1
    with pytest.raises(LocalProtocolError, match=r"245 bytes; 244 are the most.*frame_bytes"):
        lone.core.request(ONE, bytes(245))
    with pytest.raises(LocalProtocolError, match="237 bytes; 236 are the most"):
        lone.core.request(STREAM, bytes(237), n=1)
    for size in (255, (1 << 30) + 1):
        with pytest.raises(ConfigError, match=rf"frame_bytes is {size}; it must be 256 to"):
            Settings(frame_bytes=size)


@pytest.mark.requirement("RS-R8")
@pytest.mark.parametrize(
    ("limits", "frames", "says"),
    [
        ({"item_bytes": 10}, [("b", 6), ("", 5)], "11 bytes is above 10 (ReactiveSocket.item_b"),
        ({"item_bytes": 10}, [("be", 11)], "11 bytes is above 10 (ReactiveSocket.item_bytes)"),
        ({"fragments": 3}, [("b", 0), ("", 0), ("", 0), ("", 0)], "more than 3 fragments (React"),
        ({"fragments_bytes": 700}, [("b", 100), ("", 100)], "(ReactiveSocket.fragments_bytes)"),
    ],
)
def test_an_item_above_a_limit_is_cancelled_alone(
    limits: dict[str, int], frames: list[tuple[str, int]], says: str
) -> None:
    lone = Lone(limited(**limits), client=True)
    stream, other = (lone.core.request(STREAM, n=9) for _ in range(2))
    lone.sent()
    lone.receive(response(other, b"12", "b"))
    lone.receive(*(response(stream, bytes(size), bits) for bits, size in frames))
    name, which, error = lone.heard[-1]
    assert (name, which) == (events.BROKEN, stream)
    assert isinstance(error, LimitExceeded) and says in str(error)
    assert [(each.name, each.stream) for each in lone.sent()] == [("CANCEL", stream)]
    lone.receive(response(other, b"3", "e"))
    assert lone.heard[-1][:3] == (events.ITEM, other, [b"12", b"3"])
    assert lone.core._requester.fragments_cost == 0


def test_an_item_that_the_peer_would_refuse_is_not_sent() -> None:
    lone = Lone(limited(item_bytes=1000, frame_bytes=256, fragments=3))
    lone.receive(frame("REQUEST_STREAM", 1, n=2))
    with pytest.raises(LocalProtocolError, match=r"1001 bytes is above 1000.*item_bytes"):
        lone.core.item(1, bytes(1001))
    with pytest.raises(LocalProtocolError, match=r"more than 3 fragments.*\.fragments"):
        lone.core.item(1, bytes(3 * 244 + 1))
    assert lone.core.demand(1) == 2
    assert lone.core.item(1, bytes(3 * 244))


def test_streams_above_the_limit_are_rejected() -> None:
    lone = Lone(limited(streams=2))
    for stream in (1, 3):
        lone.receive(frame("REQUEST_STREAM", stream, n=1))
    assert lone.receive(frame("REQUEST_STREAM", 5, n=1)) == []
    assert lone.receive(frame("REQUEST_FNF", 7))[0][:2] == (events.REQUEST, 7)
    (sent,) = lone.sent()
    assert sent.stream == 5
    assert sent.data.startswith(b"REJECTED: 2 streams are open, and no more are served (React")
    client = Lone(limited(streams=1), client=True)
    client.core.request(ONE)
    with pytest.raises(LocalProtocolError, match=r"1 requests are open; ReactiveSocket\.streams"):
        client.core.request(ONE)
    client.core.request(FIRE)  # it opens no stream


def test_a_peer_that_causes_answers_and_reads_none_is_cut_off() -> None:
    lone = Lone(limited(streams=1, unsent_answers=5))
    lone.receive(frame("REQUEST_STREAM", 1, n=1))
    lone.receive(*(frame("REQUEST_STREAM", 3 + 2 * k, n=1) for k in range(5)))
    assert lone.core.error is None
    says = "more than 5 errors and cancels wait to leave"
    assert says in lone.fails(frame("REQUEST_STREAM", 99, n=1))
    assert len(lone.sent()) == 1


def test_answers_that_come_at_once_are_no_fault_of_the_peer() -> None:
    lone = Lone(limited(streams=1, unsent_answers=5))
    for first in (3, 103):
        lone.receive(b"".join(frame("REQUEST_STREAM", first + 2 * k, n=1) for k in range(21)))
        assert lone.core.error is None
        assert lone.core.unheard
        assert [each.name for each in lone.sent()] == ["ERROR"] * (20 if first == 3 else 21)
        assert not lone.core.unheard


def test_streams_that_are_due_at_once_are_answered_all() -> None:
    lone = Lone(limited(unsent_answers=5))
    lone.receive(b"".join(frame("REQUEST_STREAM", 1 + 2 * k, n=0) for k in range(20)))
    lone.core.handle_deadline(1000.0)
    assert lone.core.error is None
    assert [each.name for each in lone.sent()] == ["ERROR"] * 20


def test_a_connection_is_full_until_what_came_is_released() -> None:
    lone = Lone(limited(receive_bytes=3000))
    lone.receive(frame("REQUEST_FNF", 1, bytes(500)))
    assert not lone.core.full
    lone.receive(frame("REQUEST_FNF", 3, bytes(500)))
    assert lone.core.full
    costs = [event[-1] for event in lone.heard]
    assert costs == [1780, 1780]  # of 500 bytes, and as much as a stream
    for cost in costs:
        lone.core.release(cost)
    assert not lone.core.full
    assert lone.core.held_bytes == 0
    with pytest.raises(LocalProtocolError, match="1 bytes released; 0 are held"):
        lone.core.release(1)


def test_a_full_connection_reads_on_while_a_stream_waits_to_be_asked() -> None:
    lone = Lone(limited(receive_bytes=1000))
    lone.receive(frame("REQUEST_STREAM", 1, bytes(800), n=1))
    assert lone.core.full
    assert lone.core.item(1, b"x")  # the stream is not done with its data, and wants a REQUEST_N
    assert not lone.core.full
    lone.sent()
    assert lone.receive(frame("REQUEST_RESPONSE", 3), frame("REQUEST_FNF", 5)) == []
    (rejected,) = lone.sent()
    assert rejected.stream == 3
    assert rejected.data.startswith(b"REJECTED: 1056 bytes of earlier requests and items are at")
    assert lone.receive(frame("REQUEST_N", 1, n=1)) == [(events.DEMAND, 1)]
    assert lone.core.full
    assert lone.core.complete(1, b"y")
    assert lone.core.full  # a stream that has ended waits for nothing
    lone.core.release(1056)
    assert len(lone.receive(frame("REQUEST_RESPONSE", 7))) == 1


def test_extensions_that_the_application_does_not_take_end_the_connection() -> None:
    lone = Lone(limited(receive_bytes=1000), extensions={7})
    lone.receive(frame("REQUEST_STREAM", 1, n=0))
    known = encode(Frame(0xFFFF, extended_type=7, data=bytes(800)))
    lone.receive(known)
    assert lone.core.error is None
    assert "an extension of type 0x7: 1312 bytes of earlier requests" in lone.fails(known)


@pytest.mark.parametrize("end", ["cancel", "error", "complete", "connection"])
def test_a_stream_that_ends_does_not_wait_to_be_asked(end: str) -> None:
    lone = Lone(limited(receive_bytes=1000))
    lone.receive(frame("REQUEST_STREAM", 1, bytes(800), n=0), frame("REQUEST_STREAM", 3, n=1))
    assert not lone.core.full
    if end == "cancel":
        lone.receive(frame("CANCEL", 1))
    elif end == "error":
        lone.core.fail_stream(1, "no")
    elif end == "complete":
        lone.core.complete(1)
    else:
        lone.core.receive_eof()
    assert lone.core.full


@pytest.mark.requirement("RS-18")
@pytest.mark.parametrize("end", ["complete", "fail_stream"])
def test_a_cancel_drops_what_waits_of_a_stream_that_has_ended(end: str) -> None:
    lone = Lone()
    lone.receive(frame("REQUEST_STREAM", 1, n=9), frame("REQUEST_STREAM", 3, n=9))
    for number in range(3):
        lone.core.item(1, b"old %d" % number)
    lone.core.item(3, b"of another")
    getattr(lone.core, end)(1, *(["no"] if end == "fail_stream" else []))
    assert lone.receive(frame("CANCEL", 1)) == []  # the application has done with it
    assert [each.data for each in lone.sent()] == [b"of another"]
    assert not lone.core.queued_bytes
    assert lone.receive(frame("REQUEST_RESPONSE", 1))[0][:2] == (events.REQUEST, 1)
    lone.core.complete(1, b"new")
    assert [each.data for each in lone.sent()] == [b"new"]


def test_an_id_that_comes_again_early_gets_its_items_behind_those_that_wait() -> None:
    lone = Lone()
    lone.receive(frame("REQUEST_STREAM", 1, n=9))
    for data in (b"old", b"older"):
        lone.core.item(1, data)
    lone.core.complete(1)
    assert lone.receive(frame("REQUEST_RESPONSE", 1))[0][:2] == (events.REQUEST, 1)
    lone.core.complete(1, b"new")
    assert [each.data for each in lone.sent()] == [b"old", b"older", b"", b"new"]


def test_a_cancel_drops_nothing_of_the_other_requester() -> None:
    lone = Lone()
    stream = lone.core.request(ONE, b"mine")
    lone.receive(frame("CANCEL", stream))
    assert [each.data for each in lone.sent()] == [b"mine"]


def test_what_waits_to_leave_is_bounded() -> None:
    lone = Lone(limited(send_bytes=1000))
    lone.receive(frame("REQUEST_STREAM", 1, n=9))
    assert lone.core.item(1, bytes(800))
    assert not lone.core.writable
    for refused in (
        lambda: lone.core.item(1, b"x"),
        lambda: lone.core.complete(1, b"x"),
        lambda: lone.core.request(FIRE),
    ):
        with pytest.raises(LocalProtocolError, match=r"ReactiveSocket.send_bytes is the limit"):
            refused()
    assert lone.core.demand(1) == 8
    assert len(lone.sent()) == 1
    assert lone.drain() == [(events.WRITABLE,)]
    assert lone.core.writable
    assert lone.core.item(1, bytes(1000))
    assert not lone.core.writable
    assert lone.receive(frame("CANCEL", 1)) == [(events.CANCELLED, 1), (events.WRITABLE,)]


def test_demand_and_requests_without_end_cost_little() -> None:
    """Peers that ask and do not read: REQUEST_N adds up, and a cancelled request leaves nothing."""
    lone = Lone()
    lone.receive(frame("REQUEST_STREAM", 1, n=1))
    lone.core.release(256)
    before = lone.core.held_bytes
    assert lone.receive(frame("REQUEST_N", 1, n=5) * 10_000) == []
    for _ in range(1000):
        lone.receive(frame("REQUEST_STREAM", 3, n=0) + frame("CANCEL", 3))
        lone.core.release(256)
    assert lone.core.held_bytes == before
    assert not lone.core._responder._unasked
    assert lone.core.idle
    assert CODES["CANCEL"] == codec.CANCEL
