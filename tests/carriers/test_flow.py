"""Windows, slots and packets of FastConnection, without sockets and by a clock of our own."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from aioquic import tls
from aioquic.quic import events

from aqueduct.carriers.quic import packets as fast_module
from aqueduct.carriers.quic.packets import FastConnection, Pacer
from aqueduct.config import DEFAULT, Config
from tests.carriers.wire import CLIENT, Wire, fast, plain

SMALL = dataclasses.replace(
    DEFAULT, flow=dataclasses.replace(DEFAULT.flow, streams=10, initial_window=1000)
)


def arrived(wire: Wire, side: str, connection: FastConnection) -> dict[int, tuple[bytes, bool]]:
    """What the events say of each stream; tells the connection of ends as the carrier does."""
    found: dict[int, tuple[bytes, bool]] = {}
    for event in wire.events[side]:
        if isinstance(event, events.StreamDataReceived):
            event = (event.stream_id, event.data, event.end_stream)
        if isinstance(event, tuple):
            stream_id, data, fin = event
            before = found.get(stream_id, (b"", False))[0]
            found[stream_id] = before + bytes(data), fin
            if fin:
                connection.ended(stream_id)
        elif isinstance(event, events.StreamReset):
            connection.ended(event.stream_id)
    return found


def allowed(connection: FastConnection) -> int:
    """What all streams may yet send together, counted afresh."""
    data, streams = connection._local_max_data, connection._local_max_streams_uni
    peers = [
        stream
        for stream in connection._streams.all()
        if bool(stream.stream_id & 1) is connection._is_client
    ]
    room = sum(stream.max_stream_data_local - stream.receiver.highest_offset for stream in peers)
    left = connection._slots_given - streams.used
    return int(data.used + room + left * connection._window)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_the_connection_limit_is_what_streams_may_send_together(seed: int, loss: float) -> None:
    """MAX_DATA never binds, whatever is opened, credited, ended, reset and lost."""
    chance = random.Random(seed)
    wire = Wire(fast, SMALL)
    server: Any = wire.server
    client: Any = wire.client
    wire.lose = lambda way, number: chance.random() < loss
    open_streams: list[Any] = []
    for _ in range(120):
        choice = chance.random()
        if choice < 0.3 and client.openable:
            open_streams.append(client.open())
        elif choice < 0.6 and open_streams:
            sender = chance.choice(open_streams)
            fin = chance.random() < 0.3
            sender.append([bytes(chance.randrange(2500))], fin)
            if fin:
                open_streams.remove(sender)
        elif choice < 0.7 and open_streams:
            sender = open_streams.pop(chance.randrange(len(open_streams)))
            sender.reset(1)
        elif choice < 0.9 and server._streams:
            stream_id = chance.choice(list(server._streams))
            if not stream_id & 1:
                limit = server._streams[stream_id].max_stream_data_local
                server.credit(stream_id, limit + chance.randrange(3000))
        else:
            wire.run(0.05)
            arrived(wire, "server", server)
            wire.events["server"].clear()
        assert server._promised == allowed(server)
    wire.lose = lambda way, number: False
    for _ in range(3):
        wire.run(2.0)
        arrived(wire, "server", server)
        wire.events["server"].clear()
    assert server._promised == allowed(server)
    assert server._local_max_data.value >= allowed(server)
    assert client._remote_max_data == server._local_max_data.value
    assert client._remote_max_streams_uni == server._local_max_streams_uni.sent
    assert server.termination is None and client.termination is None


def test_limits_do_not_rise_because_bytes_arrive() -> None:
    wire = Wire(fast, SMALL)
    sender = wire.client.open()
    sender.append([bytes(5000)], False)
    wire.run()
    stream = wire.server._streams[sender.stream_id]
    assert stream.receiver.highest_offset == stream.max_stream_data_local == 1000
    assert wire.server._local_max_data.value == 10 * 1000


def test_a_lost_credit_is_sent_again() -> None:
    wire = Wire(fast, SMALL)
    sender = wire.client.open()
    sender.append([bytes(5000)], True)
    wire.run()
    first = wire.sent["down"]
    wire.lose = lambda way, number: way == "down" and number == first
    wire.server.credit(sender.stream_id, 5000)
    wire.step()
    assert wire.sent["down"] == first + 1
    wire.run(1.0)
    assert sender.is_finished
    assert arrived(wire, "server", wire.server)[sender.stream_id] == (bytes(5000), True)


def test_a_lost_stop_is_sent_again() -> None:
    wire = Wire(fast, SMALL)
    sender = wire.client.open()
    sender.append([bytes(5000)], False)
    wire.run()
    first = wire.sent["down"]
    wire.lose = lambda way, number: way == "down" and number == first
    wire.server.stop(sender.stream_id, 5)
    wire.step()
    assert wire.sent["down"] == first + 1
    wire.run(1.0)
    assert events.StopSendingReceived(5, sender.stream_id) in wire.events["client"]
    assert events.StreamReset(5, sender.stream_id) in wire.events["server"]


def test_a_lost_reset_is_sent_again() -> None:
    wire = Wire(fast, SMALL)
    sender = wire.client.open()
    sender.append([bytes(500)], False)
    wire.run()
    first = wire.sent["up"]
    wire.lose = lambda way, number: way == "up" and number == first
    sender.reset(5)
    wire.step()
    assert wire.sent["up"] == first + 1
    wire.run(1.0)
    assert events.StreamReset(5, sender.stream_id) in wire.events["server"]
    assert sender.is_finished
    assert sender.stream_id not in wire.client._streams


@pytest.mark.parametrize("losing", ["MAX_DATA", "MAX_STREAMS"])
def test_lost_limits_are_sent_again(losing: str) -> None:
    wire = Wire(fast, SMALL)
    for _ in range(10):
        wire.client.open().append([b"x" * 10], True)
    wire.run(0.001)
    arrived(wire, "server", wire.server)
    first = wire.sent["down"]
    wire.lose = lambda way, number: way == "down" and number < first + 2
    wire.run(2.0)
    assert wire.client.openable == 10


def test_both_ways_of_writing_packets_agree() -> None:
    """What ours sends aioquic understands, and the other way round."""
    data = random.Random(1).randbytes(200_000)
    for makers in ((fast, plain), (plain, fast)):
        makes = iter(makers)
        wire = Wire(lambda *given, **named: next(makes)(*given, **named), DEFAULT)  # noqa: B023
        for end, base in ((wire.client, 2), (wire.server, 3)):
            if isinstance(end, FastConnection):
                for number in range(3):
                    end.open().append([data[number:60_000]], True)
            else:
                for number in range(3):
                    end.send_stream_data(base + 4 * number, data[number:60_000], True)
        wire.run(3.0)
        for side, base in (("server", 2), ("client", 3)):
            found: dict[int, bytes] = {}
            for event in wire.events[side]:
                if isinstance(event, tuple):
                    found[event[0]] = found.get(event[0], b"") + bytes(event[1])
                elif isinstance(event, events.StreamDataReceived):
                    found[event.stream_id] = found.get(event.stream_id, b"") + event.data
            assert found == {base + 4 * number: data[number:60_000] for number in range(3)}


def test_many_small_streams_share_packets() -> None:
    wire = Wire()
    before = wire.sent["up"]
    for number in range(100):
        wire.client.open().append([b"message %d" % number], True)
    wire.run()
    assert wire.sent["up"] - before < 12
    found = arrived(wire, "server", wire.server)
    assert found == {2 + 4 * n: (b"message %d" % n, True) for n in range(100)}


def test_packets_of_a_run_are_of_one_size() -> None:
    """With big and small streams mixed; Outlet.send_run of the wire checks the sizes."""
    wire = Wire()
    for number in range(40):
        wire.client.open().append([bytes(1150 + number)], True)
    wire.run(1.0)
    assert len(arrived(wire, "server", wire.server)) == 40


def test_streams_take_turns() -> None:
    wire = Wire()
    big = wire.client.open()
    big.append([bytes(5_000_000)], False)
    wire.step()
    small = wire.client.open()
    small.append([b"small"], True)
    wire.run()
    order = [
        event[0] if isinstance(event, tuple) else event.stream_id
        for event in wire.events["server"]
        if isinstance(event, tuple | events.StreamDataReceived)
    ]
    assert order.index(small.stream_id) < 15  # the first window of packets, and little more
    assert order.count(big.stream_id) > 50


def test_duplicates_are_dropped() -> None:
    wire = Wire()
    sent: list[bytes] = []
    deliver = wire._deliver

    def twice(target: Any, data: bytes, origin: Any) -> None:
        deliver(target, data, origin)
        sent.append(data)
        for old in sent[-5:]:
            deliver(target, old, origin)

    wire._deliver = twice  # type: ignore[method-assign]
    wire.client.open().append([random.Random(2).randbytes(50_000)], True)
    wire.run(1.0)
    found = arrived(wire, "server", wire.server)
    assert found[2] == (random.Random(2).randbytes(50_000), True)


def test_padding_at_the_end_of_a_packet_is_skipped() -> None:
    wire = Wire()
    sender = wire.client.open()
    sender.append([b"x" * 100], False)
    wire.run()
    space = wire.server._spaces[tls.Epoch.ONE_RTT]
    frame = b"\x0e\x02\x40\x64\x05hello" + bytes(40)
    assert wire.server._frames(frame, None, space, wire.now)
    assert bytes(wire.server.next_event()[1]) == b"hello"


@pytest.mark.parametrize(
    "payload",
    [
        b"\x0e\x02",
        b"\x0e\x02\x40",
        b"\x0e\x02\x00\x05abcd",
        b"\x0e\x02\x7f\xff\x05hello",
        b"\x0f\x02\xff\xff\xff\xff\xff\xff\xff\xff\x05hello",
        b"\x0e\x03\x00\x05hello",
        b"\x0e\x00\x00\x05hello",
        b"\x40\x0e\x02",
        b"\xff\xff",
        b"\x1e\x00",
        b"\x08\x50\x02hello",
    ],
)
def test_frames_that_break_the_rules_end_the_connection(payload: bytes) -> None:
    wire = Wire(fast, SMALL)
    keys = wire.client._cryptos[tls.Epoch.ONE_RTT]
    number = wire.client._packet_number
    header = b"\x41" + wire.client._peer_cid.cid + number.to_bytes(2, "big")
    data = keys.send.encrypt_packet(header, payload, number)
    wire.server.receive(memoryview(data), CLIENT, wire.now)
    outcome = wire.server._close_event
    assert outcome is not None and outcome.error_code != 0
    wire.run()
    assert wire.client.closed_by_peer


def said(wire: Wire, *packets: bytes) -> None:
    """The client sends packets of these frames."""
    client, plains = wire.client, list(packets)
    client._fill = lambda room, handlers: plains.pop(0) if plains else b""
    client.send_ping(0)
    wire.run()
    while plains:
        run = client._run(wire.now, 1 << 20)
        for at in range(0, len(run), 2):
            wire._deliver(wire.server, run[at] + run[at + 1], CLIENT)
    wire._collect()


def stream_frame(offset: int, data: bytes) -> bytes:
    """A STREAM frame of the client's first stream."""
    return b"\x0e\x02" + (0x8000_0000 | offset).to_bytes(4, "big") + bytes([len(data)]) + data


