"""The compiled codec alone: MESSAGEs of 200 bytes through its Python interface, on one core."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aqueduct._speedups import channels as codec
from benchmarks.peers import common

HEADERS = ((b"batch-4f1c9a", b"\x01"),)
CHUNK = 500  # messages fed to the decoder at once: about 110 KiB, a carrier's read


def encode(count: int, headers: codec.Headers) -> float:
    """Messages encoded in a second, one call each."""
    encode_message, payload = codec.encode_message, common.REQUEST
    began = time.perf_counter()
    for num in range(count):
        encode_message(num, payload, headers)
    return count / (time.perf_counter() - began)


def decode(count: int, headers: codec.Headers) -> float:
    """Messages decoded in a second, one call each; every one is looked at."""
    decoder = codec.FrameDecoder(from_server=False)
    decoder.feed(codec.encode_route_to(0))
    decoder.next()
    chunk = b"".join(
        bytes(part)
        for num in range(CHUNK)
        for part in codec.encode_message(num, common.REQUEST, headers)
    )
    feed, nbytes = decoder.feed, 0
    following: Callable[[], Any] = decoder.next
    began = time.perf_counter()
    for _ in range(count // CHUNK):
        feed(chunk)
        while (message := following()) is not None:
            nbytes += len(message.payload)
    elapsed = time.perf_counter() - began
    whole = count // CHUNK * CHUNK
    if nbytes != whole * len(common.REQUEST):
        raise AssertionError(f"{nbytes} bytes of payload came out of {whole} messages")
    return whole / elapsed


def main() -> None:
    setup = common.Setup(**json.loads(sys.argv[1]))
    count = setup.requests * 250
    result = {}
    for suffix, headers in (("", ()), ("_headers", HEADERS)):
        encode(count // 10, headers)
        decode(count // 10, headers)
        result[f"encoded{suffix}_s"] = encode(count, headers)
        result[f"decoded{suffix}_s"] = decode(count, headers)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
