"""What the service works out for a call and uses for those that are alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqueduct.service.handlers import Handler, HandlerShape

if TYPE_CHECKING:
    from aqueduct.service.call import ServerCall

__all__ = ["CallTemplate"]


class CallTemplate:
    """What calls that are alike need, worked out once: all of it depends on nothing else."""

    __slots__ = (
        "as_completed",
        "decoder",
        "encoder",
        "failures",
        "handler",
        "hello",
        "output_schema",
        "reader",
        "schema",
    )

    def __init__(self, handler: Handler, running: ServerCall) -> None:
        self.handler = handler
        self.schema = running.call.schema
        self.output_schema = running.call.output_schema
        self.decoder = running.decoder
        self.reader = running.decoder.reader
        self.encoder = running.encoder
        self.hello = running.hello
        self.as_completed = running.as_completed
        self.failures = running.failures

    @classmethod
    def of(cls, handler: Handler, running: ServerCall) -> CallTemplate | None:
        """None if calls cannot share it.

        Where a schema is made for each call, where batches stand on those before them or are
        compressed, or where encoders are used in threads.
        """
        shared = (
            handler.kind == "exchange"
            and not callable(handler.output)
            and handler.shape is not HandlerShape.GENERATOR
            and not running.compression
            and running.decoder.prepared
            and running.encoder.prepared
            and running.decoder.independent
            and running.encoder.independent
        )
        return cls(handler, running) if shared else None

    def serves(self, handler: Handler) -> bool:
        """Whether calls of ``handler`` may use it, still."""
        # The encoder knows no dictionaries, so nothing but a failure could make it dependent.
        return handler is self.handler and self.encoder.broken is None

    def give(self, running: ServerCall) -> None:
        """The call goes by it."""
        call = running.call
        call.schema, call.output_schema = self.schema, self.output_schema
        running.decoder, running.encoder = self.decoder, self.encoder
        running.read_by(self.reader)
        running.as_completed, running.failures = self.as_completed, self.failures
        running.hello = self.hello
