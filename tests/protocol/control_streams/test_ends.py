"""How control streams end when frames cross, come late or never: short forms of random runs."""

from __future__ import annotations

import pytest

from tests.protocol.control_streams.pair import Pair


@pytest.mark.requirement("AQ0-R4")
def test_a_control_stream_that_ends_without_more_bytes_is_forgotten() -> None:
    pair = Pair()
    pair.server.close_receiver(pair.receiver)
    pair.run()
    for side in (pair.client, pair.server):
        assert side.core.channels == 0
        assert side.core.snapshot()["streams_out"] == 1  # that of the connection
