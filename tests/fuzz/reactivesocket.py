"""ReactiveSocket: frames beside the plain model, frames of a peer to one core, and two peers.

The first byte of an input says which, and how. Frames: a length, so many bytes that say how to cut
the rest, then the bytes as they are or decisions of which frames are made. Two peers: what they do
is decided byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from aqueduct._speedups.reactivesocket import reactive_frames as codec
from aqueduct.errors import LocalProtocolError
from tests.fuzz.source import Source
from tests.protocol.reactivesocket.test_machines import ITEMS, KINDS, TwoPeers
from tests.protocol.reactivesocket.test_pieces import compare
from tests.reference.reactivesocket import NUMBERED, TYPES, Frame, encode
from tests.speedups.reactivesocket.test_frames import head_of, model, read

__all__ = ["target"]

LIMITS: Final = (1 << 20, 45, 5000, (1 << 31) - 1)
SIZES: Final = (0, 1, 2, 51, 243, 4095, 4096, 5000)
FRAMES: Final = 12
STEPS: Final = 80
MADE: Final = (*TYPES, codec.RESPONSE, codec.RESPONSE, codec.REQUEST_N, codec.EXT, 0x30, 0x31)


def target(data: bytes) -> None:
    """One input."""
    source = Source(data)
    how = source.byte()
    what, more = how & 3, how >> 2
    if what == 3:
        converse(source)
        return
    cuts = pieces(source.take(source.byte()))
    framed = bool(more & 1)
    if what == 0:
        read_beside(source.rest(), cuts, framed=framed, limit=LIMITS[more >> 1 & 3])
    elif what == 1:
        write_beside(frames(source), cuts, framed=framed)
    else:
        wire = b"".join(map(encode, frames(source))) if more & 8 else source.rest()
        compare(wire, cuts, client=bool(more & 1), begun=bool(more & 2), left=bool(more & 4))


def pieces(plan: bytes) -> list[tuple[int, bool]]:
    """Sizes of the first pieces, each with whether it is special; the last one is the rest."""
    return [((1 + (how & 63)) * (80 if how & 64 else 1), how >= 128) for how in plan]


# ----------------------------------------------------------------- frames


def frames(source: Source) -> list[Frame]:
    """Any frames, also those that may not be."""
    made: list[Frame] = []
    while not source.empty and len(made) < FRAMES:
        what = source.byte()
        kind = MADE[what % len(MADE)] if what < 240 else what & 7
        flags, extension = source.byte(), kind == codec.EXT
        frame = Frame(
            kind,
            0 if extension else source.number(),
            flags,
            source.number() if TYPES.get(kind) in NUMBERED else 0,
            source.number() & 0xFFFFFFFF if extension else 0,
            bytes([len(made)]) * SIZES[source.below(len(SIZES))],
        )
        made.append(frame)
    return made


def read_beside(data: bytes, cuts: list[tuple[int, bool]], *, framed: bool, limit: int) -> None:
    """However bytes are cut, and wherever they land, codec and model read the same."""
    wanted = model(data, framed=framed, limit=limit)
    assert read(data, [data], framed=framed, frame_bytes=limit) == wanted
    if framed:
        assert read(data, cut(data, cuts), frame_bytes=limit) == wanted
    else:
        view = memoryview(bytearray(data))
        assert read(data, [view], framed=False, frame_bytes=limit) == wanted


def cut(data: bytes, cuts: list[tuple[int, bool]]) -> list[bytes | memoryview]:
    """The pieces; some are views."""
    out: list[bytes | memoryview] = []
    for size, view in (*cuts, (len(data), False)):
        out.append(memoryview(data)[:size] if view else data[:size])
        data = data[size:]
    return out


def write_beside(sent: list[Frame], cuts: list[tuple[int, bool]], *, framed: bool) -> None:
    """The codec writes what the model writes, or refuses; and what it writes can be read."""
    good: list[Frame] = []
    for frame in sent:
        if frame.type == codec.EXT:
            frame = replace(frame, flags=frame.flags & codec.IGNORE)
        try:
            head = head_of(frame, framed=framed)
        except LocalProtocolError:
            continue
        assert head + frame.data == encode(frame, framed=framed)
        good.append(frame)
    if framed:
        wire = b"".join(map(encode, good))
        assert read(wire, cut(wire, cuts)) == (good, "")
    else:
        for frame in good:
            wire = encode(frame, framed=False)
            assert read(wire, [wire], framed=False) == ([frame], "")


# ----------------------------------------------------------------- two peers


def converse(source: Source) -> None:
    """What two applications may do, and what comes of it."""
    peers = TwoPeers()
    steps: tuple[Callable[[int, int], None], ...] = (
        lambda side, more: peers.request(side, KINDS[more & 3], more >> 2 & 3, more >> 3),
        lambda side, more: peers.ask(side, more >> 2, 1 + (more & 3)),
        lambda side, more: peers.cancel(side, more),
        lambda side, more: peers.item(side, more >> 3, ITEMS[(more & 7) % len(ITEMS)]),
        lambda side, more: peers.item(side, more >> 3, ITEMS[(more & 7) % len(ITEMS)]),
        lambda side, more: peers.end(side, more >> 1, bool(more & 1)),
        lambda side, more: peers.some_bytes_come(side, 1 + more),
        lambda side, more: peers.some_bytes_come(side, 1 + more),
        lambda side, more: peers.all_bytes_come(side),
        lambda side, more: peers.time_passes(6.0 if more & 1 else 1.0),
        lambda side, more: peers.release(side),
    )
    for _ in range(STEPS):
        if source.empty:
            break
        what = source.byte()
        steps[(what >> 1) % len(steps)](what & 1, source.byte())
        peers.every_stream_ends_once()
    peers.teardown()
