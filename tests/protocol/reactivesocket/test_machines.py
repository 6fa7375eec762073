"""Two peers that do anything that they may, whose bytes come in any pieces, beside a plain model.

Never more items than were asked for; a cancelled stream gets nothing more; every stream ends once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aqueduct._speedups.reactivesocket import reactive_frames as codec
from aqueduct.config import ReactiveSocket as Settings
from aqueduct.protocol.reactivesocket import events
from aqueduct.protocol.reactivesocket.connection import ReactiveConnection
from aqueduct.protocol.reactivesocket.cost import STREAM_COST

EXAMPLES = settings(max_examples=60, stateful_step_count=40)
KINDS = (codec.REQUEST_RESPONSE, codec.REQUEST_FNF, codec.REQUEST_STREAM, codec.REQUEST_SUB)
NUMBERED = (codec.REQUEST_STREAM, codec.REQUEST_SUB)
SETTINGS = Settings(frame_bytes=256, first_demand=5.0)
SIDES = st.integers(0, 1)
CHOICES = st.integers(0, 1 << 16)
ENDS = (events.COMPLETED, events.ERROR)
ITEMS = (b"", b"x", bytes(243), bytes(range(250)), b"y" * 700)


class Asked:
    """A stream as its requester knows it."""

    def __init__(self, kind: int, n: int) -> None:
        self.kind = kind
        self.asked = n
        self.items: list[bytes] = []
        self.ends = 0
        self.cancelled = False


class Answered:
    """A stream as its responder knows it."""

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.items: list[bytes] = []
        self.ends = 0


class Side:
    """A connection, its streams in both roles, and the bytes that are on their way to it."""

    def __init__(self, *, client: bool) -> None:
        self.core = ReactiveConnection(SETTINGS, client=client, setup=b"hello" if client else b"")
        self.asked: dict[int, Asked] = {}
        self.answered: dict[int, Answered] = {}
        self.wire = b""
        self.owed: list[int] = []

    def listen(self) -> None:
        for event in self.core.events_received():
            name = event[0]
            if name == events.SETUP:
                self.core.accept()
            elif name == events.REQUEST:
                self.owed.append(event[-1])
                self.answered[event[1]] = Answered(event[2])
            elif name == events.ITEM:
                self.owed.append(event[-1])
                stream = self.asked[event[1]]
                assert not stream.cancelled and not stream.ends
                stream.items.append(b"".join(map(bytes, event[2])))
                assert len(stream.items) <= stream.asked
            elif name in ENDS:
                stream = self.asked[event[1]]
                assert not stream.cancelled
                stream.ends += 1
                self.owed += event[3:]
            elif name in (events.CANCELLED, events.ABORTED):
                self.answered[event[1]].ends += 1
            else:
                assert name in (events.ACCEPTED, events.DEMAND), event


class TwoPeers(RuleBasedStateMachine):
    """What two applications may do, and what comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.sides = (Side(client=True), Side(client=False))
        self.cancelled_requests: Counter[int] = Counter()
        self.settle()

    def move(self, to: int, size: int | None = None) -> None:
        """Some bytes of what the other side has sent come."""
        side, other = self.sides[to], self.sides[1 - to]
        buffers, _ = other.core.take(1 if size else 1 << 30)
        side.wire += b"".join(map(bytes, buffers))
        came, side.wire = side.wire[:size], side.wire[size:] if size else b""
        side.core.receive_data(came, self.now)
        side.listen()
        assert side.core.error is None

    def settle(self) -> None:
        while any(side.wire or not side.core.idle for side in self.sides):
            self.move(0)
            self.move(1)

    @staticmethod
    def open_of(streams: Any, choice: int) -> int | None:
        found = sorted(streams)
        return found[choice % len(found)] if found else None

    @rule(side=SIDES, kind=st.sampled_from(KINDS), n=st.integers(0, 4), size=st.integers(0, 60))
    def request(self, side: int, kind: int, n: int, size: int) -> None:
        one = self.sides[side]
        stream = one.core.request(kind, bytes(size), n=n if kind in NUMBERED else None)
        if kind != codec.REQUEST_FNF:
            one.asked[stream] = Asked(kind, n if kind in NUMBERED else 1)

    @rule(side=SIDES, choice=CHOICES, n=st.integers(1, 3))
    def ask(self, side: int, choice: int, n: int) -> None:
        one = self.sides[side]
        stream = self.open_of(one.asked, choice)
        if stream is None or one.asked[stream].kind not in NUMBERED:
            return
        ended = one.asked[stream].ends or one.asked[stream].cancelled
        assert one.core.request_n(stream, n) is not bool(ended)
        one.asked[stream].asked += 0 if ended else n

    @rule(side=SIDES, choice=CHOICES)
    def cancel(self, side: int, choice: int) -> None:
        one = self.sides[side]
        stream = self.open_of(one.asked, choice)
        if stream is not None:
            asked = one.asked[stream]
            ended = asked.ends or asked.cancelled
            assert one.core.cancel(stream) is not bool(ended)
            asked.cancelled = asked.cancelled or not ended

    @rule(side=SIDES, choice=CHOICES, data=st.sampled_from(ITEMS))
    def item(self, side: int, choice: int, data: bytes) -> None:
        one = self.sides[side]
        stream = self.open_of(one.core.responding, choice)
        if stream is None or not one.core.demand(stream):
            return
        answered = one.answered[stream]
        assert not answered.ends
        if answered.kind == codec.REQUEST_RESPONSE:
            assert one.core.complete(stream, data)
            answered.ends += 1
        else:
            assert one.core.item(stream, [data[:3], data[3:]])
        answered.items.append(data)

    @rule(side=SIDES, choice=CHOICES, fails=st.booleans())
    def end(self, side: int, choice: int, fails: bool) -> None:
        one = self.sides[side]
        stream = self.open_of(one.core.responding, choice)
        if stream is None:
            return
        if fails or one.answered[stream].kind == codec.REQUEST_SUB:
            assert one.core.fail_stream(stream, "no more")
        else:
            assert one.core.complete(stream)
        one.answered[stream].ends += 1
        assert not one.core.fail_stream(stream, "again")

    @rule(to=SIDES, size=st.integers(1, 40))
    def some_bytes_come(self, to: int, size: int) -> None:
        self.move(to, size)

    @rule(to=SIDES)
    def all_bytes_come(self, to: int) -> None:
        self.move(to)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for side in self.sides:
            side.core.handle_deadline(self.now)
            side.listen()

    @rule(side=SIDES)
    def release(self, side: int) -> None:
        one = self.sides[side]
        while one.owed:
            one.core.release(one.owed.pop())

    @invariant()
    def every_stream_ends_once(self) -> None:
        for one, other in (self.sides, self.sides[::-1]):
            for stream, asked in one.asked.items():
                assert asked.ends + asked.cancelled <= 1
                assert (stream in one.core.requested) is not bool(asked.ends or asked.cancelled)
                answered = other.answered.get(stream)
                if answered is not None:
                    assert len(answered.items) <= asked.asked
                    assert asked.items == answered.items[: len(asked.items)]
            for stream, answered in one.answered.items():
                if answered.kind != codec.REQUEST_FNF:
                    assert answered.ends <= 1
                    assert (stream in one.core.responding) is not bool(answered.ends)

    def teardown(self) -> None:
        """Once all has come, both sides know the same, and nothing is kept but open streams."""
        self.settle()
        self.every_stream_ends_once()
        for one, other in (self.sides, self.sides[::-1]):
            assert set(one.core.requested) == set(other.core.responding)
            for stream, asked in one.asked.items():
                assert asked.cancelled or asked.items == other.answered[stream].items
            while one.owed:
                one.core.release(one.owed.pop())
            fragments = one.core._requester.fragments_cost
            streams = len(one.core.requested) + len(one.core.responding)
            assert fragments == 0
            assert one.core.held_bytes == STREAM_COST * streams


TestTwoPeers = TwoPeers.TestCase
TestTwoPeers.settings = EXAMPLES
for number in ("RS-14", "RS-15", "RS-16", "RS-17", "RS-18", "RS-R6", "RS-R7"):
    pytest.mark.requirement(number)(TestTwoPeers)
