"""Inputs to begin with: every vector and a conversation of each kind, so that a fuzzer need not
find the 28 bytes of VERSION by chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

from aqueduct._speedups import codec
from tests.reference import codec as model
from tests.speedups.strategies import VECTORS

__all__ = ["SEEDS"]

RANDOM_SEEDS: Final = 300
WHOLE, BYTE_BY_BYTE = b"\x00", b"\x14" + bytes(20)


def codec_seeds() -> Iterator[bytes]:
    """The vectors, valid and not, whole and byte by byte, under each set of limits."""
    for vector in (*VECTORS["valid"], *VECTORS["invalid"]):
        sequence = bytes.fromhex(vector["hex"])
        side = vector["context"]["from"] == "server"
        datagram = vector["context"]["carrier"] == "datagram"
        for settings in (0, 4, 8, 16, 48, 64):
            for plan in (WHOLE, BYTE_BY_BYTE):
                yield bytes([settings | side | datagram << 1]) + plan + sequence
    large = b"".join(codec.encode_message(0, bytes(400), [(b"key", bytes(60))], [(8, ())]))
    for how in range(0, 256, 5):
        yield b"\x30\x1e" + bytes([how]) * 30 + model.encode([("ROUTE_TO", 0)]) + large


def random_seeds(length: int) -> Callable[[], Iterator[bytes]]:
    """Steps at random: the operations of an input are chosen by its bytes alone."""

    def seeds() -> Iterator[bytes]:
        for seed in range(RANDOM_SEEDS):
            rng = random.Random(seed)
            # Small bytes are small numbers, and those name what exists.
            yield bytes(rng.choice((rng.randrange(256), rng.randrange(16))) for _ in range(length))

    return seeds


def wire_seeds() -> Iterator[bytes]:
    """The vectors as bytes of a stream, in a connection that greeted and in one that did not."""
    say_bytes, say_end, step = 4, 5, b""
    for vector in (*VECTORS["valid"], *VECTORS["invalid"]):
        sequence = bytes.fromhex(vector["hex"])
        side = vector["context"]["from"] == "server"  # then we are the client
        for settings in (0, 128):
            for prelude in (b"", codec.VERSION):
                whole = prelude + sequence
                parts = [whole[at : at + 31] for at in range(0, len(whole), 31)][:12]
                steps = (bytes([say_bytes, 1 | len(part) << 3 & 255]) + part for part in parts)
                head = bytes([settings | (not side)])
                yield head + step.join(steps) + bytes([say_end, 1])
    yield from random_seeds(120)()


SEEDS: Final[dict[str, Callable[[], Iterator[bytes]]]] = {
    "codec": codec_seeds,
    "operations": random_seeds(90),
    "wire": wire_seeds,
}
"""For each target."""
