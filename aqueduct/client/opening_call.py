"""A call that is made when its input is open: streams of other libraries may open slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar, cast

import pyarrow as pa

from aqueduct.arrow.capsules import has_stream
from aqueduct.client.call import abandoned
from aqueduct.client.options import CallOptions
from aqueduct.client.stream import Stream
from aqueduct.client.stream_input import StreamInput
from aqueduct.errors import Cancelled, DeadlineExceeded

__all__ = ["NO_COLUMNS", "OpeningCall", "opens_slowly"]

T = TypeVar("T")
NO_COLUMNS: Final = pa.schema([])
"""In place of a schema that is not known yet."""


def opens_slowly(batches: Any, schema: pa.Schema | None) -> bool:
    """Whether the schema of ``batches`` is to be waited for, and perhaps each batch, too.

    ``schema``: the one that was given.
    """
    if hasattr(batches, "__aiter__"):
        return schema is None and isinstance(batches, Stream)
    return has_stream(batches)


class OpeningCall(Generic[T]):
    """Opens the input of one call: a stream of another library, or the answers of another call.

    What ``open`` returns is the call, prepared.
    """

    def __init__(
        self,
        batches: Any,
        options: CallOptions,
        prepare: Callable[[Any, CallOptions], T],
        *,
        peer: str,
        handler: str,
    ) -> None:
        """``prepare`` is given the opened input, and the options with its schema."""
        where = f"the input of handler {handler!r}"
        self._input: Any = batches
        if not isinstance(batches, Stream):
            self._input = StreamInput(batches, where=where, schema=options.schema)
        self._options = options
        self._prepare = prepare
        self._peer = peer
        self._handler = handler

    async def open(self) -> T:
        """Opens the input; what has passed by then is taken off the call's deadline.

        Raises DeadlineExceeded, and what opening raises.
        """
        options, time = self._options, asyncio.get_running_loop().time
        deadline = cast("float | None", options.deadline)
        began = time()
        try:
            async with asyncio.timeout(deadline) as limit:
                schema = await self._input.opened()
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(
                f"the input of handler {self._handler!r} at {self._peer} did not open within "
                f"{deadline:g} s, the deadline of the call",
                peer=self._peer,
                handler=self._handler,
            ) from None
        if deadline is not None:
            options = replace(options, deadline=max(0.001, deadline - (time() - began)))
        if options.schema is None:
            options = replace(options, schema=schema)
        return self._prepare(self._input, options)

    def abandoned(self) -> Cancelled:
        """What the stream raises that was closed before."""
        return abandoned(self._peer, self._handler)

    async def close(self) -> None:
        """Releases the input."""
        await self._input.aclose()
