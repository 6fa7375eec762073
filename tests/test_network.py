"""The virtual network keeps what QUIC promises, breaks what it does not, and repeats itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from aqueduct.config import DEFAULT, Config, Flow
from aqueduct.errors import LocalProtocolError
from tests.support.network import CLEAR, Network, NetworkCarrier, Weather

BAD = Weather(delay=0.05, jitter=0.2, loss=0.3, duplication=0.3, piece=700, in_flight=20_000)
SMALL = dataclasses.replace(DEFAULT, flow=Flow(streams=8, initial_window=1000))


class Recorder:
    """A CarrierUser that credits what it reads."""

    def __init__(self, carrier: NetworkCarrier) -> None:
        self.carrier = carrier
        self.said: list[Any] = []
        self.data: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        self.written_sizes: dict[int, int] = {}
        self.bursts = 0
        self.generous = True
        carrier.attach(self)

    def connected(self) -> None:
        self.said.append("connected")

    def early_decided(self, accepted: bool) -> None:
        """There is no early data here."""

    def stream_data(self, stream: int, data: Any, fin: bool) -> None:
        assert stream not in self.ended
        self.said.append(("data", stream, len(data)))
        self.data.setdefault(stream, bytearray()).extend(data)
        if fin:
            self.ended.add(stream)
        elif self.generous:
            self.carrier.credit(stream, len(self.data[stream]) + 1000)

    def inlet(self, stream: int) -> None:
        """Has none to give."""

    def inlet_done(self, stream: int) -> None:
        raise AssertionError("no inlet was opened")

    def stream_reset(self, stream: int, code: int) -> None:
        self.said.append(("reset", stream, code))

    def stream_stopped(self, stream: int, code: int) -> None:
        self.said.append(("stopped", stream, code))

    def datagram_received(self, data: bytes) -> None:
        self.said.append(("datagram", data))

    def openable_changed(self) -> None:
        self.said.append("openable")

    def datagram_room_changed(self) -> None:
        self.said.append("datagram room")

    def written(self, stream: int, size: int) -> bool:
        self.written_sizes[stream] = self.written_sizes.get(stream, 0) + size
        return True

    def kept(self, size: int) -> None:
        pass

    def ponged(self) -> None:
        self.said.append("pong")

    def end_of_input(self) -> None:
        self.bursts += 1

    def closed(self, error: Exception) -> None:
        self.said.append(error)


def network(
    weather: Weather = CLEAR, seed: int = 1, config: Config = SMALL
) -> tuple[Network, Recorder, Recorder]:
    net = Network(config, config, seed=seed, weather=weather)
    client, server = Recorder(net.client), Recorder(net.server)
    net.run(5.0)
    assert client.said == server.said == ["connected"]
    return net, client, server


def rest(net: Network) -> None:
    while net.next_event is not None:
        net.run(net.next_event)


@pytest.mark.parametrize("seed", range(10))
def test_streams_arrive_whole_and_in_order_over_any_network(seed: int) -> None:
    net, client, server = network(BAD, seed)
    payloads = {stream: bytes([stream]) * 700 * stream for stream in range(8)}
    for stream, payload in payloads.items():
        net.client.write(stream, [payload[:5], b"", payload[5:]], True)
        net.client.flush()
    rest(net)
    assert {stream: bytes(data) for stream, data in server.data.items()} == payloads
    assert server.ended == set(payloads)
    assert client.written_sizes == {s: len(payload) for s, payload in payloads.items() if payload}
    assert not net.client.sending and not net.server.receiving
    assert net.client.openable == 8  # every slot came back
    assert 0.1 < net.client.rtt < 1.5


def test_streams_overtake_each_other() -> None:
    orders = set()
    for seed in range(5):
        net, _, server = network(BAD, seed)
        for stream in range(4):
            net.client.write(stream, [b"x"], True)
        net.client.flush()
        rest(net)
        orders.add(tuple(entry[1] for entry in server.said if entry[0] == "data"))
    assert len(orders) > 1


def test_nothing_is_sent_beyond_credit_or_slots() -> None:
    net, _, server = network()
    server.generous = False
    net.client.write(0, [bytes(5000)], False)
    net.client.flush()
    rest(net)
    assert len(server.data[0]) == 1000
    net.server.credit(0, 1500)
    net.server.credit(0, 1200)  # a limit never falls
    rest(net)
    assert len(server.data[0]) == 1500
    for stream in range(1, 8):
        net.client.write(stream, [b"x"], True)
    with pytest.raises(LocalProtocolError):
        net.client.write(8, [b"x"], True)
    net.server.extra_streams(-3)
    net.client.flush()
    rest(net)
    assert net.client.openable == 4
    net.server.extra_streams(0)
    rest(net)
    assert net.client.openable == 7


def test_writing_after_the_end_is_refused() -> None:
    net, _, _ = network()
    net.client.write(0, [b"x"], True)
    for stream in (0, 2):
        with pytest.raises(LocalProtocolError):
            net.client.write(stream, [b"y"], False)


def test_a_reset_drops_what_it_overtakes() -> None:
    left = set()
    for seed in range(20):
        net, client, server = network(BAD, seed)
        net.client.write(0, [bytes(900)], False)
        net.client.flush()
        net.client.reset(0, 7)
        rest(net)
        assert server.said[-1] == ("reset", 0, 7)
        assert client.written_sizes == {}
        left.add(len(server.data.get(0, b"")))
    assert len(left) > 2  # it came at any byte


def test_a_stop_ends_the_stream_on_both_sides() -> None:
    net, client, server = network()
    net.client.write(0, [b"x"], False)
    net.client.flush()
    rest(net)
    net.server.stop(0, 3)
    rest(net)
    assert ("stopped", 0, 3) in client.said
    assert ("reset", 0, 3) in server.said
    net.client.write(0, [b"y"], True)  # crosses it: without effect
    net.client.flush()
    rest(net)
    assert bytes(server.data[0]) == b"x" and net.client.openable == 8


def test_datagrams_are_lost_doubled_and_out_of_order() -> None:
    net, client, server = network(BAD)
    for number in range(256):
        assert net.client.send_datagram(b"%d" % number)
    assert net.client.datagram_room == 0
    assert not net.client.send_datagram(b"one too many")
    net.client.flush()
    rest(net)
    assert "datagram room" in client.said
    for number in range(256, 300):
        assert net.client.send_datagram(b"%d" % number)
    assert not net.client.send_datagram(bytes(2000))
    net.client.flush()
    rest(net)
    assert net.client.copies[256] == net.client.copies[-1] == 0
    del net.client.copies[256], net.client.copies[-1]
    got = [int(entry[1]) for entry in server.said if entry[0] == "datagram"]
    assert len(got) == sum(net.client.copies)
    assert [got.count(number) for number in range(300)] == net.client.copies
    assert {0, 1, 2} == set(net.client.copies)
    assert got != sorted(got)


def test_a_close_lets_everything_out_and_a_cut_nothing() -> None:
    for linger, clean in ((60.0, True), (0.0, False), (0.01, False)):
        net, client, server = network(BAD)
        net.client.write(0, [bytes(3000)], True)
        net.client.close(0, "bye", linger=linger)
        rest(net)
        assert net.client.closed_clean is clean
        assert (len(server.data.get(0, b"")) == 3000) is clean
        for side, remote in ((client, False), (server, True)):
            assert (side.said[-1].reason, side.said[-1].remote) == ("bye", remote)
    net, client, server = network(BAD)
    net.client.write(0, [bytes(900)], True)
    net.client.flush()
    net.cut(0.5, 2.0, swallow=True)
    net.client.send_datagram(b"x")
    net.client.flush()
    net.run(net.now + 1.0)
    assert client.said[-1].reason == "" and server.said == ["connected"]
    rest(net)
    assert len(server.said) == 2


def test_a_seed_is_one_run() -> None:
    def said(seed: int) -> list[Any]:
        net, _, server = network(BAD, seed)
        for stream in range(8):
            net.client.write(stream, [bytes(500 * stream)], True)
            net.client.send_datagram(b"%d" % stream)
        net.client.ping()
        net.client.flush()
        rest(net)
        return server.said

    assert said(3) == said(3)
    assert said(3) != said(4)
