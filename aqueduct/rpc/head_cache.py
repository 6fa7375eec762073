"""The heads of calls that a connection has read before: clients make the same calls again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aqueduct.arrow.ipc import EXTENSION
from aqueduct.rpc.request import CallHead
from aqueduct.rpc.unary import decode_call, is_unary

if TYPE_CHECKING:
    from aqueduct.protocol.common.receiver import Received
    from aqueduct.rpc.keys import Headers

__all__ = ["HeadCache"]

_KEPT: Final = 32
_KEPT_SIZE: Final = 16 << 10  # bytes of a head that is kept


class HeadCache:
    """Reads the messages that open the calls of one connection. May be used in threads."""

    __slots__ = ("_kept", "_peer")

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._kept: dict[bytes | Headers, tuple[CallHead, bytes, bool]] = {}
        """By the headers as they came: the head, the schemas, and whether a batch follows them."""

    def read(self, message: Received) -> tuple[CallHead, memoryview | None]:
        """The call, and the payload of its one batch if that came with it. Raises BadCall."""
        raw, view = message.raw, memoryview(message.payload).cast("B")
        found = self._kept.get(raw)
        if found is not None:
            head, schemas, unary = found
            size = len(schemas)
            fits = len(view) > size if unary else len(view) == size
            if fits and bytes(view[:size]) == schemas:
                return head, view[size:] if unary else None
        headers = message.headers
        unary = is_unary(headers)
        if unary:
            head, size = decode_call(headers, view, peer=self._peer)
        else:
            head, size = CallHead.decode(headers, view, peer=self._peer), len(view)
        if size + sum(len(key) + len(value) for key, value in headers) <= _KEPT_SIZE:
            schemas = bytes(view[:size])
            if EXTENSION not in schemas:  # such types may be registered otherwise the next time
                if len(self._kept) >= _KEPT:
                    self._kept.clear()
                self._kept[raw] = head, schemas, unary
        return head, view[size:] if unary else None
