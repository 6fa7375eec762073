"""Who makes connections: it dials, or listens."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["ReactiveOwner"]


class ReactiveOwner(Protocol):
    """Who has made a connection."""

    def made(self, connection: Any) -> None:
        """Its transport is there. Raises AqueductError if it is not wanted."""

    def opened(self, connection: Any) -> None:
        """Frames may flow."""

    async def offered(self, connection: Any) -> str | None:
        """At a server: the SETUP is there. None: it is taken; else why not."""

    def over(self, connection: Any) -> None:
        """It is over; see its ``error``."""

    def released(self, connection: Any) -> None:
        """Its transport is gone."""
