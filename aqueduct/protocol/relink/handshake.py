"""The handshake of Relink: its fields as bytes, and both of its sides.

The connector sends its hello and its opening in one flight: a listener reads early bytes in order
(RL-R5). So a handshake takes one round trip, and what the listener sends next comes with its reply.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from aqueduct.errors import (
    FrameError,
    LinkUnknown,
    LocalProtocolError,
    SequenceError,
    VersionError,
)

__all__ = [
    "HIGHEST_LINK",
    "ID_SIZES",
    "ChosenLink",
    "ConnectorHandshake",
    "DistantLink",
    "LinkAgreement",
    "ListenerHandshake",
    "Opening",
    "RefusedLink",
    "decode_hello",
    "decode_opening",
    "decode_reply",
    "encode_hello",
    "encode_opening",
    "encode_reply",
]

VERSION: Final = 0
HELLO_SIZE: Final = 8
REPLY_SIZE: Final = 16
ID_SIZES: Final = range(9)
"""The sizes of channel ids, bytes (RL-R3)."""
HIGHEST_LINK: Final = (1 << 63) - 1
HIGHEST_EPOCH: Final = (1 << 64) - 1
_NAME_BYTES: Final = 255

_CONNECTOR_TRANSACTIONS: Final = 1
_LISTENER_TRANSACTIONS: Final = 2
_REQUIRE_OLD_LINK: Final = 4
_TAIL: Final = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Opening:
    """What a connector asks for, behind its hello (RL-2, RL-3).

    The sizes are of channel ids, 0 to 8 bytes; each side has its own channels. ``old_epoch`` and
    ``old_link`` name the link to resume, 0 for a new one.
    """

    endpoint: str
    connector_id_size: int = 1
    listener_id_size: int = 1
    connector_transactions: bool = False
    listener_transactions: bool = False
    require_old_link: bool = False
    old_epoch: int = 0
    old_link: int = 0


def encode_hello() -> bytes:
    """The 8 bytes that each side begins with. There is version 0 only (RL-R19)."""
    return bytes(HELLO_SIZE)


def decode_hello(data: bytes | bytearray | memoryview) -> int:
    """The version in a hello. FrameError (``truncated``) for fewer than 8 bytes."""
    if len(data) < HELLO_SIZE:
        raise FrameError(f"a hello of {len(data)} bytes; it has {HELLO_SIZE}", truncated=True)
    return data[0]


def encode_opening(opening: Opening) -> bytes:
    """The connector's bytes behind its hello. LocalProtocolError for what does not fit them."""
    name = opening.endpoint.encode()
    sizes = (opening.connector_id_size, opening.listener_id_size)
    if len(name) > _NAME_BYTES:
        raise LocalProtocolError(
            f"the endpoint's name has {len(name)} bytes; at most {_NAME_BYTES} fit a handshake"
        )
    if not all(size in ID_SIZES for size in sizes):
        raise LocalProtocolError(f"channel ids of {sizes[0]} and {sizes[1]} bytes; 0 to 8 are")
    if not (0 <= opening.old_epoch <= HIGHEST_EPOCH and 0 <= opening.old_link <= HIGHEST_LINK):
        raise LocalProtocolError("an epoch has 64 bits, and a link id is below 2^63 (RL-6)")
    flags = (
        opening.connector_transactions * _CONNECTOR_TRANSACTIONS
        | opening.listener_transactions * _LISTENER_TRANSACTIONS
        | opening.require_old_link * _REQUIRE_OLD_LINK
    )
    padding = bytes(-(4 + len(name)) % 8)
    head = bytes([len(name)]) + name + bytes([*sizes, flags]) + padding
    return head + _TAIL.pack(opening.old_epoch, opening.old_link)


def decode_opening(
    data: bytes | bytearray | memoryview, offset: int = 0
) -> tuple[Opening, int] | None:
    """The opening at ``offset`` and the offset behind it; None: it is not whole yet.

    Raises FrameError for a name that is no UTF-8, id sizes above 8, and link ids from 2^63 on.
    """
    if len(data) <= offset:
        return None
    length = data[offset]
    sizes = offset + 1 + length
    tail = sizes + 3 + -(4 + length) % 8
    if len(data) < tail + _TAIL.size:
        return None
    try:
        endpoint = str(data[offset + 1 : sizes], "utf-8")
    except UnicodeDecodeError as error:
        raise FrameError(f"the endpoint's name is not UTF-8: {error.reason} (RL-5)") from None
    connector, listener, flags = data[sizes : sizes + 3]
    if connector not in ID_SIZES or listener not in ID_SIZES:
        raise FrameError(f"channel ids of {connector} and {listener} bytes; 0 to 8 are (RL-R3)")
    epoch, link = _TAIL.unpack_from(data, tail)
    _check_link(link)
    opening = Opening(
        endpoint,
        connector,
        listener,
        bool(flags & _CONNECTOR_TRANSACTIONS),
        bool(flags & _LISTENER_TRANSACTIONS),
        bool(flags & _REQUIRE_OLD_LINK),
        epoch,
        link,
    )
    return opening, tail + _TAIL.size


