"""Work that must not grow with the number of channels: a peer chooses how many there are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from aqueduct._speedups.relink import packets
from aqueduct.protocol.relink.handshake import Opening
from aqueduct.protocol.relink.receiving import ReceiveChannel
from tests.protocol.relink.pair import Lone

CHANNELS = 1000
WIDE = Opening("test", connector_id_size=4, listener_id_size=4)


def message(channel: int) -> bytes:
    return packets.encode_message_head((channel,), 4, (0,))


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often channels of the peer were asked."""
    found: Counter[str] = Counter()
    for name in ("settled", "kept_results"):
        real = getattr(ReceiveChannel, name).fget

        def counted(channel: ReceiveChannel, name: str = name, real: object = real) -> object:
            found[name] += 1
            assert callable(real)
            return real(channel)

        monkeypatch.setattr(ReceiveChannel, name, property(counted))
    return found


def test_packets_to_a_link_that_shuts_down_look_at_no_other_channels(
    looked_at: Counter[str],
) -> None:
    alone = Lone(WIDE)
    alone.receive(*map(message, range(CHANNELS)))
    alone.link.shutdown()
    alone.take_all()
    alone.receive(packets.encode_general(packets.SHUTDOWN))
    looked_at.clear()
    nobody = packets.encode_packet(packets.CHANNEL_ACK, packets.RECEIVED, (), 4, multicast=True)
    alone.receive(nobody * 1000)
    for channel in range(100):
        alone.link.consume(channel, 0)
    assert looked_at["settled"] <= 500
    for channel in range(100, CHANNELS):
        alone.link.consume(channel, 0)
    alone.link.handle_deadline(1.0)
    alone.take_all(1.0)
    assert alone.of("ended") == [()]


def test_an_answered_batch_looks_at_no_other_channels(looked_at: Counter[str]) -> None:
    alone = Lone(replace(WIDE, listener_transactions=True))
    commits = [
        packets.encode_packet(packets.CHANNEL_OP, packets.COMMIT, (channel,), 4)
        for channel in range(CHANNELS)
    ]
    alone.receive(*map(message, range(CHANNELS)), *commits)
    looked_at.clear()
    for channel in range(100):
        alone.link.complete(channel, 0, committed=True)
    assert looked_at["kept_results"] <= 500


@pytest.mark.requirement("RL-R6")
@pytest.mark.parametrize("kind", ["message", "operation", "acknowledgement"])
def test_a_packet_without_ids_has_few_targets(kind: str) -> None:
    """Eight bytes with a thousand targets would be a thousand messages, or decisions."""

    def packet(targets: int) -> bytes:
        channels = (0,) * targets
        if kind == "message":
            return packets.encode_message_head(channels, 0, (), multicast=True)
        format, type = packets.CHANNEL_OP, packets.ROLLBACK
        if kind == "acknowledgement":
            format, type = packets.CHANNEL_ACK, packets.RECEIVED
        return packets.encode_packet(format, type, channels, 0, multicast=True)

    both = {"connector_transactions": True, "listener_transactions": True}
    alone = Lone(Opening("test", connector_id_size=0, listener_id_size=0, **both))
    for _ in range(8):
        alone.link.send(0, b"x")
    alone.take_all()
    alone.receive(packets.encode_message_head((0,), 0, ()), packet(8))
    assert alone.link.error is None
    assert "a packet for 9 targets whose ids take no bytes" in alone.fails(packet(9))
