"""A dissector: wire bytes to frames and back, for people and for programs.

It works through the compiled codecs with the checks that a connection makes; limits, which are
an endpoint's policy, are off. ``answer_lines`` is a loop over JSON lines: each is one request

    {"protocol": "aq", "op": "decode", "context": {"from": "client", "carrier": "stream"},
     "hex": "03000400000000"}
    {"protocol": "aq", "op": "encode", "context": {...}, "value": [{"type": "ROUTE_TO", ...}]}

    {"protocol": "aq", "op": "scenario", "list": "loss", "case": {"side": "client", "steps": [...]}}

and gets one line: ``{"decoded": [...]}``, ``{"hex": "..."}``, ``{"result": {...}}``, or ``{"error":
"...", "kind": "truncated" | "malformed"}``. Headers are [key, value] pairs in hex, payloads hex; a
channel shows the bits of its id, and is taken by its id, by its bits, or by both if they agree. A
decode with ``"meaning": true`` is also told what the last acknowledging frame says. A scenario is
played on a real connection core against a scripted peer: ``loss`` has its steps (AQ-R27), and
``sessions`` those of bpmux; ``bad_sessions`` are the ones that an error must answer.
``acknowledgements`` are about the messages of one channel of Relink, ``responses`` about those to
one request of ReactiveSocket.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Final, Protocol

from aqueduct.dissect import (
    bpmux,
    bpmux_scenarios,
    channel_scenarios,
    channels,
    control_streams,
    reactivesocket,
    reactivesocket_scenarios,
    relink,
    relink_scenarios,
)
from aqueduct.dissect.values import WireError, hex_bytes, kind_of, list_of, one_of

__all__ = ["PROTOCOLS", "SCENARIOS", "Context", "WireError", "answer", "answer_lines", "dissect"]

Frames = list[tuple[int, dict[str, Any]]]


class Context(Protocol):
    """One protocol with what must be known beside the bytes: who sent them, and how."""

    @property
    def single(self) -> bool:
        """Whether the bytes are one object instead of a list of frames."""

    def decode(self, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
        """Frames with the offset each begins at. Raises WireError behind the last good one."""

    def encode(self, value: list[Any]) -> bytes:
        """The bytes of ``value``, checked like bytes that came. Raises WireError."""

    def meaning(self, frames: list[dict[str, Any]]) -> Any:
        """What the last acknowledging frame says, None without one."""

    def describe(self, frame: dict[str, Any]) -> list[str]:
        """Lines about one frame for people."""


PROTOCOLS: Final[Mapping[str, Callable[[Any], Sequence[Context]]]] = {
    "aq": channels.contexts,
    "aq0": control_streams.contexts,
    "bpmux": bpmux.contexts,
    "control-streams": control_streams.contexts,
    "reactivesocket": reactivesocket.contexts,
    "relink": relink.contexts,
}
"""What ``protocol`` may name, and how a request's context is read: as all that it leaves open.

``aq0`` is how the test vectors call the control-stream draft.
"""

SCENARIOS: Final[Mapping[str, Mapping[str, Callable[[Any], Any]]]] = {
    "aq": {"loss": channel_scenarios.play},
    "aq0": {},
    "bpmux": {"sessions": bpmux_scenarios.play, "bad_sessions": bpmux_scenarios.play},
    "control-streams": {},
    "reactivesocket": {"responses": reactivesocket_scenarios.play},
    "relink": {"acknowledgements": relink_scenarios.play},
}
"""What ``list`` may name, for each protocol: from a case to its result."""


def answer_lines(requests: Iterable[bytes], answers: IO[str]) -> None:
    """Answers each line with one line, flushed; no line ends the loop, whatever is in it."""
    for line in requests:
        print(json.dumps(answer(line)), file=answers, flush=True)


def answer(line: bytes | str) -> dict[str, Any]:
    """The answer to one request line. Never raises for what is in the line."""
    try:
        return _answer(_request(line))
    except WireError as error:
        return {"error": str(error), "kind": error.kind}


def _request(line: bytes | str) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, too deep
        raise WireError(f"not one JSON object on a line: {error}") from error
    if not isinstance(request, dict):
        raise WireError(f"a request is one JSON object, not {kind_of(request)}")
    return request


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    protocol = one_of(request.get("protocol", "aq"), PROTOCOLS, "protocol")
    operation = one_of(request.get("op"), ("decode", "encode", "scenario"), "op")
    if operation == "scenario":
        scenarios = SCENARIOS[protocol]
        return {
            "result": scenarios[one_of(request.get("list"), scenarios, "list")](request.get("case"))
        }
    contexts = PROTOCOLS[protocol](request.get("context", {}))
    if operation == "encode":
        value = request.get("value")
        value = [value] if contexts[0].single else list_of(value, "value")
        return {"hex": _encode(contexts, value).hex()}
    context, frames, failure = _decode(contexts, hex_bytes(request.get("hex"), "hex"))
    if failure is not None:
        raise failure
    decoded = [frame for _, frame in frames]
    said = {"decoded": decoded[0] if context.single else decoded}
    if request.get("meaning"):
        said["meaning"] = context.meaning(decoded)
    return said


def _encode(contexts: Sequence[Context], value: list[Any]) -> bytes:
    """The bytes, if one of the contexts allows them; else the first one's error."""
    errors = []
    for context in contexts:
        try:
            return context.encode(value)
        except WireError as error:
            errors.append(error)
    raise errors[0]


def _decode(contexts: Sequence[Context], data: bytes) -> tuple[Context, Frames, WireError | None]:
    """What the context that gets furthest reads, and what stopped it."""
    attempts = []
    for context in contexts:
        frames: Frames = []
        try:
            for entry in context.decode(data):
                frames.append(entry)
        except WireError as error:
            attempts.append((context, frames, error))
        else:
            return context, frames, None
    return max(attempts, key=lambda attempt: len(attempt[1]))


def dissect(protocol: str, text: str, context: Mapping[str, Any]) -> Iterator[str]:
    """Lines about the frames in ``text`` (hex, white space allowed) for people.

    Each frame begins with its offset in bytes. Raises WireError behind the lines of what is well
    formed. What ``context`` leaves open is tried.
    """
    contexts = PROTOCOLS[one_of(protocol, PROTOCOLS, "protocol")](context)
    used, frames, failure = _decode(contexts, hex_bytes(text, "HEX"))
    for offset, frame in frames:
        first, *more = used.describe(frame)
        yield f"{offset:6}  {first}"
        yield from (f"{'':8}  {line}" for line in more)
    if failure is not None:
        raise failure