def encode_reply(epoch: int, link: int) -> bytes:
    """The listener's answer; link 0 refuses (RL-7)."""
    return _TAIL.pack(epoch, link)


def decode_reply(
    data: bytes | bytearray | memoryview, offset: int = 0
) -> tuple[int, int, int] | None:
    """Epoch, link id and the offset behind them; None: they are not whole yet.

    Raises FrameError for link ids from 2^63 on (RL-R4).
    """
    if len(data) < offset + REPLY_SIZE:
        return None
    epoch, link = _TAIL.unpack_from(data, offset)
    _check_link(link)
    return epoch, link, offset + REPLY_SIZE


def _check_link(link: int) -> None:
    if link > HIGHEST_LINK:
        raise FrameError("a link id of 2^63 or more (RL-R4)")


@dataclass(frozen=True, slots=True)
class LinkAgreement:
    """How a handshake has ended. ``resumed``: the link is the old one. ``left``: bytes behind."""

    opening: Opening
    epoch: int
    link: int
    resumed: bool
    left: bytes


class ConnectorHandshake:
    """The connector's side: send ``first_flight``, then feed the answer to ``receive_data``."""

    def __init__(self, opening: Opening) -> None:
        """Raises LocalProtocolError for an opening that has no bytes.

        An opening with an old link must require it, so that no new one is made silently (RL-R19).
        """
        if opening.old_link and not opening.require_old_link:
            raise LocalProtocolError("an old link is required or not asked for (RL-R19)")
        self.opening = opening
        self.first_flight = encode_hello() + encode_opening(opening)
        self._held = bytearray()

    def receive_data(self, data: bytes | bytearray | memoryview) -> LinkAgreement | None:
        """The next bytes; returns the agreement once it is here.

        Raises VersionError for another version, FrameError for impossible fields, LinkUnknown if
        the old link is lost, and SequenceError if the listener refuses a new one.
        """
        held = self._held
        held += data
        if held and held[0] != VERSION:
            raise VersionError(
                f"the listener answers with version {held[0]} of Relink; this side speaks 0 (RL-R4)"
            )
        if (found := decode_reply(held, HELLO_SIZE)) is None:
            return None
        epoch, link, offset = found
        opening = self.opening
        if opening.old_link:
            if epoch != opening.old_epoch:
                raise LinkUnknown("the listener is another instance (RL-6)", restarted=True)
            if link != opening.old_link:
                raise LinkUnknown("the listener has dropped the link (RL-7)", restarted=False)
        elif link == 0:
            raise SequenceError("the listener refuses a link (RL-R4)")
        return LinkAgreement(opening, epoch, link, bool(opening.old_link), bytes(held[offset:]))


@dataclass(frozen=True, slots=True)
class ChosenLink:
    """A listener's choice: the link's id, whether it is the old one, and the listener's epoch."""

    epoch: int
    link: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class RefusedLink:
    """A listener's no. ``answered``: by link id 0 (an old link is unknown), else by closing."""

    epoch: int
    answered: bool
    why: str


@dataclass(frozen=True, slots=True)
class DistantLink:
    """A listener's choice of a link that another process has: the one with this number.

    ``data``: all bytes that have come, for that process to make the handshake.
    """

    number: int
    data: bytes = b""


Choose: TypeAlias = Callable[[Opening], ChosenLink | RefusedLink | DistantLink]


class ListenerHandshake:
    """The listener's side: feed ``receive_data``, and send what it leaves in ``output``."""

    def __init__(self, choose: Choose) -> None:
        """``choose`` says which link answers an opening. It is called once."""
        self.output = b""
        """To be sent; the owner takes it."""
        self.distant: DistantLink | None = None
        """What ``choose`` has said, if another process is to make this handshake."""
        self._choose = choose
        self._held = bytearray()
        self._greeted = False

    def receive_data(self, data: bytes | bytearray | memoryview) -> LinkAgreement | None:
        """The next bytes; returns the agreement once the opening is here, and is not ``distant``.

        Raises FrameError for impossible fields and SequenceError for a refusal. Send ``output``
        before closing: an unknown old link is answered (RL-7). A connector of a later version is
        answered with 0, and closes if it does not speak that (RL-R4).
        """
        held = self._held
        held += data
        if not self._greeted and held:
            if len(held) < HELLO_SIZE:
                return None
            self._greeted = True
            self.output += encode_hello()
        if (found := decode_opening(held, HELLO_SIZE)) is None:
            return None
        opening, offset = found
        chosen = self._choose(opening)
        if isinstance(chosen, RefusedLink):
            if chosen.answered:
                self.output += encode_reply(chosen.epoch, 0)
            raise SequenceError(chosen.why)
        if isinstance(chosen, DistantLink):
            self.distant = DistantLink(chosen.number, bytes(held))
            return None
        self.output += encode_reply(chosen.epoch, chosen.link)
        return LinkAgreement(
            opening, chosen.epoch, chosen.link, chosen.resumed, bytes(held[offset:])
        )
