"""How control streams end when frames cross, come late or never: short forms of random runs."""

from __future__ import annotations

import pytest

from aqueduct.errors import Cancelled, LostInTransit, RemoteProtocolError
from aqueduct.protocol.common.sender import Mode
from aqueduct.protocol.common.state import SenderState
from aqueduct.protocol.control_streams.bidi_streams import BIDI
from tests.protocol.control_streams.pair import Pair, attach

ANSWER = BIDI | 1
"""The server's direction of the connection control stream, by its own number."""


def opened(index: int) -> int:
    """A stream that a side has opened, by its own number."""
    return BIDI | index << 1


@pytest.mark.requirement("AQ0-R4")
def test_a_control_stream_that_ends_without_more_bytes_is_forgotten() -> None:
    pair = Pair()
    pair.server.close_receiver(pair.receiver)
    pair.run()
    for side in (pair.client, pair.server):
        assert side.core.channels == 0
        assert side.core.snapshot()["streams_out"] == 1  # that of the connection


@pytest.mark.requirement("AQ0-R5")
@pytest.mark.parametrize("answer", ["receive_reset", "receive_stop"])
def test_a_reset_that_waits_is_over_once_the_peer_has_answered(answer: str) -> None:
    pair = Pair()
    parent, child = attach(keep_sender=True), attach(keep_sender=False)
    pair.client.send(pair.sender, b"", parent)
    pair.run()
    pair.held.add(opened(2))
    pair.client.send(parent.half, b"", child)
    pair.run()
    pair.client.cancel(parent.half)  # the server drops the message, and cancels its sender
    pair.run()
    assert pair.server.core._bidi._resets
    assert child.half is not None
    assert isinstance(child.half.error, LostInTransit)
    # The client's answer may come before the acknowledgement of the transport.
    getattr(pair.server.core, answer)(opened(2), 2, pair.now)
    pair.server.flush()
    assert not pair.server.core._bidi._resets


@pytest.mark.requirement("AQ0-33")
@pytest.mark.parametrize("cancel", [False, True])
def test_a_lost_channel_whose_control_stream_has_ended_is_told_of(cancel: bool) -> None:
    pair = Pair()
    ghost = attach(keep_sender=True)
    pair.client.lose_datagrams = True
    pair.client.send(pair.sender, b"", ghost, mode=Mode.UNRELIABLE)
    pair.client.send(ghost.half, b"first")
    pair.run()
    assert pair.server.core.channels == 2
    pair.held.add(opened(1))  # the server's close is not heard
    if cancel:
        pair.client.cancel(ghost.half)
    else:
        pair.client.finish(ghost.half)
    pair.advance(3)
    assert pair.client.core.channels == 1
    assert pair.server.core.channels == 1
    pair.held.clear()
    pair.run()
    assert pair.server.ended is pair.client.ended is None


@pytest.mark.requirement("AQ0-R13")
def test_an_entrypoint_that_was_closed_before_the_headers_says_so() -> None:
    pair = Pair(connect=False)
    pair.server.answer = None
    pair.run()
    pair.server.close_receiver(pair.receiver)
    pair.server.core.accept_headers((), pair.now)
    pair.server.flush()
    pair.run()
    assert pair.sender.state is SenderState.ENDED
    assert pair.client.core.channels == pair.server.core.channels == 0


@pytest.mark.requirement("AQ0-R5")
def test_a_cancel_that_overtakes_the_headers_is_read_after_them() -> None:
    pair = Pair(connect=False)
    child = attach(keep_sender=False)
    pair.held.add(ANSWER)
    pair.client.send(pair.sender, b"", child)
    pair.run()
    (received,) = pair.server.take_all(pair.receiver)
    pair.server.cancel(received.attachments[0][0])
    pair.run()
    assert child.half is not None
    assert child.half.error is None
    pair.held.clear()
    pair.run()
    assert isinstance(child.half.error, Cancelled)
    assert pair.client.core.channels == pair.server.core.channels == 1


@pytest.mark.requirement("AQ0-19")
def test_a_reset_of_the_connection_control_stream_ends_the_connection() -> None:
    pair = Pair()
    pair.server.core.receive_reset(ANSWER, 0, pair.now)
    pair.server.flush()
    assert pair.server.ended is not None
    assert isinstance(pair.server.ended.__cause__, RemoteProtocolError)
    assert pair.server.closed is not None
    assert pair.server.closed[0] == 2
