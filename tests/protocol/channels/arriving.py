"""A server to which a client's messages come, as bytes of stream 9; and what it makes of them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Config
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.protocol.common.receiver import ReceiverHalf
from tests.support.pair import Pair

ROUTE = codec.encode_route_to(0)
KiB = 1 << 10
SIZES = st.sampled_from([0, 1, 100, 4095, 4096, 4097, 16 * KiB, 16 * KiB + 1, 70_000, 270_000])


def frames(sizes: list[int], *, finish: bool) -> bytes:
    """A sequence of messages; each byte tells where it belongs."""
    parts, pattern = [codec.VERSION, ROUTE], bytes(range(251))
    for number, size in enumerate(sizes):
        payload = (pattern * (size // 251 + 2))[number % 251 :][:size]
        parts += [bytes(part) for part in codec.encode_message(number, payload)]
    if finish:
        parts.append(codec.encode_finish_sender(len(sizes)))
    return b"".join(parts)


def server(config: Config = DEFAULT) -> ChannelConnection:
    """A server that has accepted its client."""
    core = Pair(config).server.core
    assert isinstance(core, ChannelConnection)
    return core


def entry(core: ChannelConnection) -> ReceiverHalf:
    assert isinstance(core.entrypoint, ReceiverHalf)
    return core.entrypoint


def told(core: ChannelConnection) -> list[Any]:
    """What the core reports and wants, by names and numbers."""
    events = [type(event).__name__ for event in core.events_received()]
    return [events, core.effects_to_apply(), core.error]


def taken(core: ChannelConnection, now: float) -> list[tuple[int, bytes]]:
    half, all_of_it = entry(core), []
    while (received := core.receive(half, now)) is not None:
        all_of_it.append((received.number, bytes(received.payload)))
    return all_of_it


def last_credits(wanted: list[Any]) -> dict[int, int]:
    """A credit may come in other steps, never to another limit."""
    return {effect[1]: effect[2] for effect in wanted if effect[0] == 3}
