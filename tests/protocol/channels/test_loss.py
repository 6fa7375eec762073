"""The cascade of AQ-R27 against the scenarios of ``tests/vectors/aq.json``.

Their message numbers are free, so the steps act on the tables of the halves, where the frames
of real acks and nacks end up too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aqueduct._speedups import codec
from aqueduct.protocol.channels import ids
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.protocol.channels.sending import SenderHalf, _take_links
from tests.pair import Pair

SCENARIOS = json.loads((Path(__file__).parents[2] / "vectors" / "aq.json").read_text())["loss"]


class Recording(list[int]):
    """A work list that remembers what was worked on."""

    def __init__(self, seen: set[int], channels: list[int]) -> None:
        super().__init__(channels)
        self.seen = seen

    def pop(self, index: Any = -1) -> int:
        channel = super().pop(index)
        self.seen.add(channel)
        return channel


class Table:
    """One side's channels, moved by the steps of a scenario."""

    def __init__(self, core: ChannelConnection) -> None:
        self.registry = core._registry
        self.reader = core._reader
        self.accessible: set[int] = set()
        self.lost: set[int] = set()
        self.attached: set[int] = set()

    def half(self, channel: int) -> SenderHalf | None:
        half = self.registry.known(channel)
        assert half is None or isinstance(half, SenderHalf)
        return half

    def send(self, channel: int, space: str, number: int, attached: list[int]) -> None:
        half = self.half(channel)
        self.attached.update(attached)
        if half is None:
            assert channel in self.lost  # a send raises: what it would carry goes nowhere
            self.lost.update(attached)
            return
        table = half.links if space == "reliable" else half.unreliable_links
        if attached:
            table[number] = tuple(attached)
        for inner in attached:
            self.registry._make(inner, accessible=False, given=True, assured=True)

    def ack(self, channel: int, space: str, number: int) -> None:
        half = self.half(channel)
        if half is None:
            assert channel in self.lost
            return
        links = _taken(half, space, number)
        self.registry.reached(Recording(self.accessible, half._reached(links)))

    def nack(self, channel: int, space: str, number: int) -> None:
        half = self.half(channel)
        if half is None:
            assert channel in self.lost
            return
        self.reader._lose(Recording(self.lost, _taken(half, space, number)))

    def close(self, channel: int) -> None:
        half = self.half(channel)
        assert half is not None
        links = half.receiver_closed()
        self.registry.sender_closed(half)
        self.reader._lose(Recording(self.lost, links))

    def got(self, channel: int) -> None:
        self.registry.attached([(channel, ())])

    def forgotten(self, channel: int) -> None:
        half = self.half(channel)
        assert half is not None
        links, _ = self.registry.lose(half, tell_peer=False)
        self.reader._lose(Recording(self.lost, links))


def _taken(half: SenderHalf, space: str, number: int) -> list[int]:
    table = half.links if space == "reliable" else half.unreliable_links
    return _take_links(table, [(number, number + 1)])


def fresh() -> tuple[Pair, Table]:
    pair = Pair()
    return pair, Table(pair.client.core)


@pytest.mark.requirement("AQ-R27")
@pytest.mark.requirement("AQ-47")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[entry["name"] for entry in SCENARIOS])
def test_scenarios(scenario: dict[str, Any]) -> None:
    _, table = fresh()
    assert scenario["side"] == "client"
    for name, *arguments in scenario["steps"]:
        getattr(table, name)(*arguments)
    result = scenario["result"]
    assert sorted(table.accessible) == sorted(result["accessible"])
    assert sorted(table.lost) == sorted(result["lost"])
    pending = table.attached - table.accessible - table.lost
    assert sorted(pending) == sorted(result["pending"])


@pytest.mark.requirement("AQ-R27")
@pytest.mark.requirement("AQ-R23")
def test_a_forgotten_sender_loses_acked_and_unacked_alike_and_is_not_forgotten_back() -> None:
    pair, table = fresh()
    table.send(0, "reliable", 0, [8])
    table.send(8, "reliable", 0, [16])
    table.send(8, "reliable", 1, [24])
    table.ack(8, "reliable", 0)
    table.forgotten(8)
    assert table.lost == {16, 24}
    pair.run()
    sent = b"".join(bytes(raw) for raw in pair.server.raw.values())
    for channel, told in ((8, False), (16, True), (24, True)):
        assert (codec.encode_route_to(channel) + codec.FORGET_CHANNEL in sent) is told


@pytest.mark.requirement("AQ-R27")
def test_the_tables_of_a_sender_that_ended_while_pending_still_decide() -> None:
    for reached in (True, False):
        pair, table = fresh()
        table.send(0, "unreliable", 0, [8])
        table.send(8, "reliable", 0, [16])
        table.ack(8, "reliable", 0)
        table.close(8)
        assert pair.client.core._registry.known(8) is not None
        if reached:
            table.ack(0, "unreliable", 0)
            assert table.accessible == {8, 16}
        else:
            table.nack(0, "unreliable", 0)
            assert table.lost == {8, 16}
        assert pair.client.core._registry.known(8) is None


@pytest.mark.requirement("AQ-R27")
def test_a_cascade_of_any_depth_takes_no_stack() -> None:
    _, table = fresh()
    channel = 0
    depth = 5000
    for index in range(depth):
        inner = ids.make(0, 0, False, index + 1)
        table.send(channel, "unreliable", 0, [inner])
        channel = inner
    table.nack(0, "unreliable", 0)
    assert len(table.lost) == depth
