"""A listener's links: who may resume one, and which are dropped."""

from __future__ import annotations

import secrets
from dataclasses import replace

import pytest

from aqueduct.config import Relink as Settings
from aqueduct.protocol.relink.handshake import ChosenLink, DistantLink, Opening, RefusedLink
from aqueduct.protocol.relink.link_table import (
    KeptLinks,
    KnownLink,
    LinkPlace,
    LinkTable,
    link_name,
)

EPOCH = 1_000_000
NEW = Opening("test")
ALONE = LinkPlace()


class Listening:
    """A table, and what it dropped."""

    def __init__(
        self, place: LinkPlace = ALONE, together: KeptLinks | None = None, **settings: float
    ) -> None:
        self.dropped: list[tuple[str, str]] = []
        self.table: LinkTable[str] = LinkTable(
            EPOCH,
            Settings(**settings),  # type: ignore[arg-type]
            lambda known, why: self.dropped.append((known.owner, why)),
            place=place,
            together=together,
        )

    def add(self, owner: str, proof: str = "tcp") -> KnownLink[str]:
        chosen, _ = self.table.choose(NEW, proof, 0.0)
        assert isinstance(chosen, ChosenLink)
        assert not chosen.resumed
        return self.table.add(chosen.link, NEW, proof, owner)


def old(known: KnownLink[str], **changes: object) -> Opening:
    opening = replace(NEW, old_epoch=EPOCH, old_link=known.identifier, require_old_link=True)
    return replace(opening, **changes)  # type: ignore[arg-type]


@pytest.mark.requirement("RL-6")
@pytest.mark.requirement("RL-7")
@pytest.mark.requirement("RL-R18")
def test_ids_are_random_and_not_shown() -> None:
    listening = Listening()
    ids = {listening.add("one").identifier for _ in range(100)}
    assert len(ids) == 100
    assert all(1 <= identifier < 1 << 63 for identifier in ids)
    assert sum(identifier.bit_count() for identifier in ids) / 100 == pytest.approx(31.5, abs=3)
    assert str(max(ids)) not in link_name(max(ids))


@pytest.mark.requirement("RL-7")
@pytest.mark.requirement("RL-R18")
def test_an_old_link_is_given_back_also_while_it_has_a_connection() -> None:
    listening = Listening()
    known = listening.add("one")
    for _ in range(2):
        chosen, found = listening.table.choose(old(known), "tcp", 0.0)
        assert chosen == ChosenLink(EPOCH, known.identifier, resumed=True)
        assert found is known
        listening.table.disconnected(known, 10, 0.0)


