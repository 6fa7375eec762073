"""Responses of ReactiveSocket, played on the requester of a real core against a scripted peer.

A case has the ``kind`` of the request, "response", "stream" or "subscription", and ``frames``: the
RESPONSE frames of its stream, each [begin, end, complete, data]. All items are asked for.

``play`` answers with what the application gets: ["item", data], ["complete"], or ["error"] where
the responder broke the protocol.
"""

from __future__ import annotations

from typing import Any, Final

from aqueduct._speedups.reactivesocket import reactive_frames as codec
from aqueduct.dissect.values import WireError, hex_bytes, kind_of, list_of, one_of
from aqueduct.protocol.reactivesocket import events
from aqueduct.protocol.reactivesocket.connection import ReactiveConnection
from aqueduct.protocol.reactivesocket.demand import UNBOUNDED

__all__ = ["play"]

_KINDS: Final = {
    "response": codec.REQUEST_RESPONSE,
    "stream": codec.REQUEST_STREAM,
    "subscription": codec.REQUEST_SUB,
}
_FLAGS: Final = (codec.BEGIN, codec.END, codec.COMPLETE)


def play(case: Any) -> list[list[str]]:
    """Plays a case. Raises WireError for one that cannot be played."""
    if not isinstance(case, dict):
        raise WireError(f"case must be an object, not {kind_of(case)}")
    kind = _KINDS[one_of(case.get("kind", "stream"), _KINDS, "case.kind")]
    responses = [
        _response(each, f"case.frames[{k}]")
        for k, each in enumerate(list_of(case.get("frames"), "case.frames"))
    ]
    core = ReactiveConnection(client=True)
    stream = core.request(kind, n=None if kind == codec.REQUEST_RESPONSE else UNBOUNDED)
    core.take(1 << 20)
    result: list[list[str]] = []
    for flags, data in responses:
        core.receive_data(codec.encode_head(codec.RESPONSE, stream, len(data), flags=flags), 0.0)
        core.receive_data(data, 0.0)
        for event in core.events_received():
            if event[0] == events.ITEM:
                result.append(["item", b"".join(map(bytes, event[2])).hex()])
                core.release(event[3])
            elif event[0] == events.COMPLETED:
                result.append(["complete"])
            elif event[0] in (events.BROKEN, events.FAILED):
                result.append(["error"])
    return result


def _response(given: Any, where: str) -> tuple[int, bytes]:
    """The flags and the data of one frame."""
    entry = list_of(given, where)
    if len(entry) != len(_FLAGS) + 1:
        raise WireError(f"{where} has {len(entry)} items; it must be [begin, end, complete, data]")
    flags = 0
    for bit, flag in zip(entry, _FLAGS, strict=False):
        if not isinstance(bit, bool):
            raise WireError(f"{where}: a flag must be true or false, not {kind_of(bit)}")
        flags |= flag if bit else 0
    return flags, hex_bytes(entry[-1], f"{where}: data")