@pytest.mark.parametrize(
    ("frames", "least", "most"),
    [
        (b"\x01" * 1000, 1000, 1000),  # PING
        (b"\x10\x00" * 500, 500, 1000),  # MAX_DATA
        (b"\x02\x00\x00\x00\x00" * 200, 200, 1000),  # ACK
        (b"".join(stream_frame(at, b"x") for at in range(120)), 120, 120),
        (stream_frame(0, b"x" * 60) * 15, 15, 15),  # all but the first come again
        (stream_frame(100, b"x" * 60), 1, 1),
        (b"\x31\x3c" + b"x" * 60, 1, 1),  # DATAGRAM
    ],
)
def test_frames_are_counted(frames: bytes, least: int, most: int) -> None:
    """Each of them is work, however few bytes it has."""
    wire = Wire()
    before = wire.server.frames.total
    said(wire, frames)
    assert wire.server.termination is None
    assert (
        least <= wire.server.frames.total - before <= most + 60
    )  # with what opens and ends the run


@pytest.mark.parametrize("crypto", [False, True])
def test_a_peer_that_leaves_gaps_is_cut_off(crypto: bool) -> None:
    """Each packet that is not in order costs the more, the more gaps there are."""

    def make(configuration: Any, config: Config, **options: Any) -> FastConnection:
        return fast(configuration, config, gaps=20, **options)

    def frame(offset: int) -> bytes:
        if crypto:
            return b"\x06" + (0x8000_0000 | offset).to_bytes(4, "big") + b"\x01x"
        return stream_frame(offset, b"x")

    wire = Wire(make)
    said(wire, b"".join(frame(2 * place + 1) for place in range(20)))
    assert wire.server._close_event is None
    said(wire, frame(100))
    assert wire.server._close_event is not None
    assert "more than 20 gaps in a stream (Quic.gaps)" in wire.server._close_event.reason_phrase


