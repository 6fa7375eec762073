"""Relink's handshake and packets, in the vocabulary of the test vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final, TypeAlias

from aqueduct._speedups.relink import packets as codec
from aqueduct._speedups.relink.packets import PacketDecoder, PacketStep
from aqueduct.dissect.values import Fields, WireError, hex_bytes, kind_of, list_of, number, one_of
from aqueduct.errors import AqueductError, LimitExceeded
from aqueduct.protocol.relink import handshake

__all__ = ["FieldsContext", "PacketsContext", "contexts", "read_packets"]

_SIDES: Final = ("connector", "listener")
_HANDSHAKE: Final = ("connector-hello", "listener-hello", "connector-open", "listener-reply")
_MESSAGE: Final = "message"
_GENERAL: Final = "general"
_HIGHEST_ID_SIZE: Final = max(handshake.ID_SIZES)
PREVIEW: Final = 32
"""Bytes of a part that are shown to people."""


def contexts(given: Any) -> list[FieldsContext] | list[PacketsContext]:
    """The contexts that ``given`` leaves open: without ``from`` it may be either side.

    What is not said is packets, with channel ids of one byte.
    """
    if not isinstance(given, Mapping):
        raise WireError(f"context must be an object, not {kind_of(given)}")
    what = one_of(given.get("what", "packets"), (*_HANDSHAKE, "packets"), "context.what")
    if what != "packets":
        return [FieldsContext(what)]
    sizes = {
        side: number(given.get(name, 1), f"context.{name}", _HIGHEST_ID_SIZE)
        for side, name in ((side, f"{side}_id_size") for side in _SIDES)
    }
    sides: tuple[str, ...] = _SIDES
    if "from" in given:
        sides = (one_of(given["from"], _SIDES, "context.from"),)
    return [PacketsContext(sizes[side], sizes[_SIDES[1 - _SIDES.index(side)]]) for side in sides]


Decoded: TypeAlias = tuple[dict[str, Any], int] | None
"""Fields, and the offset behind them; None: they are not whole."""


@dataclass(frozen=True)
class FieldsContext:
    """What one side sends at one place of the handshake: one object, not a list."""

    what: str
    single: ClassVar[bool] = True

    def decode(self, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
        """The one object. Raises WireError for other bytes, more bytes too."""
        try:
            found = self._read(data)
        except AqueductError as error:
            raise WireError.of(error, 0) from error
        if found is None:
            raise WireError(f"the bytes end inside the {self.what}", "truncated", 0)
        decoded, end = found
        if end < len(data):
            raise WireError(f"{len(data) - end} bytes behind the {self.what}", offset=end)
        yield 0, decoded

    def _read(self, data: bytes) -> Decoded:
        if self.what.endswith("hello"):
            version = handshake.decode_hello(data)
            if version and self.what == "listener-hello":
                raise WireError(f"version {version} answered, and 0 is the only one (RL-R4)")
            return {"version": version}, len(handshake.encode_hello())
        if self.what == "connector-open":
            opening = handshake.decode_opening(data)
            return None if opening is None else (asdict(opening[0]), opening[1])
        reply = handshake.decode_reply(data)
        return None if reply is None else ({"epoch": reply[0], "link": reply[1]}, reply[2])

    def encode(self, value: list[Any]) -> bytes:
        """The bytes of the one object in ``value``. Raises WireError."""
        given = Fields(value[0], self.what)
        try:
            data = self._write(given)
        except AqueductError as error:
            raise WireError(f"{self.what}: {error}") from error
        given.end()
        return data

    def _write(self, given: Fields) -> bytes:
        if self.what.endswith("hello"):
            number(given.take("version"), f"{self.what}: version (RL-R19)", 0)
            return handshake.encode_hello()
        if self.what == "listener-reply":
            epoch = given.number("epoch")
            link = number(given.take("link"), f"{self.what}: link", handshake.HIGHEST_LINK)
            return handshake.encode_reply(epoch, link)
        endpoint = given.take("endpoint")
        if not isinstance(endpoint, str):
            raise WireError(f"{self.what}: endpoint must be a string, not {kind_of(endpoint)}")
        try:
            endpoint.encode()
        except UnicodeEncodeError as error:
            raise WireError(f"{self.what}: endpoint is no UTF-8: {error.reason}") from error
        said: dict[str, Any] = {"endpoint": endpoint}
        for each in fields(handshake.Opening)[1:]:
            is_flag = isinstance(each.default, bool)
            said[each.name] = _flag(given, each.name) if is_flag else given.number(each.name)
        return handshake.encode_opening(handshake.Opening(**said))

    def meaning(self, frames: list[dict[str, Any]]) -> Any:
        """Nothing here acknowledges."""
        return None

    def describe(self, frame: dict[str, Any]) -> list[str]:
        """One line with the fields."""
        return [f"{self.what}  {_named(frame, frame)}"]


@dataclass(frozen=True)
class PacketsContext:
    """The packets of one side: bytes of a channel id, of its own and of the other's channels."""

    sender_id_size: int
    receiver_id_size: int
    single: ClassVar[bool] = False

    def decode(self, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
        """Packets with the offset each begins at. Raises WireError behind the last good one."""
        return read_packets(data, self.sender_id_size, self.receiver_id_size)

    def encode(self, value: list[Any]) -> bytes:
        """The bytes of ``value``. Raises WireError."""
        return b"".join(self._packet(Fields(given, f"packet {k}")) for k, given in enumerate(value))

    def _packet(self, given: Fields) -> bytes:
        name = one_of(given.take("format"), codec.FORMAT_NAMES, f"{given.where}: format")
        given.where += f" ({name})"
        format_ = codec.FORMAT_NAMES.index(name)
        try:
            if name == _MESSAGE:
                data = self._message(given)
            else:
                types = codec.TYPE_NAMES[format_]
                type_ = types.index(one_of(given.take("type"), types, f"{given.where}: type"))
                data = self._other(given, format_, type_)
        except AqueductError as error:
            raise WireError(f"{given.where}: {error}") from error
        given.end()
        return data

    def _other(self, given: Fields, format_: int, type_: int) -> bytes:
        if format_ == codec.GENERAL:
            return codec.encode_general(type_)
        odd = format_ in (codec.CHANNEL_ACK, codec.SEQUENCE_ACK)
        return codec.encode_packet(
            format_,
            type_,
            given.numbers("channels"),
            self.receiver_id_size if odd else self.sender_id_size,
            multicast=_flag(given, "multicast"),
            sequence=given.number("sequence") if "sequence" in given.left else None,
        )

    def _message(self, given: Fields) -> bytes:
        where = f"{given.where}: parts"
        parts = [
            hex_bytes(part, f"{where}[{k}]")
            for k, part in enumerate(list_of(given.take("parts"), where))
        ]
        long, large = _flag(given, "long"), _flag(given, "large")
        if len(parts) > codec.SHORT_MAX and not long:
            raise WireError(f"{given.where}: {len(parts)} parts need a long message (RL-15)")
        if max(map(len, parts), default=0) > codec.SMALL_MAX and not large:
            raise WireError(f"{given.where}: a part of 65,536 bytes or more needs a large message")
        head = codec.encode_message_head(
            given.numbers("channels"),
            self.sender_id_size,
            [len(part) for part in parts],
            multicast=_flag(given, "multicast"),
            long=long,
            large=large,
        )
        return head + b"".join(part + bytes(codec.padding_of(len(part))) for part in parts)

    def meaning(self, frames: list[dict[str, Any]]) -> Any:
        """No packet by itself says which messages it targets (RL-R7)."""
        return None

    def describe(self, frame: dict[str, Any]) -> list[str]:
        """A line with the fields, and one for each part."""
        names = ("multicast", "channels", "sequence", "long", "large")
        title = " ".join(frame[name] for name in ("format", "type") if name in frame)
        lines = [f"{title}  {_named(frame, names)}".rstrip()]
        for part in frame.get("parts", ()):
            data = bytes.fromhex(part)
            more = f" ... ({len(data)} bytes)" if len(data) > PREVIEW else ""
            lines.append(f"part {data[:PREVIEW].hex() or '(empty)'}{more}")
        return lines


def read_packets(
    data: bytes, sender_id_size: int, receiver_id_size: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Packets with the offset each begins at. Raises WireError behind the last good one."""
    decoder = PacketDecoder(sender_id_size, receiver_id_size)
    decoder.feed(data)
    parts: list[bytes] = []
    offset = 0
    try:
        while (step := decoder.next()) != PacketStep.NOTHING:
            is_message = decoder.format == codec.MESSAGE
            if step == PacketStep.PIECE:
                parts[decoder.part] = bytes(decoder.data or b"")  # all is here, so it is whole
            elif step == PacketStep.PACKET and is_message:
                parts = [b""] * len(decoder.sizes)
            else:
                yield offset, _packet_to_json(decoder, parts)
                offset = decoder.consumed
        decoder.end()
    except LimitExceeded as error:
        # The limits are as high as they go: no bytes can meet such a size, but such targets.
        kind = "malformed" if "Relink.targets" in str(error) else "truncated"
        raise WireError(str(error), kind, offset) from error
    except AqueductError as error:
        raise WireError.of(error, offset) from error


def _packet_to_json(decoder: PacketDecoder, parts: list[bytes]) -> dict[str, Any]:
    name = codec.FORMAT_NAMES[decoder.format]
    result: dict[str, Any] = {"format": name}
    if name != _MESSAGE:
        result["type"] = codec.TYPE_NAMES[decoder.format][decoder.type]
    if name == _GENERAL:
        return result
    result["multicast"] = decoder.multicast
    result["channels"] = list(decoder.channels)
    if decoder.sequence >= 0:
        result["sequence"] = decoder.sequence
    if name == _MESSAGE:
        result["long"] = decoder.type & codec.LONG > 0
        result["large"] = decoder.type & codec.LARGE > 0
        result["parts"] = [part.hex() for part in parts]
    return result


def _flag(given: Fields, name: str) -> bool:
    value = given.take(name, False)
    if not isinstance(value, bool):
        raise WireError(f"{given.where}: {name} must be true or false, not {kind_of(value)}")
    return value


def _named(frame: dict[str, Any], names: Any) -> str:
    """The fields of these names, without flags that are not set."""
    shown = []
    for name in names:
        value = frame.get(name)
        if isinstance(value, bool):
            shown += [name] * value
        elif value is not None:
            shown.append(f"{name} {', '.join(map(str, value)) if name == 'channels' else value}")
    return ", ".join(shown)
