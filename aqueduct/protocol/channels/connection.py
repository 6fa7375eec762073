"""The Aqueduct connection core; what it can do is told in ``common.connection``."""

from __future__ import annotations

from aqueduct._speedups.base.accounts import Account
from aqueduct.config import Config
from aqueduct.protocol.channels.dispatch import FrameDispatcher
from aqueduct.protocol.channels.forgetting import Forgetting
from aqueduct.protocol.channels.prelude import ChannelPrelude
from aqueduct.protocol.channels.registry import ChannelRegistry
from aqueduct.protocol.common.connection import ConnectionCore
from aqueduct.protocol.common.context import ConnectionContext
from aqueduct.protocol.common.events import Headers

__all__ = ["ChannelConnection"]


class ChannelConnection(ConnectionCore):
    """One side of one connection."""

    def __init__(
        self,
        *,
        is_client: bool,
        config: Config,
        headers: Headers = (),
        loopback: bool = False,
        receiving: Account | None = None,
        sending: Account | None = None,
    ) -> None:
        """``loopback``: see Carrier; ``receiving`` and ``sending``: see ConnectionContext."""
        shared = ConnectionContext(
            config, 0 if is_client else 1, loopback=loopback, receiving=receiving, sending=sending
        )
        registry = ChannelRegistry(shared, Forgetting(config.timing.destroyed_memory))
        prelude = ChannelPrelude(shared)
        reader = FrameDispatcher(shared, registry, prelude.handlers())
        prelude.reader = reader
        super().__init__(shared, headers, registry, prelude, reader)
