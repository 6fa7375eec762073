"""What a connection holds of the memory that this process has for all connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar
from weakref import ReferenceType, ref

from aqueduct.config import Config
from aqueduct.endpoint import accounts

__all__ = ["ReactiveMemory"]


class ReactiveMemory:
    """The bytes of one connection in the accounts of the process.

    Above ``Flow.process_receive_budget`` a connection reads nothing while it has something that the
    application is to take or to give back. Of those that have parts alone one at a time goes on.
    """

    _first: ClassVar[ReferenceType[ReactiveMemory] | None] = None
    """Who goes on above the budget."""

    def __init__(self, config: Config, wake: Callable[[], None]) -> None:
        """``wake`` may be called in any thread: there may be room."""
        process = accounts.process()
        self.wake = wake
        self.received = 0
        self.sending = 0
        self._receiving_account = process.receiving
        self._sending_account = process.sending
        self._receive_most = config.flow.process_receive_bytes
        self._send_most = config.flow.process_send_bytes
        self._patience = config.timing.stall_deadline
        self._since = 0.0
        """When it became the one that goes on."""

    def count(self, received: int, sending: int) -> None:
        """The connection holds so many bytes now."""
        if received != self.received:
            grown, self.received = received - self.received, received
            self._receiving_account.charge(grown)
        if sending != self.sending:
            grown, self.sending = sending - self.sending, sending
            self._sending_account.charge(grown)
        if not self.received:
            self._pass_on()

    def give_back(self, size: int) -> None:
        """So many bytes that came are done with. Others that wait for room are told."""
        size = min(size, self.received)
        self.received -= size
        self._receiving_account.charge(-size)

    def may_read(self, whole: int, now: float) -> bool:
        """Whether more may be read; if not, ``wake`` is called. Look again after a while, too.

        ``whole``: bytes that the application can take, or give back.
        """
        account = self._receiving_account
        if not self.received or account.used < self._receive_most:
            account.waiting.pop(self, None)
            return True
        if not whole and self._goes_on(now):
            account.waiting.pop(self, None)
            return True
        account.waiting[self] = None
        if whole:
            self._pass_on()
        return False

    def may_send(self, queued: int) -> bool:
        """Whether more may be queued. A connection that has nothing queued always may."""
        used = self._sending_account.used + queued - self.sending
        return not queued or used < self._send_most

    def end(self, received: int) -> None:
        """The connection is over, and the application has so many bytes of it."""
        self._receiving_account.waiting.pop(self, None)
        self._pass_on()
        self.count(received, 0)

    # Within

    def _goes_on(self, now: float) -> bool:
        first = None if self._first is None else self._first()
        if first is self:
            return True
        # One whose peer sends nothing more for a while keeps the others waiting no longer.
        if first is None or now - first._since > self._patience:
            type(self)._first = ref(self)
            self._since = now
            return True
        return False

    def _pass_on(self) -> None:
        if self._first is not None and self._first() is self:
            type(self)._first = None
            self._receiving_account.notify()
