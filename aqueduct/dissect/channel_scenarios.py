"""Scenarios of loss in transit (AQ-R27), played on a real connection against a scripted peer.

A case has the ``side`` that it looks at and its ``steps``; ``play`` answers which of the channels
attached there are accessible, lost and pending in the end.

    ["send", CHANNEL, "reliable" | "unreliable", NUMBER, [ATTACHED, ...]]    this side sends
    ["ack" | "nack", CHANNEL, "reliable" | "unreliable", NUMBER]             the peer answers
    ["close", CHANNEL]      CLOSE_RECEIVER arrives
    ["got", CHANNEL]        the application gets a sender that the peer created
    ["forget", CHANNEL]     FORGET_CHANNEL arrives, for one of those

Channels and numbers in a case are names: a connection counts both by itself, without holes, and
what its frames say is put back into the names of the case. Datagrams can only be settled in the
order of their numbers (AQ-R15), so those of one channel are sent in the order in which the case
settles them; which numbers they have decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from aqueduct._speedups import channels as codec
from aqueduct.config import Config, Limits
from aqueduct.dissect.values import HIGHEST, WireError, kind_of, list_of, number, one_of
from aqueduct.errors import AqueductError, LostInTransit
from aqueduct.protocol.channels import ids
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.events import HeadersReceived
from aqueduct.protocol.common.receiver import ReceiverHalf
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import Mode, SenderHalf

__all__ = ["LossScenario", "ScenarioStep", "play", "read_steps"]

_SIDES: Final = ("client", "server")
_SPACES: Final = ("reliable", "unreliable")
_ARGUMENTS: Final = {"send": 4, "ack": 3, "nack": 3, "close": 1, "got": 1, "forget": 1}
_AMPLE: Final = 1 << 60
_CONFIG: Final = Config(
    limits=Limits(
        frame_bytes=_AMPLE,
        attachments=_AMPLE,
        channels=_AMPLE,
        unacknowledged=_AMPLE,
    )
)
"""Limits are an endpoint's policy: here they are off."""

Name = tuple[int, str, int]
"""A message of a case: channel, space and number."""


def play(case: Any) -> dict[str, list[int]]:
    """Plays a case; sorted lists. Raises WireError for one that cannot happen."""
    if not isinstance(case, dict):
        raise WireError(f"case must be an object, not {kind_of(case)}")
    side = one_of(case.get("side"), _SIDES, "case.side")
    scenario = LossScenario(side == "client", read_steps(case.get("steps"), side))
    scenario.play()
    return scenario.result()


@dataclass(frozen=True)
class ScenarioStep:
    """One step, checked by itself."""

    where: str
    what: str
    channel: int
    space: str = ""
    number: int = 0
    attached: tuple[int, ...] = ()

    @property
    def message(self) -> Name:
        """The message that is sent or settled."""
        return self.channel, self.space, self.number

    def wrong(self, text: str) -> WireError:
        """An error about this step."""
        return WireError(f"{self.where}: {text}")


def read_steps(given: Any, side: str) -> list[ScenarioStep]:
    """Steps from JSON, checked one after the other. Raises WireError with the number of a step."""
    cast = _Cast(_SIDES.index(side))
    steps = []
    for k, entry in enumerate(list_of(given, "case.steps")):
        step = _read_step(list_of(entry, f"case.steps[{k}]"), f"case.steps[{k}]")
        cast.check(step)
        steps.append(step)
    return steps


