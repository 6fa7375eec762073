"""What tshark makes of a capture with our dissector, in the vocabulary of ``aqueduct.dissect``."""

from __future__ import annotations

import os
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aqueduct.dissect
from aqueduct.dissect import bpmux
from aqueduct.dissect.values import WireError
from tests.dissect.captures import CLIENT

__all__ = ["DISSECTOR", "Seen", "expected", "frames_of", "look"]

DISSECTOR = Path(aqueduct.dissect.__file__).parent / "aqueduct.lua"
ROOT = Path(__file__).parents[2]
PDML = ("-Y", "bpmux", "-T", "pdml")
_NAMED = {
    "aqueduct.version": "version",
    "aqueduct.message.num": "num",
    "aqueduct.count": "count",
    "aqueduct.sent_reliable": "sent_reliable",
}
_CHANNELS = ("aqueduct.channel", "aqueduct.attachment")
_TYPES = (
    "Out-Request",
    "In-Request",
    "Out-Sink",
    "In-Sink",
    "Out-Stream",
    "In-Stream",
    "Duplex",
)
_WITHOUT_RANGES = ("AckReliable", "AckNackUnreliable", "CloseReceiver")
Key = tuple[bool, str, int]
"""Of a frame sequence: whether the server writes it, its half of an entity, and the identifier."""


