"""What the two revisions of Aqueduct share in the dissector: channel ids, headers, payloads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from aqueduct.dissect.values import (
    HIGHEST,
    Fields,
    WireError,
    hex_bytes,
    kind_of,
    list_of,
    number,
    one_of,
)

__all__ = [
    "PREVIEW",
    "SIDES",
    "ChannelBits",
    "alternate",
    "header_text",
    "headers_to_json",
    "payload_text",
    "read_headers",
]

SIDES: Final[tuple[str, ...]] = ("client", "server")
PREVIEW: Final = 32
"""Bytes of a payload that are shown to people."""


@dataclass(frozen=True)
class ChannelBits:
    """What the lowest two bits of a channel id name; the third is oneshot, the rest an index."""

    lowest: str
    second: str
    creator: str
    """Which of the two is the side that created the channel."""

    def to_json(self, channel: int) -> dict[str, Any]:
        """The bits of a channel id."""
        return {
            "id": channel,
            self.lowest: SIDES[channel & 1],
            self.second: SIDES[channel >> 1 & 1],
            "oneshot": bool(channel & 4),
            "index": channel >> 3,
        }

    def read(self, given: Any, where: str) -> int:
        """A channel id from {"id"}, from its bits, or from both if they agree; or a number."""
        if not isinstance(given, Mapping):
            return number(given, where)
        fields = Fields(given, where)
        channel = fields.number("id") if "id" in given else None
        if channel is None or len(given) > 1:
            known = self.to_json(channel) if channel is not None else {}
            sides = [
                one_of(fields.take(name, known.get(name)), SIDES, f"{where}.{name}")
                for name in (self.lowest, self.second)
            ]
            oneshot = fields.take("oneshot", known.get("oneshot", False))
            if not isinstance(oneshot, bool):
                raise WireError(f"{where}.oneshot must be true or false, not {kind_of(oneshot)}")
            index = number(fields.take("index", known.get("index")), f"{where}.index", HIGHEST >> 3)
            low, high = map(SIDES.index, sides)
            bits = index << 3 | oneshot << 2 | high << 1 | low
            if channel is not None and bits != channel:
                raise WireError(f"{where}: id is {channel}, but its fields make {bits}")
            channel = bits
        fields.end()
        return channel

    def take(self, fields: Fields) -> int:
        """The channel of a frame."""
        return self.read(fields.take("channel"), f"{fields.where}: channel")

    def text(self, value: Any) -> str:
        """A value of a frame for people."""
        if not isinstance(value, dict):
            return json.dumps(value).replace('"', "")
        if "id" not in value:
            return ", ".join(f"{name} {self.text(each)}" for name, each in value.items())
        if value["id"] == 0:
            return "0 (the entrypoint)"
        receiver = SIDES[value["sender"] == "client"]
        kind = "oneshot" if value["oneshot"] else "multishot"
        return (
            f"{value['id']} ({value['sender']} to {receiver}, {kind}, "
            f"index {value['index']} of the {value[self.creator]})"
        )


def read_headers(fields: Fields) -> tuple[tuple[bytes, bytes], ...]:
    """The headers of a frame, from pairs in hex."""
    where = f"{fields.where}: headers"
    pairs = list_of(fields.take("headers", []), where)
    return tuple(_header(pair, f"{where}[{k}]") for k, pair in enumerate(pairs))


def _header(given: Any, where: str) -> tuple[bytes, bytes]:
    pair = list_of(given, where)
    if len(pair) != 2:
        raise WireError(f"{where} must be a pair [key, value], not {len(pair)} items")
    return hex_bytes(pair[0], f"{where} key"), hex_bytes(pair[1], f"{where} value")


def headers_to_json(headers: tuple[tuple[bytes, bytes], ...]) -> list[list[str]]:
    """Headers as pairs in hex."""
    return [[key.hex(), value.hex()] for key, value in headers]


def alternate(lengths: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Consecutive ranges, first kind and second kind by turns; empty ones are left out."""
    kinds: tuple[list[list[int]], list[list[int]]] = ([], [])
    start = 0
    for k, length in enumerate(lengths):
        if length:
            kinds[k % 2].append([start, start + length])
        start += length
    return kinds


def header_text(pair: list[str]) -> str:
    """A header of a frame for people."""
    return f"header {bytes.fromhex(pair[0]).decode()}: {payload_text(bytes.fromhex(pair[1]))}"


def payload_text(data: bytes) -> str:
    """The first bytes of a payload for people."""
    shown = data[:PREVIEW]
    more = f" ... ({len(data)} bytes)" if len(data) > PREVIEW else ""
    printable = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in shown)
    return f"{shown.hex()}{more}  |{printable}|" if data else "(empty)"
