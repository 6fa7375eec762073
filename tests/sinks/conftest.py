"""A PostgreSQL of the tests' own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sinks.servers import Server, running


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """One server for all tests of the process."""
    with running() as server:
        yield server