def _read_step(entry: list[Any], at: str) -> ScenarioStep:
    if not entry:
        raise WireError(f"{at} is empty; known: {', '.join(_ARGUMENTS)}")
    what = one_of(entry[0], _ARGUMENTS, at)
    where = f"{at} ({what})"
    if len(entry) - 1 != _ARGUMENTS[what]:
        raise WireError(f"{where} has {len(entry) - 1} arguments; it takes {_ARGUMENTS[what]}")
    channel = number(entry[1], f"{where}: channel")
    if len(entry) == 2:
        return ScenarioStep(where, what, channel)
    space = one_of(entry[2], _SPACES, f"{where}: space")
    num = number(entry[3], f"{where}: number", HIGHEST - 1)
    inner = list_of(entry[4], f"{where}: attached") if what == "send" else []
    attached = tuple(number(c, f"{where}: attached[{k}]") for k, c in enumerate(inner))
    return ScenarioStep(where, what, channel, space, num, attached)


@dataclass
class _Cast:
    """Who is on stage: what a step may speak of."""

    side: int
    created: set[int] = field(default_factory=set)
    given: set[int] = field(default_factory=set)
    ended: dict[int, str] = field(default_factory=dict)
    sent: set[Name] = field(default_factory=set)
    settled: set[Name] = field(default_factory=set)

    def check(self, step: ScenarioStep) -> None:
        """Raises WireError for a step that cannot follow those before it."""
        channel = step.channel
        if step.what == "got":
            self._check_new(step, channel, by=1 - self.side)
            if ids.sender(channel) != self.side:
                raise step.wrong(f"{ids.describe(channel)} is not a sender of this side")
            self.given.add(channel)
            return
        self._check_sender(step)
        if step.what == "send":
            if step.message in self.sent:
                raise step.wrong(f"{_describe(step.message)} was sent before")
            self.sent.add(step.message)
            for inner in step.attached:
                self._check_new(step, inner, by=self.side)
                self.created.add(inner)
        elif step.what in ("ack", "nack"):
            self._check_settles(step)
        else:
            if step.what == "forget" and channel not in self.given:
                raise step.wrong(f"only the creator of {ids.describe(channel)} forgets it (AQ-23)")
            self.ended[channel] = step.where

    def _check_new(self, step: ScenarioStep, channel: int, *, by: int) -> None:
        if channel == ids.ENTRYPOINT:
            raise step.wrong("the entrypoint is never attached (AQ-R4)")
        if ids.creator(channel) != by:
            raise step.wrong(f"{ids.describe(channel)} must be created by the {_SIDES[by]} (AQ-16)")
        if channel in self.created or channel in self.given:
            raise step.wrong(f"{ids.describe(channel)} is attached twice (AQ-R4)")

    def _check_sender(self, step: ScenarioStep) -> None:
        channel = step.channel
        if ids.sender(channel) != self.side:
            raise step.wrong(f"the {_SIDES[self.side]} does not send on {ids.describe(channel)}")
        if channel not in self.created and channel not in self.given and channel != ids.ENTRYPOINT:
            raise step.wrong(f"{ids.describe(channel)} was never attached")
        if channel in self.ended:
            raise step.wrong(f"{ids.describe(channel)} ended at {self.ended[channel]}")

    def _check_settles(self, step: ScenarioStep) -> None:
        if step.message not in self.sent:
            raise step.wrong(f"{_describe(step.message)} was never sent (AQ-R15, AQ-R16)")
        if step.what == "nack" and step.space == "reliable":
            raise step.wrong("a reliable message is nacked by the end of its channel alone (AQ-36)")
        if step.space == "unreliable" and step.message in self.settled:
            raise step.wrong(f"{_describe(step.message)} is settled already (AQ-R15)")
        self.settled.add(step.message)


