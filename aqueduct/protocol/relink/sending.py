"""A channel at its sender: what is outstanding, and what the peer's acknowledgements mean for it.

Numbers of messages count from 0 without an end. On the wire they have 32 bits (RL-16);
``target_of`` finds which number is meant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import takewhile
from typing import Final, TypeAlias

from aqueduct.errors import SequenceError
from aqueduct.protocol.relink.cost import EMPTY_COST, message_cost
from aqueduct.protocol.relink.state import SENDING, ChannelState, SendingInput

__all__ = ["SEQUENCE_MASK", "Buffers", "SendChannel", "SentMessage", "target_of"]

SEQUENCE_MASK: Final = (1 << 32) - 1
_HALF: Final = 1 << 31

Buffers: TypeAlias = tuple["bytes | bytearray | memoryview", ...]


def target_of(sequence: int, cursor: int) -> int | None:
    """The number that a sequence number of 32 bits means; None: it is stale (RL-R8).

    ``cursor`` is the number that a packet without a sequence number would target.
    """
    distance = (sequence - (cursor - 1)) & SEQUENCE_MASK
    if distance == 0 or distance > _HALF:
        return None
    return cursor - 1 + distance


class SentMessage:
    """A message until it is received: its parts, by reference, their bytes, and what it costs.

    ``one_part``: the buffers are one part.
    """

    __slots__ = ("cost", "one_part", "parts", "size")

    def __init__(self, parts: Buffers, size: int, *, one_part: bool = False) -> None:
        self.parts: Buffers = parts
        self.size = size
        self.one_part = one_part
        self.cost = message_cost(size, 1 if one_part else len(parts))


class SendChannel:
    """The messages of one channel that the peer has not consumed, and five cursors.

    Each cursor is the number of the next message that it may pass: ``next`` of what is sent here,
    ``received``, ``consumed`` (or rolled back), ``decided`` (commit and rollback together) and
    ``resulted`` (committed and uncommitted together, RL-R7). ``sent``: how far messages have left
    on any connection; nothing beyond can be acknowledged.
    """

    __slots__ = (
        "_decisions",
        "_first",
        "_messages",
        "consumed",
        "decided",
        "identifier",
        "next",
        "outstanding_cost",
        "received",
        "resulted",
        "sent",
        "start",
        "state",
        "transactional",
        "undecided_cost",
    )

    def __init__(self, identifier: int, *, transactional: bool, start: int = 0) -> None:
        self.identifier = identifier
        self.transactional = transactional
        self.state = ChannelState.OPEN
        self.next = self.sent = start
        self.received = self.consumed = self.decided = self.resulted = start
        self.start = start
        self.outstanding_cost = 0
        """Of the messages that fill the window."""
        self.undecided_cost = 0
        """Of the messages that are neither committed nor rolled back; 0 on plain channels."""
        self._messages: deque[SentMessage] = deque()
        self._first = start
        # Runs of decisions whose results are not known: the number behind each, and whether it
        # is a commit. Rollbacks are kept, as a cut may have swallowed them (RL-R11).
        self._decisions: deque[tuple[int, bool]] = deque()

    def __repr__(self) -> str:
        return f"channel {self.identifier}"

    # What the application does

    def change(self, given: SendingInput) -> bool:
        """Goes on by the table; False: that may not be now."""
        after = SENDING.get((self.state, given))
        if after is None:
            return False
        self.state = after
        return True

    def add(self, message: SentMessage) -> int:
        """Takes a message; returns its number."""
        self._messages.append(message)
        self.outstanding_cost += message.cost
        if self.transactional:
            self.undecided_cost += message.cost
        self.next += 1
        return self.next - 1

    def decide(self, last: int, *, commit: bool) -> None:
        """A decision about the messages from ``decided`` to ``last``.

        Commits stay apart: what was committed as one comes as one, also if it is said again.
        """
        for number in range(self.decided, last + 1):
            self.undecided_cost -= self._messages[number - self._first].cost
            if not commit:
                self._forget(number)
        decisions = self._decisions
        if decisions and not decisions[-1][1] and not commit:
            decisions.pop()
        decisions.append((last + 1, commit))
        self.decided = last + 1
        self._trim()

    # What the peer acknowledges. Each returns False if it was stale, and raises SequenceError.

    def on_received(self, sequence: int | None) -> bool:
        """``sequence``: of a sequence packet; None: the next message."""
        target = self._target(sequence, self.received, "received")
        if target is None:
            return False
        self._pass_received(target + 1)
        self._trim()
        return True

    def on_consumed(self, sequence: int | None) -> bool:
        """As ``on_received``; what is consumed was received (RL-R9)."""
        target = self._target(sequence, self.consumed, "consumed")
        if target is None:
            return False
        self._pass_received(target + 1)
        self._pass_consumed(target + 1)
        self._trim()
        return True

    def on_result(self, sequence: int | None) -> list[int] | None:
        """The numbers that a result, committed or uncommitted, is about; None: it was stale."""
        if not self.transactional:
            raise SequenceError(f"{self!r} has no transactions, and the peer sends results")
        target: int | None
        if sequence is None:
            target = next(self._committed(self.resulted), self.decided)
        else:
            target = target_of(sequence, self.resulted)
        if target is None:
            return None
        numbers = list(takewhile(lambda number: number <= target, self._committed(self.resulted)))
        if target >= self.decided or not numbers or numbers[-1] != target:
            raise SequenceError(
                f"{self!r}: the peer sends a result for message {target}, which was not committed "
                "(RL-R9)"
            )
        self.resulted = target + 1
        while self._decisions and self._decisions[0][0] <= self.resulted:
            self._decisions.popleft()
        self._pass_received(target + 1)
        self._pass_consumed(target + 1)
        self._trim()
        return numbers

    # What a new connection needs

    def rewind(self) -> Iterator[tuple[int, SentMessage]]:
        """The messages to send again, with their numbers: those not known received."""
        for number in range(self.received, self.next):
            yield number, self._messages[number - self._first]

    def decisions(self) -> Iterator[tuple[int, bool]]:
        """The last number of each run of decisions without results, and whether to commit."""
        for end, commit in self._decisions:
            yield end - 1, commit

    @property
    def acknowledged(self) -> bool:
        """Whether the peer has ever acknowledged anything of this channel."""
        return self.received > self.start

    # Questions

    @property
    def unreceived(self) -> int:
        """Messages that are not known received."""
        return self.next - self.received

    @property
    def filling(self) -> int:
        """Messages that fill the window."""
        return len(self._messages)

    @property
    def settled(self) -> bool:
        """Whether a close may be sent (RL-R15)."""
        if self.received < self.next:
            return False
        return not any(commit for _, commit in self._decisions)

    @property
    def finished(self) -> bool:
        """Whether nothing is ``outstanding``."""
        if not self.transactional:
            return self.consumed == self.next
        return self.decided == self.next and next(self._committed(self.resulted), None) is None

    def outstanding(self) -> list[int]:
        """The numbers that the peer may still consume or has still to answer."""
        if not self.transactional:
            return list(range(self.consumed, self.next))
        committed = set(self._committed(self.resulted))
        return [
            number
            for number in range(self.resulted, self.next)
            if number >= self.decided or number in committed
        ]

    def unconfirmed(self) -> list[int]:
        """The committed numbers whose result is not known."""
        return list(self._committed(self.resulted))

    # Within

    def _committed(self, begin: int) -> Iterator[int]:
        """The numbers from ``begin`` on that are committed and have no result."""
        for end, commit in self._decisions:
            if commit:
                yield from range(begin, end)
            begin = max(begin, end)

    def _target(self, sequence: int | None, cursor: int, what: str) -> int | None:
        target = cursor if sequence is None else target_of(sequence, cursor)
        if target is not None and target >= self.sent:
            raise SequenceError(
                f"{self!r}: the peer acknowledges message {target} as {what}, and {self.sent} were "
                "sent (RL-R8)"
            )
        return target

    def _pass_received(self, end: int) -> None:
        for number in range(self.received, end):
            message = self._messages[number - self._first]
            message.parts = ()  # nothing is sent again of it; it keeps its room until consumed
        self.received = max(self.received, end)

    def _pass_consumed(self, end: int) -> None:
        self.consumed = max(self.consumed, end)

    def _forget(self, number: int) -> None:
        """The content of a message that is rolled back: it is sent again without parts (RL-R9)."""
        message = self._messages[number - self._first]
        self.outstanding_cost -= message.cost - EMPTY_COST
        message.parts, message.size, message.cost = (), 0, EMPTY_COST

    def _trim(self) -> None:
        """Lets messages go from the front that fill the window no more."""
        messages = self._messages
        if self.transactional:
            waits = next(self._committed(self.resulted), self.decided)
            end = min(self.received, waits)
        else:
            end = self.consumed
        while self._first < end:
            self.outstanding_cost -= messages.popleft().cost
            self._first += 1
