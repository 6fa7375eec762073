"""Acknowledgements of Relink, played on the sending half of a real core against a scripted peer.

A case has ``steps`` on one channel, whose messages count from ``start`` and which may be
``transactional``. ["send", COUNT] sends so many messages. ["commit" | "rollback", NUMBER] are this
side's decisions, ["received" | "consumed" | "committed" | "uncommitted", NUMBER] packets of the
peer. A NUMBER of null is a plain packet, another one a sequence packet.

``play`` answers what remains: ``outstanding``, the messages that are not consumed, or undecided and
without a result; ``unreceived``, those not known received; ``results``; ``stale_steps``, which were
without effect (RL-R8); and ``error_step``, the one at which a rule was broken and the case ends.
"""

from __future__ import annotations

from typing import Any, Final

from aqueduct._speedups.relink import packets as codec
from aqueduct._speedups.relink.packets import PacketDecoder, PacketStep
from aqueduct.config import Relink as Settings
from aqueduct.dissect.values import WireError, kind_of, list_of, number, one_of
from aqueduct.errors import LocalProtocolError, SequenceError
from aqueduct.protocol.relink import events
from aqueduct.protocol.relink.outbox import Outbox
from aqueduct.protocol.relink.outgoing import Outgoing
from aqueduct.protocol.relink.sending import SEQUENCE_MASK, target_of

__all__ = ["SentOnOneChannel", "play"]

_DECISIONS: Final = ("commit", "rollback")
_ACKNOWLEDGEMENTS: Final = codec.TYPE_NAMES[codec.SEQUENCE_ACK]
_WORDS: Final = ("send", *_DECISIONS, *_ACKNOWLEDGEMENTS)
_MOST: Final = 1 << 20
"""Messages of one case."""
_SETTINGS: Final = Settings(window_messages=_MOST)
_CHANNEL: Final = 0
_ID_SIZE: Final = 1


def play(case: Any) -> dict[str, Any]:
    """Plays a case. Raises WireError for one that cannot be played."""
    if not isinstance(case, dict):
        raise WireError(f"case must be an object, not {kind_of(case)}")
    transactional = case.get("transactional", False)
    if not isinstance(transactional, bool):
        raise WireError(f"case.transactional must be true or false, not {kind_of(transactional)}")
    start = number(case.get("start", 0), "case.start", SEQUENCE_MASK)
    steps = [
        _step(step, f"case.steps[{k}]")
        for k, step in enumerate(list_of(case.get("steps"), "case.steps"))
    ]
    if sum(count or 0 for what, count in steps if what == "send") > _MOST:
        raise WireError(f"case.steps sends more than {_MOST} messages")
    session = SentOnOneChannel(start, transactional=transactional)
    stale: list[int] = []
    broken: int | None = None
    for k, (what, given) in enumerate(steps):
        try:
            if not session.step(what, given):
                stale.append(k)
        except (SequenceError, LocalProtocolError):
            broken = k
            break
    return {**session.result(), "stale_steps": stale, "error_step": broken}


def _step(given: Any, where: str) -> tuple[str, int | None]:
    step = list_of(given, where)
    if len(step) != 2:
        raise WireError(f"{where} has {len(step)} items; it must be [word, number]")
    what = one_of(step[0], _WORDS, where)
    if step[1] is None and what != "send":
        return what, None
    return what, number(step[1], f"{where} ({what})", SEQUENCE_MASK)


class SentOnOneChannel:
    """One channel at its sender. What is sent leaves at once."""

    def __init__(self, start: int, *, transactional: bool) -> None:
        self._start = start
        self._transactional = transactional
        self._events: list[events.Event] = []
        self._outbox = Outbox(_ID_SIZE)
        self._core = Outgoing(
            _SETTINGS,
            _ID_SIZE,
            transactional=transactional,
            reported=self._events,
            outbox=self._outbox,
            start=start,
        )
        self._core.flow()

    def step(self, what: str, given: int | None) -> bool:
        """False: it was stale. Raises SequenceError or LocalProtocolError if it may not be."""
        if what == "send":
            for _ in range(given or 0):
                self._core.send((_CHANNEL,), (b"",))
            effect = True
        elif self._precedes_all(what, given):
            effect = False
        elif what in _DECISIONS:
            effect = self._decide(given, commit=what == "commit")
        else:
            effect = self._acknowledge(_ACKNOWLEDGEMENTS.index(what), given)
        self._outbox.take(1 << 60, 0.0)
        return effect

    def _precedes_all(self, what: str, given: int | None) -> bool:
        """Whether it is stale although no message has opened the channel (RL-R8)."""
        if given is None or _CHANNEL in self._core.channels:
            return False
        allowed = self._transactional or what in ("received", "consumed")
        return allowed and target_of(given, self._start) is None

    def _decide(self, given: int | None, *, commit: bool) -> bool:
        channel = self._core.channels.get(_CHANNEL)
        cursor = self._start if channel is None else channel.decided
        target = cursor if given is None else target_of(given, cursor)
        self._core.decide(_CHANNEL, cursor - 1 if target is None else target, commit=commit)
        return target is not None

    def _acknowledge(self, type_: int, given: int | None) -> bool:
        """As bytes of the peer."""
        form = codec.CHANNEL_ACK if given is None else codec.SEQUENCE_ACK
        decoder = PacketDecoder(0, _ID_SIZE)
        decoder.feed(codec.encode_packet(form, type_, (_CHANNEL,), _ID_SIZE, sequence=given))
        assert decoder.next() == PacketStep.PACKET
        before = self._cursors()
        sequence = None if decoder.sequence < 0 else decoder.sequence
        self._core.take_acknowledgement(decoder.channels[0], decoder.type, sequence)
        return self._cursors()[type_] != before[type_]

    def _cursors(self) -> tuple[int, int, int, int]:
        """What each type of acknowledgement moves."""
        channel = self._core.channels.get(_CHANNEL)
        if channel is None:
            return (self._start,) * 4
        return channel.received, channel.consumed, channel.resulted, channel.resulted

    def result(self) -> dict[str, Any]:
        """What remains, and the results."""
        channel = self._core.channels.get(_CHANNEL)
        outstanding = [] if channel is None else channel.outstanding()
        unreceived = range(0) if channel is None else range(channel.received, channel.next)
        return {
            "outstanding": [each & SEQUENCE_MASK for each in outstanding],
            "unreceived": [each & SEQUENCE_MASK for each in unreceived],
            "results": [
                [each & SEQUENCE_MASK, "committed" if event[3] else "uncommitted"]
                for event in self._events
                if event[0] == events.RESULT
                for each in event[2]
            ],
        }
