"""What tests of early data share: a relay that holds packets back, and a store of one ticket."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from aqueduct.carriers import quic
from aqueduct.carriers.quic.tickets import TicketStore
from tests.carriers.relay import Relay

CONNECT = sys.modules[quic.connect.__module__]
"""Where the store of the process is looked up."""


class Gate(Relay):
    """A relay that can hold back what clients send after the server's first answer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.shut = False
        self.deaf = False
        """Whether clients hear nothing."""
        self.answered = False
        self.flight: list[bytes] = []
        """What came from clients before the first answer."""

    def _pass(self, way: str, data: bytes, send: Callable[[bytes], Any]) -> None:
        if way == "down":
            self.answered = True
            if self.deaf:
                return
        elif not self.answered:
            self.flight.append(data)
        elif self.shut:
            self.dropped += 1
            return
        super()._pass(way, data, send)


class Again(TicketStore):
    """A store that keeps its first ticket, and gives it out for ever."""

    def keep(self, *arguments: Any) -> None:
        if not len(self):
            super().keep(*arguments)

    def take(self, server: Any, now: float) -> Any:
        kept = next(iter(self._tickets.values()), None)
        return kept[1] if kept is not None and kept[0] == server else None