class LossScenario:
    """One side of a connection, and what its peer says to it."""

    def __init__(self, is_client: bool, steps: list[ScenarioStep]) -> None:
        self.core = ChannelConnection(is_client=is_client, config=_CONFIG)
        self._steps = steps
        self._side = 0 if is_client else 1
        self._order = _sending_order(steps)
        self._halves: dict[int, SenderHalf | ReceiverHalf] = {0: self.core.entrypoint}
        """What this side holds, by the channel's name in the case."""
        self._numbers: dict[Name, int] = {}
        """The connection's own number of each message."""
        self._attached: list[int] = []
        self._controls: dict[int, int] = {}
        """The peer's control stream of each channel, by the channel's own id."""
        self._peer_streams = 0
        self._carrying: tuple[ReceiverHalf, int] | None = None
        """On what the peer's channels come, and its stream."""
        self._brought = 0
        self._said: dict[int, bytearray] = {}
        """Everything that this side wrote, by stream."""
        self._begin()

    def play(self) -> None:
        """All steps. Raises WireError for one that the connection refuses."""
        for k, step in enumerate(self._steps):
            try:
                if step.what == "send":
                    for index in self._order[k]:
                        self._send(self._steps[index])
                else:
                    getattr(self, f"_{step.what}")(step)
            except AqueductError as error:
                raise step.wrong(str(error)) from error
            self._check_alive(step.where)

    def result(self) -> dict[str, list[int]]:
        """Where the attached channels stand, by their names."""
        forgotten, undecided = self.forgotten(), self.core.pending_channels()
        standing: dict[str, list[int]] = {"accessible": [], "lost": [], "pending": []}
        for name in sorted(self._attached):
            half = self._halves.get(name)
            if half is None or half.channel in forgotten:
                standing["lost"].append(name)
            elif half.channel in undecided:
                standing["pending"].append(name)
            else:
                standing["accessible"].append(name)
        return standing

    def forgotten(self) -> set[int]:
        """The channels that this side has said FORGET_CHANNEL for, by their own ids."""
        said = set()
        for data in self._said.values():
            decoder = codec.FrameDecoder(from_server=self._side == 1)
            decoder.auto_admit = len(data)
            decoder.feed(bytes(data))
            while (frame := decoder.next()) is not None:
                if isinstance(frame, codec.ForgetChannel):
                    said.add(decoder.route)
        return said

    # What this side does

    def _send(self, step: ScenarioStep) -> None:
        half = self._halves.get(step.channel)
        self._attached.extend(step.attached)
        if half is None or isinstance(half.error, LostInTransit):
            return  # what it would carry is lost with it (AQ-R27.1)
        assert isinstance(half, SenderHalf)
        wanted = [
            Attach(keep_sender=ids.sender(c) == self._side, is_oneshot=ids.oneshot(c))
            for c in step.attached
        ]
        mode = Mode.UNRELIABLE if step.space == "unreliable" else Mode.ORDERED
        self._numbers[step.message] = self.core.send(half, b"", 0.0, attachments=wanted, mode=mode)
        for name, attach in zip(step.attached, wanted, strict=True):
            assert attach.half is not None
            self._halves[name] = attach.half
        self._apply()

    # What the peer does

    def _ack(self, step: ScenarioStep) -> None:
        if step.space == "unreliable":
            self._settle(step, [1])
        elif step.message in self._numbers:
            self._control(step, codec.encode_ack_reliable([self._numbers[step.message], 1]))

    def _nack(self, step: ScenarioStep) -> None:
        self._settle(step, [0, 1])

    def _settle(self, step: ScenarioStep, ranges: list[int]) -> None:
        if step.message in self._numbers:
            channel = self._halves[step.channel].channel
            self._control(step, codec.encode_ack_nack_unreliable(channel, ranges))

    def _close(self, step: ScenarioStep) -> None:
        self._control(step, codec.CLOSE_RECEIVER)

    def _forget(self, step: ScenarioStep) -> None:
        self._say([codec.encode_route_to(step.channel), codec.FORGET_CHANNEL])

    def _got(self, step: ScenarioStep) -> None:
        assert self._carrying is not None
        receiver, stream = self._carrying
        message = codec.encode_message(self._brought, b"", (), [(step.channel, ())])
        self._brought += 1
        self._feed(stream, b"".join(map(bytes, message)))
        self._check_alive(step.where)
        received = self.core.receive(receiver, 0.0)
        assert received is not None
        ((half, _),) = received.attachments
        self._halves[step.channel] = half

    def _control(self, step: ScenarioStep, frame: bytes) -> None:
        half = self._halves.get(step.channel)
        if half is None:
            return  # it was lost before it was created
        if half.channel not in self._controls:
            route = codec.encode_route_to(half.channel)
            self._controls[half.channel] = self._say([route, frame], fin=False)
        else:
            self._feed(self._controls[half.channel], frame)

    def _say(self, frames: list[bytes], *, fin: bool = True) -> int:
        """On a stream of its own."""
        stream = self._peer_streams
        self._peer_streams += 1
        self._feed(stream, b"".join(frames), fin=fin)
        return stream

    def _feed(self, stream: int, data: bytes, *, fin: bool = False) -> None:
        self.core.receive_stream(stream, data, fin, 0.0)
        self._apply()

    # The connection

    def _begin(self) -> None:
        """The exchange of version and headers, and a channel for what the peer creates."""
        self.core.start(0.0, _AMPLE)
        self.core.openable_changed(_AMPLE, 0.0)
        self._say([codec.VERSION, codec.ACK_VERSION, codec.encode_connection_headers(())])
        if any(step.what == "got" for step in self._steps):
            receiver = self.core.entrypoint
            if isinstance(receiver, SenderHalf):
                way = Attach(keep_sender=False, is_oneshot=False)
                number = self.core.send(receiver, b"", 0.0, attachments=[way])
                self._apply()
                ack = codec.encode_ack_reliable([number, 1])
                route = codec.encode_route_to(receiver.channel)
                self._controls[receiver.channel] = self._say([route, ack], fin=False)
                assert isinstance(way.half, ReceiverHalf)
                receiver = way.half
            stream = self._say([codec.encode_route_to(receiver.channel)], fin=False)
            self._carrying = receiver, stream
        self._check_alive("the beginning")

    def _apply(self) -> None:
        for event in self.core.events_received():
            if isinstance(event, HeadersReceived) and not self.core.is_client:
                self.core.accept_headers((), 0.0)
        for effect in self.core.effects_to_apply():
            if effect[0] == effects.WRITE:
                _, stream, buffers, _ = effect
                self._said.setdefault(stream, bytearray()).extend(b"".join(map(bytes, buffers)))
                self.core.written(stream, sum(map(len, buffers)))

    def _check_alive(self, where: str) -> None:
        if self.core.error is not None:
            raise WireError(f"{where}: the connection closed: {self.core.error}")


