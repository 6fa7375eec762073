"""VERSION and connection headers: from the first byte to an open gate."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Flow, Limits
from aqueduct.errors import LocalProtocolError
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.events import HeadersReceived
from aqueduct.protocol.common.sender import Mode, SenderHalf
from tests.protocol.channels.peer import Peer, message, route

requirement = pytest.mark.requirement
VERSION, ACK = codec.VERSION, codec.ACK_VERSION
HEADERS = codec.encode_connection_headers(((b"who", b"me"),))
ENTRY = route(0)


def fresh(side: str = "client", **options: Any) -> Peer:
    """Speaks from the first byte on; a server under test answers the headers by itself."""
    peer = Peer(side, connect=False, **options)
    peer.pair.run()
    return peer


def payloads(peer: Peer) -> list[bytes]:
    """What arrived on the entrypoint."""
    return [bytes(m.payload) for m in peer.pair.server.take_all(peer.pair.receiver)]


# VERSION


@requirement("AQ-26")
@requirement("AQ-R6")
@requirement("AQ-12")
@pytest.mark.parametrize("side", ["client", "server"])
def test_every_sequence_begins_with_version_until_it_is_acknowledged(side: str) -> None:
    peer = fresh(side)
    if side == "client":  # the server is under test
        peer.say(VERSION, HEADERS)
        peer.say(VERSION, route(2))
        half = peer.core._registry.known(2)
    else:
        half = peer.pair.sender
    assert isinstance(half, SenderHalf)
    for mode in Mode:
        peer.other.send(half, b"early", mode=mode)
    peer.other.send(half, b"again", mode=Mode.UNRELIABLE)
    peer.pair.advance(1)  # with an announcement on a control stream
    streams = len(peer.look())
    assert streams >= 4 and len(peer.datagrams) == 2
    for said in (*(bytes(said.data) for said in peer.look().values()), *peer.datagrams):
        assert said.startswith(VERSION) and said.count(VERSION) == 1
    before = VERSION if side == "client" else VERSION + HEADERS
    peer.say(before, ACK)
    for mode in Mode:
        peer.other.send(half, b"later", mode=mode)
    peer.pair.run()
    later = [bytes(said.data) for said in list(peer.look().values())[streams:]]
    assert later and not any(VERSION in said for said in (*later, peer.datagrams[-1]))
    # A stream that was begun with VERSION stays as it is.
    ordered = next(said for said in peer.look().values() if b"early" in said.data)
    assert b"later" in ordered.data


@requirement("AQ-27")
@requirement("AQ-R8")
@pytest.mark.parametrize("carrier", ["stream", "datagram"])
@pytest.mark.parametrize("side", ["client", "server"])
def test_the_first_version_is_acknowledged_once_on_a_stream(side: str, carrier: str) -> None:
    peer = fresh(side)
    (peer.say if carrier == "stream" else peer.datagram)(VERSION)
    assert sum(frames.count(("ACK_VERSION",)) for frames in peer.told()) == 1
    (said,) = [said for said in peer.look().values() if ("ACK_VERSION",) in peer.frames(said)]
    assert peer.frames(said)[0] == ("VERSION", "0.0.0-AFTER")  # still required of this one
    assert said.fin
    peer.say(VERSION, VERSION)
    peer.datagram(VERSION)
    peer.say(VERSION, ACK, ACK)
    peer.say(ACK, VERSION)
    assert peer.core.error is None
    assert sum(frames.count(("ACK_VERSION",)) for frames in peer.told()) == 1


@requirement("AQ-R8")
def test_the_acknowledgement_may_share_a_stream_with_the_headers() -> None:
    peer = fresh()
    peer.say(VERSION, HEADERS)
    (said,) = peer.look().values()
    assert [frame[0] for frame in peer.frames(said)] == [
        "VERSION",
        "ACK_VERSION",
        "CONNECTION_HEADERS",
    ]


@requirement("AQ-R6")
@requirement("AQ-28")
@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("first", [HEADERS, ACK, ENTRY], ids=["headers", "ack", "route"])
@pytest.mark.parametrize("carrier", ["stream", "datagram"])
def test_a_sequence_without_version_closes_and_nothing_after_it_is_processed(
    side: str, first: bytes, carrier: str
) -> None:
    peer = fresh(side)
    (peer.say if carrier == "stream" else peer.datagram)(first)
    assert peer.closed_with == 2
    peer.say(VERSION, HEADERS)
    peer.say(VERSION, ENTRY)
    assert not peer.core.ready and peer.core.peer_headers is None


@requirement("AQ-28")
@requirement("AQ-R9")
def test_only_the_first_frame_is_checked() -> None:
    peer = fresh()
    peer.say(VERSION, VERSION, HEADERS, VERSION, ACK)
    assert peer.core.error is None and peer.core.ready
    other = fresh()
    other.say(HEADERS, VERSION)
    assert other.closed_with == 2
    peer.say(ACK, VERSION, ENTRY, message(0, b"fine"))  # after ACK_VERSION was sent
    assert payloads(peer) == [b"fine"]


@requirement("AQ-R7")
def test_the_first_frame_is_checked_when_it_is_whole() -> None:
    peer = fresh()
    stream = peer.say(HEADERS[:-1], fin=False)
    assert peer.core.error is None
    peer.say(VERSION)  # is acknowledged, so the other sequence may do without
    peer.more(stream, HEADERS[-1:], fin=True)
    assert peer.core.error is None and peer.core.ready


@requirement("AQ-28")
@requirement("AQ-R6")
@pytest.mark.parametrize("acknowledged", [False, True])
@pytest.mark.parametrize("version", [b"", VERSION], ids=["without", "with"])
@pytest.mark.parametrize("carrier", ["stream", "datagram"])
def test_the_check_ends_when_the_acknowledgement_is_sent(
    carrier: str, version: bytes, acknowledged: bool
) -> None:
    """Not when VERSION is received: a carrier may give the core several inputs at once."""
    core, now = fresh("server").core, 200.0
    core.receive_stream(0, VERSION + HEADERS, True, now)
    if acknowledged:
        assert core.effects_to_apply()
    data = version + route(3) + message(0)
    if carrier == "stream":
        core.receive_stream(1, data, True, now)
    else:
        core.receive_datagram(data, now)
    assert (core.error is None) is (acknowledged or bool(version))


@requirement("AQ-R6")
def test_streams_and_datagrams_are_checked_in_each_direction_alone() -> None:
    """What the peer acknowledged to us says nothing of what we acknowledged to it."""
    peer = fresh("server")
    peer.say(VERSION, ACK, HEADERS)
    assert peer.core.error is None
    one_sided = fresh()
    one_sided.say(VERSION[:-1], fin=False)
    one_sided.say(ACK)  # nothing was sent to be acknowledged, and no VERSION leads
    assert one_sided.closed_with == 2


@requirement("AQ-R6")
@requirement("AQ-28")
@pytest.mark.parametrize("data", [ENTRY, VERSION + ENTRY], ids=["without", "with"])
def test_a_datagram_between_the_headers_and_our_acknowledgement_begins_with_version(
    data: bytes,
) -> None:
    peer = fresh("server")
    peer.core.receive_stream(0, VERSION + HEADERS, True, peer.pair.now)
    assert peer.core.ready
    peer.core.receive_datagram(data, peer.pair.now)  # no effect was taken, so nothing was sent
    assert (peer.core.error is None) is (data != ENTRY)


@requirement("AQ-R6")
def test_a_long_sequence_begun_with_version_stays_valid() -> None:
    peer = fresh()
    stream = peer.say(VERSION, HEADERS, ENTRY, message(0, b"one"), fin=False)
    peer.say(VERSION, ACK)
    peer.more(stream, message(1, b"two"), fin=True)
    assert peer.core.error is None
    assert payloads(peer) == [b"one", b"two"]


@requirement("AQ-R6")
def test_version_counts_towards_the_size_of_a_datagram() -> None:
    limit = 200
    peer = fresh("server", datagram_limit=limit)
    plain = len(ENTRY + message(0))
    sender = peer.pair.sender
    peer.other.send(sender, bytes(limit - plain - 1 - len(VERSION)), mode=Mode.UNRELIABLE)
    peer.look()
    assert [len(data) for data in peer.datagrams] == [limit]
    peer.other.send(sender, bytes(limit - plain - len(VERSION)), mode=Mode.UNRELIABLE)
    peer.look()
    assert len(peer.datagrams) == 1  # by stream
    peer.say(VERSION, ACK, HEADERS)
    peer.other.send(sender, bytes(limit - plain - 1), mode=Mode.UNRELIABLE)
    peer.look()
    assert [len(data) for data in peer.datagrams] == [limit, limit]


@requirement("AQ-R5")
@requirement("AQ-12")
@pytest.mark.parametrize("place", [1, 7, 8, 15, 16, 17, 27])
@pytest.mark.parametrize("carrier", ["stream", "datagram"])
def test_another_version_closes_with_code_3(place: int, carrier: str) -> None:
    peer = fresh()
    other = bytearray(VERSION)
    other[place] ^= 1
    (peer.say if carrier == "stream" else peer.datagram)(bytes(other))
    assert peer.closed_with == 3


@requirement("AQ-R5")
def test_a_long_version_is_not_waited_for() -> None:
    peer = fresh()
    peer.say(VERSION[:16] + b"\xff\x01", fin=False)
    assert peer.core.error is None  # 255 bytes may come
    peer.say(VERSION[:16] + b"\x80\x02", fin=False)
    assert peer.closed_with == 3


# Connection headers


@requirement("AQ-R10")
@requirement("AQ-29")
@requirement("AQ-14")
@requirement("AQ-R8")
def test_the_server_answers_once_it_has_the_clients_headers() -> None:
    peer = fresh()
    peer.other.answer_headers = None
    peer.say(VERSION)
    assert peer.told() == [[("ACK_VERSION",)]]
    peer.say(HEADERS)
    assert peer.core.peer_headers == ((b"who", b"me"),)
    assert peer.told() == [[("ACK_VERSION",)]]
    peer.core.accept_headers(((b"name", b"x"),), peer.pair.now)
    peer.other.flush()
    assert peer.told()[1:] == [[("CONNECTION_HEADERS", ((b"name", b"x"),))]]
    with pytest.raises(LocalProtocolError, match="once"):
        peer.core.accept_headers((), peer.pair.now)
    peer.pair.advance(5)
    assert len(peer.told()) == 2


@requirement("AQ-29")
def test_the_client_says_its_headers_at_the_start_on_a_stream() -> None:
    peer = fresh("server")
    assert peer.told() == [[("CONNECTION_HEADERS", ())]]
    peer.say(VERSION, ACK, HEADERS)
    peer.pair.advance(5)
    assert sum(frames.count(("CONNECTION_HEADERS", ())) for frames in peer.told()) == 1


@requirement("AQ-29")
def test_the_clients_headers_reach_the_server() -> None:
    headers = ((b"who", b"me"), (b"who", b"again"))
    client = ChannelConnection(is_client=True, config=DEFAULT, headers=headers)
    client.start(0.0)
    client.openable_changed(10, 0.0)
    server = ChannelConnection(is_client=False, config=DEFAULT)
    server.start(0.0)
    for kind, stream, buffers, fin in client.effects_to_apply():
        assert kind == effects.WRITE
        server.receive_stream(stream, b"".join(buffers), fin, 0.0)
    assert server.peer_headers == headers
    assert server.events_received() == [HeadersReceived(headers)]


@requirement("AQ-R10")
@pytest.mark.parametrize("side", ["client", "server"])
def test_headers_twice_are_an_error(side: str) -> None:
    peer = fresh(side)
    peer.say(VERSION, HEADERS)
    assert peer.core.error is None
    peer.say(VERSION, HEADERS)
    assert peer.closed_with == 2


@requirement("AQ-R10")
@requirement("AQ-30")
def test_the_prelude_passes_the_gate_and_the_rest_waits() -> None:
    flow = Flow(initial_window=4096)
    peer = fresh(config=dataclasses.replace(DEFAULT, flow=flow))
    peer.other.answer_headers = None
    first = peer.say(VERSION, ACK, ENTRY, message(0, b"first"), fin=False)
    assert peer.core._shared.outgoing.version_acknowledged  # processed at once
    peer.say(VERSION, route(8), message(0, b"other"))
    assert peer.core.channels == 1  # not even created
    assert peer.core.error is None
    peer.more(first, message(1, bytes(20_000)))
    # That stream is not read on: it gets no more than its first window.
    assert peer.pair.link.client._outgoing[first].limit == 4096
    peer.say(HEADERS)
    assert [e for e in peer.other.events if isinstance(e, HeadersReceived)]
    assert peer.core.channels == 1
    peer.core.accept_headers((), peer.pair.now)
    peer.other.flush()
    peer.pair.run()
    assert [len(payload) for payload in payloads(peer)] == [5, 20_000]
    assert peer.core.channels == 2


@requirement("AQ-30")
@pytest.mark.parametrize("carrier", ["stream", "datagram"])
def test_what_waited_is_held_to_the_rules(carrier: str) -> None:
    peer = fresh()
    sequence = [VERSION, ENTRY, message(0), codec.CLOSE_RECEIVER]
    (peer.say if carrier == "stream" else peer.datagram)(*sequence)
    assert peer.core.error is None
    peer.say(VERSION, HEADERS)
    assert peer.closed_with == 2


@requirement("AQ-30")
def test_a_violation_behind_the_gate_stops_what_opened_it() -> None:
    peer = fresh("server")
    peer.say(VERSION, route(11), message(0), message(0))
    peer.say(VERSION, HEADERS, route(19), message(0))
    assert peer.closed_with == 2
    assert peer.core.channels == 0


@requirement("AQ-30")
@requirement("AQ-R10")
def test_a_client_waits_for_the_servers_headers_too() -> None:
    peer = fresh("server")
    peer.other.send(peer.pair.sender, b"hello")  # it may send before them
    peer.look()
    assert [("ROUTE_TO", 0), ("MESSAGE", 0, (), (), b"hello")] in peer.told()
    peer.say(VERSION, ENTRY, codec.encode_ack_reliable((0, 1)))
    peer.say(VERSION, ACK)
    assert peer.pair.sender.unsettled
    peer.say(HEADERS)
    assert not peer.pair.sender.unsettled
    assert peer.core.peer_headers == ((b"who", b"me"),)


@requirement("AQ-R10")
def test_early_datagrams_are_kept_up_to_their_limits() -> None:
    for limits, kept in (
        (Limits(early_datagrams=3), 3),
        (Limits(early_datagram_bytes=399), 3),
        (Limits(early_datagram_bytes=400), 4),
        (Limits(), 10),
    ):
        peer = fresh(config=dataclasses.replace(DEFAULT, limits=limits))
        peer.say(VERSION)
        for number in range(10):
            data = ENTRY + message(number, b"%d" % number + bytes(92))
            assert len(data) == 100
            peer.datagram(data)
        assert peer.pair.server.take(peer.pair.receiver) is None
        peer.say(HEADERS)
        assert [payload[:1] for payload in payloads(peer)] == [b"%d" % n for n in range(kept)]
    assert (DEFAULT.limits.early_datagrams, DEFAULT.limits.early_datagram_bytes) == (64, 1 << 20)


@requirement("AQ-R10")
@requirement("AQ-R30")
def test_refused_headers_close_with_code_4_and_are_not_answered() -> None:
    peer = fresh()
    peer.other.answer_headers = None
    peer.say(VERSION, HEADERS)
    peer.core.reject_headers("not you")
    peer.other.flush()
    assert peer.closed_with == 4
    assert peer.told() == [[("ACK_VERSION",)]]
