"""Which channels are gone (AQ-46).

Ids are never reused, so the destroyed indexes of the four remote spaces are kept as range sets
for the life of the connection: no false positives and no ghosts (AQ-R24).
"""

from __future__ import annotations

from aqueduct._speedups.base.ranges import RangeSet

__all__ = ["Tombstones"]


class Tombstones:
    """Sets of channel ids, compact: one range set for each index space."""

    __slots__ = ("_limit", "_spaces")

    def __init__(self, range_limit: int) -> None:
        self._limit = range_limit
        self._spaces: dict[int, RangeSet] = {}

    def add(self, channel: int) -> None:
        """Records a channel; above the limit of ranges the lowest go (section 3.5 allows it)."""
        space, number = channel & 7, channel >> 3  # as in ``ids``, which would be calls
        indexes = self._spaces.get(space)
        if indexes is None:
            indexes = self._spaces[space] = RangeSet()
        indexes.add(number, number + 1)
        while len(indexes) > self._limit:
            indexes.pop_first()

    def __contains__(self, channel: int) -> bool:
        indexes = self._spaces.get(channel & 7)
        return indexes is not None and channel >> 3 in indexes

    @property
    def ranges(self) -> int:
        """Ranges held in all spaces."""
        return sum(len(indexes) for indexes in self._spaces.values())