def _sending_order(steps: list[ScenarioStep]) -> dict[int, list[int]]:
    """Which messages leave at each ``send``: datagrams of a channel in the order of settling.

    One that is settled before an earlier one leaves before it, the earlier ones that nobody
    settles leave last; what is sent on a channel depends on nothing that happens in between.
    """
    settled = {step.message: k for k, step in enumerate(steps) if step.what in ("ack", "nack")}
    order: dict[int, list[int]] = {k: [] for k, step in enumerate(steps) if step.what == "send"}
    channels: dict[int, list[int]] = {}
    for k in order:
        if steps[k].space == "unreliable":
            channels.setdefault(steps[k].channel, []).append(k)
        else:
            order[k].append(k)
    for sends in channels.values():
        queue = _by_settling(sends, steps, settled)
        following = next(queue, None)
        gone: set[int] = set()
        for k in sends:
            while k not in gone and following is not None:
                order[k].append(following)
                gone.add(following)
                following = next(queue, None)
    return order


def _by_settling(
    sends: list[int], steps: list[ScenarioStep], settled: dict[Name, int]
) -> Iterator[int]:
    never = len(steps)
    return iter(sorted(sends, key=lambda k: (settled.get(steps[k].message, never), k)))


def _describe(message: Name) -> str:
    channel, space, num = message
    return f"{space} message {num} on {ids.describe(channel)}"