@dataclass
class Seen:
    """What is in one TCP connection."""

    chunks: dict[bool, list[dict[str, Any]]] = field(default_factory=dict)
    sequences: dict[Key, list[dict[str, Any]]] = field(default_factory=dict)
    datagrams: dict[bool, list[list[dict[str, Any]]]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    """What the expert says, in the order of packets."""


def look(tshark: str, capture: Path, *options: str) -> dict[int, Seen]:
    """Each TCP connection of a capture, by its number."""
    done = subprocess.run(
        [tshark, "-n", "-r", capture, "-X", f"lua_script:{DISSECTOR}", *PDML, *options],
        capture_output=True,
        timeout=120,
        check=True,
        env={**os.environ, "HOME": str(capture.parent)},  # no plugins and settings of the user
    )
    assert b"Lua" not in done.stderr, done.stderr.decode()
    found: dict[int, Seen] = {}
    for packet in ElementTree.fromstring(done.stdout).iter("packet"):
        _add_packet(packet, found)
    return found


def _add_packet(packet: ElementTree.Element, found: dict[int, Seen]) -> None:
    number, server = -1, False
    key: Key = (False, "", 0)
    for proto in packet.iter("proto"):
        name = proto.get("name")
        fields = {each.get("name", ""): each for each in proto.iter("field")}
        if name == "ip":
            server = fields["ip.src"].get("show") != ".".join(map(str, CLIENT[0]))
        elif name == "tcp":
            number = _number(fields["tcp.stream"])
        if name not in ("bpmux", "aqueduct"):
            continue
        seen = found.setdefault(number, Seen())
        for error in proto.iter("field"):
            if error.get("name", "").endswith((".malformed", ".lost")):
                seen.errors.append(_error_text(error))
            assert error.get("name") != "_ws.lua.error", ElementTree.tostring(proto)
        if name == "bpmux":
            if "bpmux.type" in fields:
                chunks = _chunk(proto, fields)
                seen.chunks.setdefault(server, []).extend(chunks)
                half = "in" if chunks[-1]["type"] == "In-Sink" else "out"
                key = (server, half, chunks[-1]["id"])
        elif "aqueduct.datagram" in fields:
            into: list[dict[str, Any]] = []
            seen.datagrams.setdefault(server, []).append(into)
            _add_frames(proto, into)
        elif any(each in fields for each in ("aqueduct.frame", "aqueduct.payload")):
            _add_frames(proto, seen.sequences.setdefault(key, []))


def _error_text(error: ElementTree.Element) -> str:
    return error.get("showname") or error.get("show") or ""


def _number(element: ElementTree.Element) -> int:
    return int(element.get("show", ""), 0)


def _bytes(fields: Mapping[str, ElementTree.Element], name: str) -> str:
    return fields[name].get("value", "") if name in fields else ""


def _flag(fields: Mapping[str, ElementTree.Element], name: str) -> bool:
    return fields[f"bpmux.flags.{name}"].get("show") in ("1", "True")


def _chunk(
    proto: ElementTree.Element, fields: Mapping[str, ElementTree.Element]
) -> list[dict[str, Any]]:
    found = []
    if "bpmux.total" in fields:
        found.append({"type": "Partial", "total": _number(fields["bpmux.total"])})
    kind = _TYPES[_number(fields["bpmux.type"])]
    name = "bpmux.request" if kind.endswith("Request") else "bpmux.stream"
    chunk: dict[str, Any] = {"type": kind, "id": _number(fields[name])}
    if _flag(fields, "payload"):
        chunk["payload"] = _bytes(fields, "bpmux.payload")
        assert _number(fields["bpmux.payload_length"]) * 2 == len(chunk["payload"])
    if _flag(fields, "credit"):
        chunk["credit"] = _number(fields["bpmux.credit"])
    if _flag(fields, "ping"):
        chunk["ping"] = True
    if _flag(fields, "end"):
        chunk["end"] = _bytes(fields, "bpmux.end_payload")
        assert _number(fields["bpmux.end_length"]) * 2 == len(chunk["end"])
    if _flag(fields, "ack_end"):
        chunk["ack_end"] = True
    return [*found, chunk]


def _add_frames(proto: ElementTree.Element, into: list[dict[str, Any]]) -> None:
    for each in proto:
        if each.get("name") == "aqueduct.frame":
            into.append(_frame(each))
        elif each.get("name") == "aqueduct.payload":
            into[-1]["payload"] += each.get("value", "")


def _frame(element: ElementTree.Element) -> dict[str, Any]:
    frame: dict[str, Any] = {}
    for each in element:
        name = each.get("name", "")
        if name == "aqueduct.frame.type":
            frame["type"] = each.get("show")
        elif name == "aqueduct.version":
            frame["version"] = each.get("show")
        elif name in _NAMED:
            frame[_NAMED[name]] = _number(each)
        elif name == "aqueduct.header":
            frame.setdefault("headers", []).append(_header(each))
        elif name == "aqueduct.range":
            frame.setdefault("ranges", []).append(_number(each))
        elif name == "aqueduct.payload_length":
            frame["payload"] = ""
        elif name == "aqueduct.attachment":
            headers = [_header(one) for one in each if one.get("name") == "aqueduct.header"]
            one = {"channel": _channel(each), "headers": headers}
            frame.setdefault("attachments", []).append(one)
        elif name == "aqueduct.channel" and len(each):
            frame["channel"] = _channel(each)
    kind = frame["type"]
    if kind in ("MESSAGE", "CONNECTION_HEADERS", "ConnectionControl"):
        frame.setdefault("headers", [])
    if kind in ("MESSAGE", "Message"):
        frame.setdefault("attachments", [])
    if kind == "Message":
        frame["attachments"] = [each["channel"] for each in frame["attachments"]]
    if kind in _WITHOUT_RANGES:
        frame.setdefault("ranges", [])
    return frame


def _header(element: ElementTree.Element) -> list[str]:
    parts = {each.get("name", ""): each for each in element}
    return [_bytes(parts, "aqueduct.header.key"), _bytes(parts, "aqueduct.header.value")]


def _channel(element: ElementTree.Element) -> dict[str, Any]:
    parts = {each.get("name", ""): each for each in element}
    return {
        "id": _number(element),
        "creator": parts["aqueduct.channel.creator"].get("show"),
        "sender": parts["aqueduct.channel.sender"].get("show"),
        "oneshot": parts["aqueduct.channel.oneshot"].get("show") in ("1", "True"),
        "index": _number(parts["aqueduct.channel.index"]),
    }


def expected(sent: Mapping[bool, bytes], *, control: bool = False) -> Seen:
    """The same by ``aqueduct.dissect``, of the bytes that each side sent."""
    seen = Seen()
    written: dict[Key, bytes] = {}
    duplexes: set[Key] = set()
    for server, data in sent.items():
        seen.chunks[server] = [chunk for _, chunk in bpmux.BpmuxContext().decode(data)]
        for chunk in seen.chunks[server]:
            kind = chunk["type"]
            payload = bytes.fromhex(chunk.get("payload", ""))
            if kind == "In-Sink" and chunk["id"] == 0 and payload[:1] == b"\0":
                there = {"from": ("client", "server")[server], "carrier": "datagram"}
                into = seen.datagrams.setdefault(server, [])
                into.append(_frames(payload[1:], there, control))
            elif payload and kind in ("Out-Sink", "Duplex", "In-Sink") and chunk["id"]:
                key = (server, "in" if kind == "In-Sink" else "out", chunk["id"])
                written[key] = written.get(key, b"") + payload
                if kind == "Duplex":
                    duplexes.add(key)
    # An answer needs the channel that its opener names.
    for key, data in sorted(written.items(), key=lambda each: each[0][1], reverse=True):
        server, half, number = key
        context: dict[str, Any] = {"from": ("client", "server")[server]}
        if control:
            context["carrier"] = "uni"
            if half == "in":
                context["carrier"] = "bidi-answer"
                for each in seen.sequences[not server, "out", number]:
                    if each["type"] == "ChannelControl":
                        context["channel"] = each["channel"]["id"]
            elif key in duplexes:
                context["carrier"] = "bidi-opener"
        frames = _frames(data, context, control)
        if frames:
            seen.sequences[key] = frames
    return seen


def _frames(data: bytes, context: dict[str, Any], control: bool) -> list[dict[str, Any]]:
    frames, error = frames_of("control-streams" if control else "aq", data, context)
    assert error is None or error.kind == "truncated", error  # a stream may be open yet
    return frames


def frames_of(
    protocol: str, data: bytes, context: dict[str, Any]
) -> tuple[list[dict[str, Any]], WireError | None]:
    """The frames of a sequence up to what is wrong with it."""
    (only,) = aqueduct.dissect.PROTOCOLS[protocol](context)
    frames = []
    try:
        for _, frame in only.decode(data):
            frames.append(_alike(frame))
    except WireError as error:
        return frames, error
    return frames, None


def _alike(frame: dict[str, Any]) -> dict[str, Any]:
    """The draft names the creator of a channel its minter."""
    made: dict[str, Any] = {}
    for name, value in frame.items():
        if isinstance(value, dict):
            value = _alike(value)
        elif isinstance(value, list):
            value = [_alike(each) if isinstance(each, dict) else each for each in value]
        made["creator" if name == "minter" else name] = value
    return made