def test_a_connection_by_key_update_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_module, "_KEY_PACKETS", 20)
    wire = Wire()
    wire.client.open().append([bytes(60_000)], True)
    wire.server.open().append([bytes(60_000)], True)
    wire.run(2.0)
    assert arrived(wire, "server", wire.server)[2] == (bytes(60_000), True)
    assert arrived(wire, "client", wire.client)[3] == (bytes(60_000), True)


@pytest.mark.parametrize("pinging", [True, False])
def test_a_silent_connection_lives_by_pings(pinging: bool) -> None:
    wire = Wire()
    for _ in range(12):
        if pinging:
            wire.client.send_ping(1)
        wire.run(10.0, tick=0.05)
    assert (wire.client.termination is None) is pinging
    assert (wire.server.termination is None) is pinging
    assert pinging == (events.PingAcknowledged(1) in wire.events["client"])


@pytest.mark.parametrize("config", [SMALL, DEFAULT])
def test_the_limits_announced_in_the_handshake(config: Config) -> None:
    wire = Wire(fast, config)
    for end in (wire.client, wire.server):
        assert end._remote_max_streams_uni == config.flow.streams
        assert end._remote_max_streams_bidi == 0
        assert end._remote_max_stream_data_uni == config.flow.initial_window
        assert end._remote_max_data == config.flow.streams * config.flow.initial_window
        assert end.openable == config.flow.streams


