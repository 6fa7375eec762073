"""A call of one batch in the service: it came with its batch and leaves with answers and status.

To the runners it looks like any exchange: its input is the one batch, its output keeps answers.
When they no longer fit one message the call becomes an exchange from there on: that it is accepted
goes out in place of the answers, with the channels on which they follow.
"""

from __future__ import annotations

from aqueduct.endpoint import Connection, Responder, Sender, channel
from aqueduct.errors import AqueductError
from aqueduct.rpc.request import Accepted, CallHead
from aqueduct.rpc.status import OK, Status
from aqueduct.rpc.unary import encode_answer, schema_prefix
from aqueduct.service.call import CallHost, ServerCall
from aqueduct.service.call_output import AnswerBuffer
from aqueduct.service.handlers import Handler

__all__ = ["UnaryCall"]


class UnaryCall(ServerCall):
    """One call of one batch. The client reads one message, or is told where to read on."""

    def __init__(
        self,
        host: CallHost,
        connection: Connection,
        head: CallHead,
        number: int,
        payload: memoryview,
        status: Responder,
    ) -> None:
        super().__init__(host, connection, head, number, status=status, payload=payload)
        self._channels = connection
        self._buffer = AnswerBuffer(host.room)
        self.output.keep(self._buffer, self._spill)

    def _accept(self, handler: Handler) -> None:
        """The answers say so, if they come: their schema leaves with them."""
        schema = self.call.output_schema
        assert schema is not None
        self._buffer.begin(schema_prefix(schema))

    def _tell(self, status: Status, alone: bool) -> None:
        if self.output.sender is not None:
            super()._tell(status, alone)
        elif self._status.half.error is None:
            if status.code == OK:
                headers, payload = encode_answer(self._buffer.prefix, self._buffer.answers)
            else:
                headers, payload = status.encode()  # type: ignore[assignment]
            # What is left to do here can be done while the client reads it.
            self._channels.reply(self._status, payload, headers, now=alone)

    def _spill(self) -> None:
        """From here on it is an exchange."""
        output, to_client = channel()
        status, last = channel(oneshot=True)
        headers, payload = Accepted(self.call.output_schema).encode()
        oneshot = self._channels.sender(self._status)
        self._status = status
        status.on_change = self._status_changed
        self.output.use(output)
        if oneshot.error is None:
            try:
                oneshot.send_nowait(
                    payload, headers=headers, attachments=[to_client, last], force=True
                )
            except AqueductError:
                self._status_lost(oneshot)
                raise
        else:
            self._status_lost(oneshot)

    def _status_lost(self, oneshot: Sender) -> None:
        """The client has gone already: what would end the call has to end it now."""
        self._status = oneshot
        self._status_changed()
