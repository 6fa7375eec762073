"""Who gives up a place for a handshake, and when."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from aqueduct.carriers.contract import PeerCredentials
from aqueduct.carriers.places import Places, origin_of


@dataclass(eq=False)
class Peer:
    """A peer of which it is known when it was heard last."""

    name: str
    heard_at: float | None = None
    stepped_at: float | None = None
    unread: bool = False

    def has_input(self) -> bool:
        return self.unread


def places(limit: int = 3) -> Places[Peer]:
    return Places(limit, patience=1.0)


def filled(*come: tuple[str, str, float]) -> tuple[Places[Peer], dict[str, Peer]]:
    """Peers by name, origin and when they came."""
    made, peers = places(len(come)), {}
    for name, origin, at in come:
        peers[name] = Peer(name)
        made.add(peers[name], origin, at)
    return made, peers


def test_places_are_counted_and_given_back() -> None:
    made, peers = filled(("a", "x", 0.0), ("b", "x", 0.0))
    assert made.full and len(made) == 2
    assert made.discard(peers["a"]) and not made.discard(peers["a"])
    assert not made.full and len(made) == 1


def test_the_one_that_was_silent_longest_gives_up_its_place() -> None:
    made, peers = filled(("a", "x", 0.5), ("b", "x", 0.0), ("c", "x", 1.0))
    assert made.candidate(0.9) is None
    assert made.pause(0.9) == pytest.approx(0.1)
    assert made.candidate(1.0) is peers["b"]
    peers["b"].heard_at = 0.9
    assert made.candidate(1.0) is None
    assert made.pause(1.0) == pytest.approx(0.5)
    assert made.candidate(2.0) is peers["a"]


def test_the_address_with_the_most_silent_ones_loses_its_oldest() -> None:
    made, peers = filled(("a", "x", 0.0), ("b", "y", 0.1), ("c", "y", 0.2))
    assert made.candidate(1.1) is peers["a"]  # one of each is silent long enough
    assert made.candidate(1.2) is peers["b"]
    made.discard(peers["b"])
    assert made.candidate(1.2) is peers["a"]


def test_a_slow_handshake_is_kept_over_a_silent_peer() -> None:
    come = [("slow", "x", 0.0), ("half", "x", 0.0), ("silent", "x", 5.0), ("other", "x", 7.0)]
    made, peers = filled(*come)
    peers["slow"].heard_at, peers["half"].heard_at = 5.9, 4.5
    assert made.candidate(5.9) is None
    assert made.candidate(6.0) is peers["silent"]
    assert made.candidate(6.5) is peers["silent"]
    peers["silent"].heard_at = None
    made.discard(peers["silent"])
    made.add(Peer("new"), "x", 7.0)
    assert made.candidate(6.4) is None  # what was heard has twice the time
    assert made.candidate(6.5) is peers["half"]


def test_of_those_that_are_silent_one_that_was_never_heard_goes_first() -> None:
    made, peers = filled(("half", "x", 0.0), ("silent", "x", 3.0), ("later", "x", 3.5))
    peers["half"].heard_at = 1.0
    assert made.candidate(3.0) is peers["half"]
    assert made.candidate(4.0) is peers["silent"]


def test_a_peer_whose_bytes_are_unread_is_not_silent() -> None:
    made, peers = filled(("a", "x", 0.0), ("b", "x", 0.1))
    peers["a"].unread = True
    assert made.candidate(2.0) is peers["b"]
    peers["b"].unread = True
    assert made.candidate(2.0) is None
    assert made.pause(2.0) == 0.01


def test_where_all_dribble_the_oldest_gives_up_its_place() -> None:
    made, peers = filled(("a", "x", 0.0), ("b", "y", 1.0), ("c", "y", 1.5))
    for peer in peers.values():
        peer.heard_at = 12.0
    assert made.candidate(1.9) is None
    assert made.pause(1.9) == pytest.approx(0.1)
    assert made.candidate(2.0) is peers["a"]
    assert made.candidate(3.5) is peers["b"]  # of the address with most of them
    new = Peer("new")
    made.add(new, "z", 12.0)
    assert made.candidate(12.0) is peers["b"]  # each new one would hold up the next otherwise


def test_a_step_of_the_handshake_gives_the_time_of_a_step_again() -> None:
    made, peers = filled(("a", "x", 0.0), ("b", "x", 0.0), ("c", "x", 1.0))
    for peer in peers.values():
        peer.heard_at = 3.0
    peers["a"].stepped_at = 1.5
    assert made.candidate(3.0) is peers["b"]
    made.discard(peers["b"])
    assert made.candidate(3.0) is peers["c"]
    made.discard(peers["c"])
    assert made.candidate(3.4) is None
    assert made.pause(3.4) == pytest.approx(0.1)
    assert made.candidate(3.5) is peers["a"]


def test_where_most_have_just_come_none_that_dribbles_gives_up_its_place() -> None:
    made, peers = filled(("a", "x", 0.0), ("b", "y", 11.5), ("c", "y", 11.6))
    peers["a"].heard_at = 12.0
    assert made.pause(12.0) == pytest.approx(0.5)
    assert made.candidate(12.0) is None  # they may be silent: that is known soon
    assert made.candidate(12.5) is peers["b"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1:1000", "10.0.0.1:2000", True),
        ("10.0.0.1:1000", "10.0.0.2:1000", False),
        ("[2001:db8::1]:1", "[2001:db8::2]:1", True),
        ("[2001:db8::1]:1", "[2001:db8:0:1::1]:1", False),
        ("[fe80::1%lo]:1", "[fe80::1%lo]:2", True),
        ("a name", "a name", True),
    ],
)
def test_what_counts_as_one_address(one: str, other: str, same: bool) -> None:
    assert (origin_of(one, None) == origin_of(other, None)) is same


def test_behind_a_unix_socket_a_process_is_an_address() -> None:
    mine, other = PeerCredentials(1, 0, 0), PeerCredentials(2, 0, 0)
    assert origin_of("/s", mine) == origin_of("/t", mine) != origin_of("/s", other)