def test_the_pacer_spreads_what_exceeds_a_burst() -> None:
    pacer = Pacer(max_datagram_size=1000)
    assert pacer.allowance(0.0) == float("inf")
    pacer.update_rate(congestion_window=1_000_000, smoothed_rtt=0.1)
    rate = 1.25 * 1_000_000 / 0.1
    assert pacer.allowance(0.0) == rate * 0.002  # what the loop's timers leave between two turns
    pacer.spend(25_000)
    assert pacer.allowance(0.0) == 0
    assert pacer.ready_at(0.0) == pytest.approx(1000 / rate)
    assert pacer.allowance(0.001) == pytest.approx(rate * 0.001)
    assert pacer.allowance(9.0) == rate * 0.002
    pacer.update_rate(congestion_window=20_000, smoothed_rtt=0.001)
    assert pacer.allowance(10.0) == 10_000  # never more than half the window at once


def test_data_leaves_before_a_round_trip_was_measured() -> None:
    """As after a handshake whose packets were lost and sent again: none of them was a sample."""
    wire = Wire()
    pacer = wire.client._pacer = wire.client._loss._pacer = Pacer(max_datagram_size=1200)
    assert pacer.allowance(wire.now) == float("inf")
    data = bytes(50_000)
    stream = wire.client.open()
    stream.append([data], True)
    wire.run()
    assert arrived(wire, "server", wire.server) == {stream.stream_id: (data, True)}


def test_a_lost_path_response_is_asked_for_again() -> None:
    """Or the server of a client whose port changed would go back to a port that is closed."""
    wire = Wire()
    deliver, moved = wire._deliver, ("client", 99)
    responses: list[bytes] = []

    def rebound(target: Any, data: bytes, origin: Any) -> None:
        if origin == CLIENT and len(data) == 1200 and not responses:
            responses.append(data)  # the padded one; it is lost
        else:
            deliver(target, data, moved if origin == CLIENT else origin)

    wire._deliver = rebound  # type: ignore[method-assign]
    wire.client.open().append([b"from another port"], True)
    wire.run()
    assert len(responses) == 1
    path = wire.server._network_paths[0]
    assert path.addr == moved and path.is_validated
    stream = wire.server.open()
    stream.append([b"to that port"], True)
    wire.run()
    assert arrived(wire, "client", wire.client) == {stream.stream_id: (b"to that port", True)}
