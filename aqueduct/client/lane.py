"""``Lane``: one of several exchanges that one thread drives at once.

A ``SyncStream`` waits for its own call. Who spreads batches over several calls waits for whichever
has news first: all of them put it into one queue, each piece with a tag.
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any, TypeAlias

import pyarrow as pa

from aqueduct.arrow.decode import Decoder
from aqueduct.client.call import Batches
from aqueduct.client.thread_call import ThreadCall

__all__ = ["Lane", "News"]

News: TypeAlias = "SimpleQueue[tuple[Any, Any]]"
"""Where lanes put what they have, each piece with the tag of its lane."""


class Lane:
    """One exchange call, made at once. For one thread.

    Batches are sent by ``send``, whether or not there is ``room``. What comes is taken from the
    queue and given to ``taken``:

    - NEWS: there is room, or the call was accepted, where ``expect`` asked for it;
    - an answer: ``taken`` makes it a tuple of the number of its input batch and its payload, for
      ``decode``, or a ``FailedBatch`` of that batch. The answer before is given back by that;
    - END, and nothing after it: all is answered, and the service says that it is well;
    - ``Failed``, and nothing after it: the call is over, with its ``error``.
    """

    def __init__(self, crossing: ThreadCall, source: Batches) -> None:
        self._source = source
        self._crossing = crossing
        self._decoder: Decoder | None = None
        self._crossing.wake()

    @property
    def accepted(self) -> bool:
        """Whether the service has accepted the call."""
        return self._crossing.accepted

    @property
    def capabilities(self) -> frozenset[str]:
        """As those of a SyncStream."""
        call = self._crossing.call
        return frozenset() if call is None else call.capabilities

    @property
    def schema(self) -> pa.Schema:
        """Of the answers, of an accepted call."""
        call = self._crossing.call
        assert call is not None
        schema = call.schema if call.head.expected is None else call.head.expected
        assert schema is not None
        return schema

    @property
    def room(self) -> bool:
        """Whether a batch may be sent, by the window of this call and by its channel."""
        return self._crossing.room

    def hold(self, size: int) -> None:
        """The caller keeps so many bytes besides: they count against the window."""
        self._crossing.hold(size)

    @property
    def sent_bytes(self) -> int:
        """Of the batches that were sent, encoded."""
        return self._crossing.sent_bytes

    @property
    def settled(self) -> int:
        """Of how many batches the service needs no more: answered, or taken."""
        return self._crossing.settled

    def send(self, batch: pa.RecordBatch) -> int:
        """Sends a batch; returns its number in this call.

        Raises SchemaMismatch, LocalProtocolError and BatchTooLarge for what cannot be sent; then
        nothing was.
        """
        self._source.compression = self._crossing.compression
        return self._crossing.send(self._source.encode(batch))

    def finish(self) -> None:
        """No more batches are sent."""
        self._crossing.finish()

    def abandon(self) -> None:
        """Gives up the call, unless it is over: the handler is told to stop.

        Nothing more comes but a Failed, for a thread that waits while another one gives up.
        """
        self._crossing.abandon(self._crossing.abandoned())

    def expect(self, *, room: bool = False, acceptance: bool = False) -> bool:
        """Asks for NEWS of these. True: there they are; NEWS may be on its way all the same."""
        return self._crossing.expect(room, acceptance)

    def waiting(self, waiting: bool) -> None:
        """Whether the thread waits for this call's service; its deadline on progress runs then."""
        self._crossing.set_waiting(waiting)

    def check(self) -> None:
        """Raises LocalProtocolError if nothing can come any more: the client's loop is gone."""
        self._crossing.check()

    def taken(self, found: Any) -> Any:
        """To be called with all that comes from the queue; returns it."""
        return self._crossing.taken(found)

    def decode(self, payload: Any) -> pa.RecordBatch:
        """The batch of an answer. Of all answers of this call, in the order of their coming.

        Raises the errors of a Decoder: the call is of no use any more.
        """
        if self._decoder is None:
            assert self._crossing.call is not None
            self._decoder = self._crossing.call.decoder()
        return self._decoder.decode(payload, grow=self._crossing.grow)
