"""Looking at sockets for moments: what is there, and who else wanted the processor."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from aqueduct._speedups.io.busy_poll import look

ALWAYS = float("inf")


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """(this end, the other end), three of them."""
    found = [socket.socketpair() for _ in range(3)]
    yield found
    for pair in found:
        for end in pair:
            end.close()


def test_nothing_is_there_for_as_long_as_it_looks(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    began = time.monotonic()
    assert look([pairs[0][0].fileno()], 0.02, ALWAYS) == -1
    assert time.monotonic() - began >= 0.02
    assert look([], 0.0, ALWAYS) == -1


@pytest.mark.parametrize("place", [0, 1])
def test_the_socket_with_input_is_returned(
    pairs: list[tuple[socket.socket, socket.socket]], place: int
) -> None:
    fds = [end.fileno() for end, _ in pairs[:2]]
    pairs[place][1].send(b"x")
    assert look(fds, 1000.0, 0.0) == fds[place]
    assert look(fds[place:], 1000.0, 0.0) == fds[place]


def test_an_end_is_input(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    pairs[0][1].close()
    assert look([pairs[0][0].fileno()], 1000.0, 0.0) == pairs[0][0].fileno()


def test_it_ends_where_the_processor_was_given_away(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    assert look([pairs[0][0].fileno()], 1000.0, -1.0) == -2


def test_more_than_two_are_refused(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    with pytest.raises(ValueError, match="look takes 2 sockets, not 3"):
        look([end.fileno() for end, _ in pairs], 1.0, ALWAYS)
