"""What the core wants, done to the carrier: the same for every driver of the two."""

from __future__ import annotations

from collections.abc import Iterable

from aqueduct.carriers.contract import Carrier
from aqueduct.protocol.channels import effects
from aqueduct.protocol.channels.connection import ChannelConnection

__all__ = ["apply"]


def apply(
    wanted: Iterable[effects.Effect], core: ChannelConnection, carrier: Carrier, now: float
) -> None:
    """Applies effects in their order and flushes; ``now`` is that of the core's inputs.

    The core is told what room datagrams have left: the carrier may drop some for its own reasons.
    """
    told = False
    for effect in wanted:
        kind = effect[0]
        if kind == effects.WRITE:
            carrier.write(effect[1], effect[2], effect[3])
        elif kind == effects.CREDIT:
            carrier.credit(effect[1], effect[2])
        elif kind == effects.RESET:
            carrier.reset(effect[1], effect[2])
        elif kind == effects.STOP:
            carrier.stop(effect[1], effect[2])
        elif kind == effects.DATAGRAM:
            carrier.send_datagram(effect[1])
            told = True
        elif kind == effects.CLOSE:
            linger = core.close_by - now if effect[1] == 0 else 0.0
            carrier.close(effect[1], effect[2], linger=max(linger, 0.0))
    if told:
        core.datagram_room_changed(carrier.datagram_room, now)
    carrier.flush()  # may report bytes as written at once, and so free room