@pytest.mark.requirement("RL-5")
@pytest.mark.requirement("RL-6")
@pytest.mark.requirement("RL-7")
@pytest.mark.parametrize(
    "changes",
    [
        {"old_epoch": EPOCH + 1},
        {"old_link": 5},
        {"endpoint": "other"},
        {"connector_id_size": 2},
        {"connector_transactions": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_epoch_id_or_opening_is_unknown(changes: dict[str, object]) -> None:
    listening = Listening()
    known = listening.add("one")
    chosen, found = listening.table.choose(old(known, **changes), "tcp", 0.0)
    assert chosen == RefusedLink(EPOCH, True, "the link is unknown (RL-7)")
    assert found is None


@pytest.mark.requirement("RL-R18")
def test_another_proof_is_unknown() -> None:
    listening = Listening()
    known = listening.add("one", "tls with a certificate")
    chosen, _ = listening.table.choose(old(known), "tls", 0.0)
    assert isinstance(chosen, RefusedLink)


@pytest.mark.requirement("RL-7")
def test_a_link_that_is_not_required_becomes_a_new_one() -> None:
    listening = Listening()
    known = listening.add("one")
    opening = old(known, old_epoch=1, require_old_link=False)
    chosen, _ = listening.table.choose(opening, "tcp", 0.0)
    assert isinstance(chosen, ChosenLink)
    assert not chosen.resumed


@pytest.mark.requirement("RL-R16")
def test_links_without_a_connection_are_dropped_after_a_time() -> None:
    listening = Listening(keep=60)
    one, two = listening.add("one"), listening.add("two")
    listening.table.disconnected(one, 0, 10.0)
    listening.table.disconnected(two, 0, 20.0)
    listening.table.connected(one)
    assert listening.table.next_deadline() == 80.0
    listening.table.handle_deadline(80.0)
    assert listening.dropped == [("two", "it had no connection for 60 s (Relink.keep)")]
    assert len(listening.table) == 1
    assert listening.table.next_deadline() is None


@pytest.mark.requirement("RL-R18")
def test_the_oldest_goes_first_where_there_are_too_many() -> None:
    listening = Listening(kept_links=2)
    known = [listening.add(str(index)) for index in range(4)]
    for index in (2, 0, 1, 3):
        listening.table.disconnected(known[index], 0, 0.0)
    assert [owner for owner, _ in listening.dropped] == ["2", "0"]
    assert listening.table.kept == 2


@pytest.mark.requirement("RL-R18")
def test_the_oldest_goes_first_where_they_hold_too_much() -> None:
    listening = Listening(kept_bytes=100)
    one, two, three = (listening.add(name) for name in ("one", "two", "three"))
    listening.table.disconnected(one, 60, 0.0)
    listening.table.disconnected(two, 40, 0.0)
    assert listening.dropped == []
    listening.table.disconnected(three, 101, 0.0)
    assert [owner for owner, _ in listening.dropped] == ["one", "two", "three"]


@pytest.mark.requirement("RL-R18")
def test_listeners_that_share_a_process_are_bounded_together() -> None:
    together = KeptLinks()
    first, second = (Listening(together=together, kept_links=2, kept_bytes=100) for _ in range(2))
    one, two = first.add("one"), second.add("two")
    first.table.disconnected(one, 60, 0.0)
    second.table.disconnected(two, 40, 0.0)
    second.table.grown(two, 1)
    assert (first.dropped, second.dropped) == ([("one", "Relink.kept_bytes is the limit")], [])
    for name in ("three", "four"):
        first.table.disconnected(first.add(name), 0, 0.0)
    assert second.dropped == [("two", "Relink.kept_links is the limit")]
    assert (first.table.kept, second.table.kept) == (2, 0)


def test_a_link_that_has_ended_is_unknown() -> None:
    listening = Listening()
    known = listening.add("one")
    listening.table.remove(known)
    listening.table.disconnected(known, 10, 0.0)
    assert isinstance(listening.table.choose(old(known), "tcp", 0.0)[0], RefusedLink)
    assert listening.table.kept == 0


@pytest.mark.requirement("RL-R18")
def test_guesses_are_answered_at_a_limited_rate() -> None:
    listening = Listening(unknown_links=10)
    opening = replace(NEW, old_epoch=EPOCH, old_link=5, require_old_link=True)

    def answered(now: float, times: int) -> int:
        found = [listening.table.choose(opening, "tcp", now)[0] for _ in range(times)]
        return sum(isinstance(each, RefusedLink) and each.answered for each in found)

    assert answered(0.0, 50) == 10
    assert answered(0.5, 50) == 5
    assert answered(100.0, 50) == 10


@pytest.mark.requirement("RL-R18")
def test_a_link_that_grows_without_a_connection_counts() -> None:
    listening = Listening(kept_bytes=100)
    known = [listening.add(str(index)) for index in range(2)]
    listening.table.grown(known[0], 1000)  # it has a connection
    for each in known:
        listening.table.disconnected(each, 40, 0.0)
    listening.table.grown(known[1], 20)
    assert listening.dropped == []
    listening.table.grown(known[1], 1)
    assert listening.dropped == [("0", "Relink.kept_bytes is the limit")]


@pytest.mark.requirement("RL-R18")
def test_a_link_that_is_resumed_again_and_again_has_to_wait() -> None:
    listening = Listening(resumes=10)
    known = listening.add("one")
    delays = [listening.table.resume_delay(known, 0, 1.0) for _ in range(12)]
    assert delays == pytest.approx([*[0.0] * 10, 0.1, 0.2])
    for _ in range(100):
        delay = listening.table.resume_delay(known, 0, 1.0)
    assert delay == pytest.approx(1.2)
    assert listening.table.resume_delay(known, 0, 100.0) == 0.0
    assert listening.table.resume_delay(known, 65_536, 200.0) == 0.0
    assert listening.table.resume_delay(known, 0, 200.0) == pytest.approx(24.8)


PLACES = [ALONE, *(LinkPlace(number, 4) for number in range(4)), LinkPlace(4, 5)]


@pytest.mark.requirement("RL-6")
@pytest.mark.requirement("RL-R18")
@pytest.mark.parametrize("place", PLACES)
def test_an_id_says_which_process_has_the_link(place: LinkPlace) -> None:
    ids = {place.new_id(secrets.randbelow) for _ in range(100)}
    assert len(ids) == 100
    assert all(1 <= identifier < 1 << 63 for identifier in ids)
    assert {place.number_of(identifier) for identifier in ids} == {place.number}
    assert place.random_bits == {1: 63, 4: 61, 5: 60}[place.count]
    for found, chosen in ((0, 1), ((1 << place.random_bits) - 2, (1 << place.random_bits) - 1)):
        identifier = place.new_id({(1 << place.random_bits) - 1: found}.__getitem__)
        assert identifier & ((1 << place.random_bits) - 1) == chosen


@pytest.mark.requirement("RL-7")
@pytest.mark.requirement("RL-R18")
def test_a_link_of_another_process_is_distant_and_costs_no_state() -> None:
    tables = [Listening(place=LinkPlace(number, 3), unknown_links=1) for number in range(3)]
    known = tables[2].add("two")
    here = tables[0].table
    for _ in range(10):  # it is for the other process to slow guesses down
        assert here.choose(old(known), "tcp", 0.0) == (DistantLink(2), None)
    assert len(here) == 0
    chosen, found = tables[2].table.choose(old(known), "tcp", 0.0)
    assert chosen == ChosenLink(EPOCH, known.identifier, resumed=True)
    assert found is known
    assert here.unknown(0.0) == RefusedLink(EPOCH, True, "the link is unknown (RL-7)")
    assert not here.unknown(0.0).answered


@pytest.mark.requirement("RL-7")
def test_nobody_is_asked_for_a_link_that_no_process_can_have() -> None:
    here = Listening(place=LinkPlace(0, 3)).table
    distant = 2 << 61 | 5
    for opening in (
        replace(NEW, old_epoch=EPOCH, old_link=3 << 61 | 5, require_old_link=True),
        replace(NEW, old_epoch=EPOCH + 1, old_link=distant, require_old_link=True),
    ):
        assert here.choose(opening, "tcp", 0.0)[0] == here.unknown(0.0)
    # Who does not require the old link is given a new one here.
    chosen, _ = here.choose(replace(NEW, old_epoch=EPOCH, old_link=distant), "tcp", 0.0)
    assert isinstance(chosen, ChosenLink)
    assert not chosen.resumed
