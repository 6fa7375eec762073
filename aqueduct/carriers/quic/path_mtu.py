"""How large a datagram may be on the way to a peer: path MTU discovery (RFC 8899).

Routers tell nothing that can be trusted, so packets of a size are sent as probes: what is
acknowledged fits. The loss of a probe says nothing of the network's load.
"""

from __future__ import annotations

from typing import Final

from aioquic.quic.packet_builder import QuicDeliveryState

__all__ = ["BASE", "LARGEST", "PathMtu"]

BASE: Final = 1200
"""Bytes of a datagram that every path of QUIC carries (RFC 9000 section 14)."""
LARGEST: Final = 16_383
"""Bytes of the largest datagram that is read; all of it is read in one step."""
_MOST: Final = 16_368
"""Bytes of the largest datagram that is sent: four of them, with headers, are what the kernel's
loopback device takes whole."""
_LADDER: Final = (1_232, 1_252, 1_452, 1_472, 8_932, 8_972, _MOST)
"""What MTUs of 1,280, 1,500 and 9,000 leave under IPv6 and IPv4, and loopback."""
_STEP: Final = 16  # bytes; the search ends when no more than these can be won
_PROBES: Final = 3  # of one size that are lost before it counts as too large
_RAISE: Final = 600.0  # seconds to the next search: the path may have changed
_LOST: Final = 3  # large packets in a row
_SILENCE: Final = 0.5  # seconds without a large packet that arrived


class PathMtu:
    """The datagram size of one path, in bytes of UDP payload. Times are seconds of any clock.

    ``probes`` says what to send now as probes; ``on_probe`` and ``refused`` tell what became of
    them. ``on_large`` tells of other packets above ``BASE``: when none arrives any more, the path
    has become smaller, and ``size`` is ``BASE`` again. What was sent in an earlier ``search`` says
    nothing of this one, and is not counted.
    """

    __slots__ = (
        "_above",
        "_losses",
        "_lost_large",
        "_lost_since",
        "_now",
        "_path",
        "_probing",
        "_steps",
        "next_search",
        "search",
        "size",
    )

    def __init__(self) -> None:
        self.size = BASE
        """What is known to arrive."""
        self.search = 0
        """The number of the search."""
        self.next_search: float | None = None
        """When the path is searched again, should anything be sent then; None: it is now."""
        self._above = _MOST + 1
        """The least size that is too large, as far as known."""
        self._losses: dict[int, int] = {}
        self._steps: tuple[int, ...] = _LADDER
        """Sizes that are tried first, as many at once as the window takes."""
        self._probing: set[int] = set()
        self._lost_large = 0
        self._lost_since = 0.0
        self._now = 0.0  # of the last call
        self._path: object = None

    def use(self, path: object) -> None:
        """The path of what is sent from now on. Of another one than before nothing is known."""
        if path is not self._path:
            known, self._path = self._path is not None, path
            if known:
                self._begin(_MOST + 1)

    def probes(self, now: float, room: int) -> list[int]:
        """Sizes to send a probe of now: ``room`` bytes of them, or one."""
        self._now = now
        if self._probing:
            return []
        if self.next_search is not None:
            if now < self.next_search:
                return []
            self._begin(_MOST + 1, self.size)
        wanted: list[int] = []
        self._steps = tuple(size for size in self._steps if self.size < size < self._above)
        for size in self._steps:
            room -= size
            if wanted and room < 0:
                break
            wanted.append(size)
        self._steps = self._steps[len(wanted) :]
        if not wanted:
            if self._above - self.size <= _STEP:
                self.next_search = now + _RAISE
                return []
            wanted = [self._candidate()]
        self._probing.update(wanted)
        return wanted

    def on_probe(self, delivery: QuicDeliveryState, size: int, search: int) -> None:
        """A probe of that size was acknowledged or lost."""
        if search != self.search:
            return
        self._probing.discard(size)
        if delivery is QuicDeliveryState.ACKED:
            if self.size < size < self._above:
                self.size = size
            return
        losses = self._losses[size] = self._losses.get(size, 0) + 1
        if losses >= _PROBES and size > self.size:
            self._above = min(self._above, size)

    def refused(self, size: int) -> None:
        """This machine sends no datagram of that size: its own device takes none."""
        self._probing.discard(size)
        if size <= self.size:
            self._begin(max(size, BASE + 1))
        else:
            self._above = min(self._above, size)

    def on_large(self, delivery: QuicDeliveryState, sent_at: float, search: int) -> None:
        """A packet above ``BASE`` was acknowledged or lost, maybe by the network's load."""
        if search != self.search:
            return
        if delivery is QuicDeliveryState.ACKED:
            self._lost_large = 0
            return
        if not self._lost_large:
            self._lost_since = sent_at
        self._lost_large += 1
        if self._lost_large >= _LOST and self._now - self._lost_since >= _SILENCE:
            self._begin(max(self.size, BASE + 1))

    def _candidate(self) -> int:
        """What to try next: a size with fewer than ``_PROBES`` losses, else the middle."""
        lost = [size for size in self._losses if self.size < size < self._above]
        return min(lost) if lost else (self.size + self._above) // 2

    def _begin(self, above: int, size: int = BASE) -> None:
        """Begins another search, between ``size`` and ``above``."""
        self.search += 1
        self.size = size
        self.next_search = None
        self._above = above
        self._losses.clear()
        self._steps = _LADDER
        self._probing.clear()
        self._lost_large = 0
