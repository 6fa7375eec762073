"""The face of the core: one connection of ReactiveSocket, with both roles."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from aqueduct._speedups.reactivesocket import reactive_frames as frames
from aqueduct._speedups.reactivesocket.reactive_frames import ReactiveFrameDecoder, buffers_of
from aqueduct.config import ReactiveSocket as Settings
from aqueduct.errors import (
    FrameError,
    LimitExceeded,
    LocalProtocolError,
    RemoteProtocolError,
    SequenceError,
)
from aqueduct.protocol.reactivesocket import events, reasons
from aqueduct.protocol.reactivesocket.cost import FRAME_COST, HEADER_BYTES, STREAM_COST, length_of
from aqueduct.protocol.reactivesocket.outbox import (
    Buffer,
    FrameQueue,
    OutFrame,
    ReactiveOutbox,
)
from aqueduct.protocol.reactivesocket.requester import ReactiveRequester
from aqueduct.protocol.reactivesocket.responder import ReactiveResponder
from aqueduct.protocol.reactivesocket.state import CONNECTION, ReactiveInput, ReactiveState

__all__ = ["ReactiveConnection"]

_REQUESTS = frozenset(
    (
        frames.REQUEST_RESPONSE,
        frames.REQUEST_FNF,
        frames.REQUEST_STREAM,
        frames.REQUEST_SUB,
    )
)


class ReactiveConnection:
    """A connection of ReactiveSocket: a function of its inputs.

    The order of calls: *inputs* (``receive_data``, ``landed``, ``receive_eof``,
    ``handle_deadline``), then ``events_received``, then *commands*, then ``take`` or
    ``take_message`` as long as they give something and the transport takes it. No call waits, none
    has a clock: ``now`` is in seconds, of any steady clock.

    **Beginning.** A client's SETUP is the first frame; it may request at once. A server answers
    ``events.SETUP`` with ``accept`` or ``reject``, and before that neither responds nor requests.

    **Requesting.** ``request`` opens a stream, ``request_n`` asks for more of its items, ``cancel``
    ends it. Answers are events. Each stream ends once: by COMPLETED, ERROR, BROKEN, ``cancel``, or
    with the connection.

    **Responding.** ``item`` sends what was asked for, ``complete`` and ``error`` end the stream.
    For a stream that has ended they return False, as the peer may have cancelled it meanwhile.
    Buffers are kept by reference until they have left, so they must not change.

    **Transports.** With ``framed`` the bytes are a stream: ``room`` and ``landed`` let a carrier
    read large data straight to its place. Otherwise each ``receive_data`` is one message, and
    ``take_message`` gives one. What waits for streams leaves in turn, a frame each.

    **Memory.** ``release`` what events cost once it is done with. While the connection is ``full``
    or ``unheard`` read nothing. While it is not ``writable`` requests and items are refused.

    **Failure.** A violation by the peer ends the connection: FAILED is the last event, ``error``
    what it was. A server has an ERROR to send then: ``take`` until ``idle``, and close.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        client: bool,
        setup: Buffer = b"",
        framed: bool = True,
        setup_required: bool = True,
        extensions: Collection[int] = (),
    ) -> None:
        """``setup``: the data of a client's SETUP.

        Without ``setup_required`` a server serves clients that send no SETUP (RS-R12).
        ``extensions``: the extended types that the application knows; they are events.
        """
        self.settings = settings = settings or Settings()
        self.client = client
        self.state = ReactiveState.NEW
        self.error: RemoteProtocolError | None = None
        self._framed = framed
        self._setup_required = setup_required
        self._extensions = frozenset(extensions)
        self._events: list[events.Event] = []
        self._outbox = ReactiveOutbox(framed=framed, frame_bytes=settings.frame_bytes)
        self._requester = ReactiveRequester(
            settings, self._outbox, self._events, first=1 if client else 2
        )
        self._responder = ReactiveResponder(settings, self._outbox, self._events)
        self._decoder = ReactiveFrameDecoder(framed=framed, frame_bytes=settings.frame_bytes)
        self._held = 0
        self._refused = False
        """Something was refused as too much waits to leave."""
        self._left_over = 0
        """Answers that waited when what could leave had left."""
        if client:
            if length_of(setup) > settings.setup_bytes:
                raise LocalProtocolError(
                    f"a SETUP of {length_of(setup)} bytes is above {settings.setup_bytes} "
                    "(ReactiveSocket.setup_bytes)"
                )
            self._change(ReactiveInput.SETUP)
            self._outbox.urge(self._outbox.frame(frames.SETUP, 0, buffers_of(setup)))
        elif setup_required:
            # Before its SETUP a peer is a stranger: it gets no memory for more.
            self._decoder.allow(settings.setup_bytes + HEADER_BYTES, "setup_bytes")

    # Inputs

    def receive_data(self, data: Buffer, now: float) -> None:
        """The next bytes from the peer, in any pieces, or one message. They must not change."""
        if self.state is ReactiveState.ENDED:
            return
        try:
            self._decoder.feed(data)
            self._go_on(now)
        except RemoteProtocolError as error:
            self._fail(error)

    def room(self) -> memoryview | None:
        """Where the next bytes go, of large data; None: feed them."""
        return None if self.state is ReactiveState.ENDED else self._decoder.room()

    def landed(self, size: int, now: float) -> None:
        """``size`` bytes were read to ``room``."""
        if self.state is ReactiveState.ENDED:
            return
        try:
            self._decoder.landed(size)
            self._go_on(now)
        except RemoteProtocolError as error:
            self._fail(error)

    def receive_eof(self) -> None:
        """The peer sends nothing more."""
        if self.state is ReactiveState.ENDED:
            return
        try:
            self._decoder.end()
        except FrameError as error:
            self._fail(error)
        else:
            self._end((events.ENDED,))

    def next_deadline(self) -> float | None:
        """When ``handle_deadline`` is due."""
        return self._responder.next_deadline()

    def handle_deadline(self, now: float) -> None:
        """Ends streams of the peer that ask for nothing."""
        try:
            self._responder.handle_deadline(now)
            self._check_answers()
        except RemoteProtocolError as error:
            self._fail(error)

    # Outputs

    def events_received(self) -> list[events.Event]:
        """What happened since the last call, in order; see ``events``."""
        self._looked()  # a cancel may have made room
        found = self._events[:]
        self._events.clear()
        return found

    @property
    def pending(self) -> bool:
        """Whether there are events, or something waits to leave."""
        return bool(self._events) or not self._outbox.empty

    @property
    def idle(self) -> bool:
        """Nothing waits to leave."""
        return self._outbox.empty

    def take(self, limit: int) -> OutFrame:
        """The next frames: (buffers, bytes of them), about ``limit`` bytes.

        A frame is not cut, so it can exceed that. Large data are the buffers that were given.
        """
        buffers: list[Any] = []
        size = 0
        while size < limit and (frame := self._outbox.take()) is not None:
            buffers += frame[0]
            size += frame[1]
        self._looked()
        return buffers, size

    def take_message(self) -> OutFrame | None:
        """The next frame, as a message of its own; None: nothing waits."""
        frame = self._outbox.take()
        self._looked()
        return frame

    @property
    def full(self) -> bool:
        """The application holds ``ReactiveSocket.receive_bytes`` or more: receive no more.

        Not while a stream of the peer waits for REQUEST_N. What holds the memory may be done with
        it only after that has come. Requests are rejected meanwhile.
        """
        return self._held >= self.settings.receive_bytes and not self._responder.unasked_streams

    @property
    def unheard(self) -> bool:
        """``ReactiveSocket.unsent_answers`` wait to leave: receive no more until some have left."""
        return self._outbox.answers >= self.settings.unsent_answers

    @property
    def held_bytes(self) -> int:
        """What this connection keeps: what came, what waits to leave, and open streams."""
        streams = len(self._requester.streams) + len(self._responder.streams)
        return self.received_bytes + self.queued_bytes + STREAM_COST * streams

    @property
    def received_bytes(self) -> int:
        """What came, to the last byte, and is not released."""
        return self._held + self._requester.fragments_cost + self._decoder.coming

    @property
    def whole_bytes(self) -> int:
        """What events brought that is not released."""
        return self._held

    @property
    def queued_bytes(self) -> int:
        """What frames cost that wait to leave."""
        return self._outbox.cost

    def queue_of(self, stream: int) -> FrameQueue | None:
        """What waits to leave of a stream of the peer; it is kept to the end. None: it has ended.

        Its ``cost`` is 0 once all has left.
        """
        found = self._responder.streams.get(stream)
        return None if found is None else found.queue

    @property
    def writable(self) -> bool:
        """Whether requests and items are taken. If not, WRITABLE follows."""
        if self._outbox.cost < self.settings.send_bytes:
            return True
        self._refused = True
        return False

    @property
    def requested(self) -> Collection[int]:
        """The streams of this requester that have not ended."""
        return self._requester.streams.keys()

    @property
    def responding(self) -> Collection[int]:
        """The streams of this responder that have not ended."""
        return self._responder.streams.keys()

    # Commands

    def accept(self) -> None:
        """At the server: its SETUP is taken. Nothing is said (RS-12)."""
        if self.state is ReactiveState.ENDED:
            return  # by what came behind the SETUP
        if self.client or self.state is ReactiveState.NEW:
            raise LocalProtocolError("there is no SETUP to accept")
        self._change(ReactiveInput.ACCEPT)

    def reject(self, text: str) -> None:
        """At the server: its SETUP is not taken. Let the ERROR out, then close (RS-12).

        So is a client without a SETUP where these are served.
        """
        if self.state is ReactiveState.ENDED:
            return
        without = self.state is ReactiveState.OPEN and not self._setup_required
        if self.client or not (without or self.state is ReactiveState.OFFERED):
            raise LocalProtocolError("there is no SETUP to reject")
        self._end(None)
        self._responder.answer(0, reasons.REJECTED_SETUP, text)

    def request(
        self, kind: int, data: Buffer | Iterable[Buffer] = b"", *, n: int | None = None
    ) -> int:
        """Sends a request; returns its stream. ``kind`` is a type of frame.

        ``n`` items are asked for, of REQUEST_STREAM and REQUEST_SUB. A stream of REQUEST_FNF has
        ended with that. LocalProtocolError for what cannot be sent.
        """
        self._require_open()
        if kind not in _REQUESTS:
            raise LocalProtocolError(f"type {kind:#x} is no request (RS-2)")
        if (n is not None) != (kind in (frames.REQUEST_STREAM, frames.REQUEST_SUB)):
            raise LocalProtocolError(
                "a number of items belongs to REQUEST_STREAM and REQUEST_SUB, and to them alone"
            )
        self._require_writable()
        return self._requester.request(kind, n, buffers_of(data))

    def request_n(self, stream: int, n: int) -> bool:
        """Asks for so many more items. False: the stream has ended."""
        return self._requester.request_n(stream, n)

    def cancel(self, stream: int) -> bool:
        """Wants no more of a stream, which ends. False: it has ended."""
        return self._requester.cancel(stream)

    def demand(self, stream: int) -> int:
        """How many items may be sent on a stream of the peer; 0 also if it has ended."""
        return self._responder.demand(stream)

    def item(self, stream: int, data: Buffer | Iterable[Buffer]) -> bool:
        """Sends an item. False: the stream has ended.

        LocalProtocolError: it was not asked for, or is too large, or the connection not writable.
        """
        if stream in self._responder.streams:
            self._require_open()
            self._require_writable()
        return self._responder.item(stream, buffers_of(data))

    def complete(self, stream: int, data: Buffer | Iterable[Buffer] | None = None) -> bool:
        """Ends a stream of the peer, with a last item unless ``data`` is None. False: it has ended.

        A subscription does not complete: LocalProtocolError, as for an item.
        """
        if stream in self._responder.streams:
            self._require_open()
            if data is not None:
                self._require_writable()
        return self._responder.complete(stream, None if data is None else buffers_of(data))

    def fail_stream(self, stream: int, text: str, *, word: str = reasons.APPLICATION_ERROR) -> bool:
        """Ends a stream of the peer with an ERROR. False: it has ended."""
        if stream in self._responder.streams:
            self._require_open()
        return self._responder.error(stream, word, text)

    def release(self, cost: int) -> None:
        """The application has done with what an event brought; below 0: it has made more of it."""
        if cost > self._held:
            raise LocalProtocolError(f"{cost} bytes released; {self._held} are held")
        self._held -= cost

    def refuse(self, error: RemoteProtocolError) -> None:
        """Who feeds this has found that the peer breaks the protocol: as for what is found here."""
        if self.state is not ReactiveState.ENDED:
            self._fail(error)

    # Within

    def _require_open(self) -> None:
        if self.state is ReactiveState.OPEN or (
            self.client and self.state is ReactiveState.OFFERED
        ):
            return
        raise LocalProtocolError(
            "the connection has ended"
            if self.state is ReactiveState.ENDED
            else "the SETUP is not accepted yet: accept it first (RS-12)"
        )

    def _require_writable(self) -> None:
        if not self.writable:
            raise LocalProtocolError(
                f"{self._outbox.cost} bytes wait to leave; ReactiveSocket.send_bytes is the limit: "
                "wait for WRITABLE"
            )

    def _looked(self) -> None:
        """The owner has had a look: what waits now could not leave."""
        self._left_over = self._outbox.answers
        if self._refused and self._outbox.cost < self.settings.send_bytes:
            self._refused = False
            self._events.append((events.WRITABLE,))

    def _change(self, given: ReactiveInput) -> None:
        after = CONNECTION[self.state, given]
        if after is None:
            raise SequenceError(f"{given.name} on a connection that is {self.state.name}")
        self.state = after

    def _go_on(self, now: float) -> None:
        """Takes the frames that the decoder has."""
        decoder = self._decoder
        while self.state is not ReactiveState.ENDED and decoder.next():
            if self.state is ReactiveState.NEW:
                self._take_first(decoder, now)
            else:
                self._take_frame(decoder, now)
            if self._outbox.answers > self.settings.unsent_answers:
                self._check_answers()

    def _take_first(self, decoder: ReactiveFrameDecoder, now: float) -> None:
        """The first frame at a server."""
        if decoder.type == frames.SETUP:
            size = length_of(decoder.data)
            if size > self.settings.setup_bytes:
                raise LimitExceeded(
                    f"a SETUP of {size} bytes is above {self.settings.setup_bytes} "
                    "(ReactiveSocket.setup_bytes)"
                )
            self._change(ReactiveInput.SETUP)
            self._decoder.allow(self.settings.frame_bytes, "frame_bytes")
            self._events.append((events.SETUP, bytes(decoder.data)))
        elif self._setup_required and (decoder.type != frames.ERROR or decoder.stream):
            name = frames.TYPE_NAMES.get(decoder.type, f"{decoder.type:#x}")
            raise SequenceError(f"the first frame is {name} and no SETUP (RS-12)")
        else:
            self._change(ReactiveInput.WITHOUT)
            self._take_frame(decoder, now)

    def _take_frame(self, decoder: ReactiveFrameDecoder, now: float) -> None:
        kind, stream = decoder.type, decoder.stream
        if kind == frames.RESPONSE:
            self._accepted()
            self._held += self._requester.take_response(stream, decoder.flags, decoder.data)
        elif kind == frames.REQUEST_N:
            self._responder.take_more(stream, decoder.n)
        elif kind in _REQUESTS:
            self._accepted()
            self._held += self._responder.take_request(
                kind, stream, decoder.n, decoder.data, now, crowded=self._crowded()
            )
        elif kind == frames.CANCEL:
            self._responder.take_cancel(stream)
        elif kind == frames.ERROR and stream:
            self._accepted()
            self._held += self._requester.take_error(stream, decoder.data)
        elif kind == frames.ERROR:
            data = bytes(decoder.data)
            offered = self.client and self.state is ReactiveState.OFFERED
            rejected = offered and reasons.rejects_setup(data)
            self._end((events.REJECTED if rejected else events.PEER_FAILED, data))
        elif kind == frames.EXT:
            self._take_extension(decoder)
        # What is left is a SETUP too many (RS-R11), or may be ignored.

    def _take_extension(self, decoder: ReactiveFrameDecoder) -> None:
        if decoder.extended_type in self._extensions:
            crowded = self._crowded()
            if crowded:  # nothing answers an extension, so its sender would not hear of it
                raise LimitExceeded(f"an extension of type {decoder.extended_type:#x}: {crowded}")
            cost = length_of(decoder.data) + FRAME_COST
            self._held += cost
            self._events.append((events.EXTENSION, decoder.extended_type, decoder.data, cost))
        elif not decoder.flags & frames.IGNORE:
            raise FrameError(
                f"an extension of type {decoder.extended_type:#x}, which is not known and may not "
                "be ignored (RS-R4)"
            )

    def _accepted(self) -> None:
        """A client hears that its SETUP is accepted (RS-12)."""
        if self.client and self.state is ReactiveState.OFFERED:
            self._change(ReactiveInput.ACCEPT)
            self._events.append((events.ACCEPTED,))

    def _crowded(self) -> str:
        """Why a further request is rejected; empty: it is not."""
        most = self.settings.receive_bytes
        if self._held < most:
            return ""
        return (
            f"{self._held} bytes of earlier requests and items are at work, and {most} are the "
            "limit (ReactiveSocket.receive_bytes); ask again later"
        )

    def _check_answers(self) -> None:
        """Those of one turn may be more: none of them could leave before the owner looks."""
        most = self.settings.unsent_answers
        if self._outbox.answers > most and self._left_over >= most:
            raise LimitExceeded(
                f"more than {most} errors and cancels wait to leave: the peer does not read "
                "(ReactiveSocket.unsent_answers)"
            )

    def _fail(self, error: RemoteProtocolError) -> None:
        """The peer broke the protocol: a server says so, and the connection ends (RS-R12)."""
        word = reasons.INVALID_SETUP if self.state is ReactiveState.NEW else reasons.INVALID
        self.error = error
        self._end((events.FAILED, error))
        if not self.client:
            self._responder.answer(0, word, str(error))

    def _end(self, event: events.Event | None) -> None:
        """Nothing follows: all streams end."""
        self._change(ReactiveInput.END)
        self._outbox.clear()
        self._requester.clear()
        self._responder.clear()
        if event is not None:
            self._events.append(event)
