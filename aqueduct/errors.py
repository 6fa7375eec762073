"""Every error that Aqueduct raises, as one tree.

::

    AqueductError
    |-- ConfigError (also ValueError)       a setting, argument or address that cannot work
    |   `-- WrongType (also TypeError)      one that is not of the type that is wanted
    |-- StartFailed                         an on_start function failed, so nothing is served
    |-- LocalProtocolError                  this side used the library wrongly; nothing changed
    |-- SendQueueFull                       a send that may not wait found no room
    |-- RemoteProtocolError                 the peer broke the protocol; .code is the wire code
    |   |-- FrameError            code 1    bytes that do not decode
    |   |-- SequenceError         code 2    frames that decode but are not allowed here
    |   |-- VersionError          code 3    not this version of the protocol
    |   |-- HeadersRejected       code 4    the application refused the connection's headers
    |   |-- LimitExceeded         code 5    something above a configured limit
    |   |-- InternalError         code 6    a fault of the side that closes
    |   `-- NoDatagrams           code 7    the transport has none, and the dialect needs them
    |-- ConnectionLost (also ConnectionError)   the connection is gone; .code and .reason say why
    |   |-- ConnectFailed         it never came up: refused, unreachable, not Aqueduct, certificate
    |   `-- LinkLost              a link of Relink is lost; .unconsumed and .unconfirmed
    |-- ReactiveError         the peer answered a request of ReactiveSocket with an ERROR
    |-- WriteLost             what a writer wrote since its last commit is not in the sink
    |-- Ended                 the peer ended a bpmux request, sink or stream, or a channel of Relink
    |-- ChannelError                        the end of one channel, sticky on its handle
    |   |-- Finished              everything was delivered and the sender finished
    |   |-- Cancelled             the sender was cancelled
    |   |-- ReceiverClosed        the receiver was closed
    |   |-- LostInTransit         the message that carried the channel was lost
    |   `-- MessageLost           the one message of a oneshot channel was lost
    `-- CallError                           one Arrow call failed; .peer and .handler say where
        |-- UnknownHandler        the service has no handler of that name and kind
        |-- SchemaMismatch        a column differs; .column, .wanted and .got name it
        |-- HandlerFailed         the handler raised; .kind, .detail and .remote_traceback
        |-- Busy                  the service is at its limit of calls, or of memory
        |-- Refused               the service refused the call (token, drain)
        |-- BatchTooLarge         a record batch above batch_limit
        |-- BadCall               the call or its batches did not follow the convention
        `-- DeadlineExceeded (also TimeoutError)   no progress, or no end, in time

The codes are those of the close of a connection (AQ-R30).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aqueduct.escaping import Lines, escape, escape_lines

__all__ = [
    "AqueductError",
    "BadCall",
    "BatchTooLarge",
    "Busy",
    "CallError",
    "Cancelled",
    "ChannelError",
    "ConfigError",
    "ConnectFailed",
    "ConnectionLost",
    "DeadlineExceeded",
    "Ended",
    "Finished",
    "FrameError",
    "HandlerFailed",
    "HeadersRejected",
    "InternalError",
    "LimitExceeded",
    "LinkLost",
    "LinkUnknown",
    "LocalProtocolError",
    "LostInTransit",
    "MessageLost",
    "NoDatagrams",
    "ReactiveError",
    "ReceiverClosed",
    "Refused",
    "RemoteProtocolError",
    "SchemaMismatch",
    "SendQueueFull",
    "SequenceError",
    "StartFailed",
    "UnknownHandler",
    "VersionError",
    "WriteLost",
    "WrongType",
]


class AqueductError(Exception):
    """The root of the tree.

    The text of each error is one line without control characters, even where a peer sent it.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if text.isprintable():
            return text
        lines = bool(self.args) and isinstance(self.args[0], Lines)
        return escape_lines(text) if lines else escape(text)


class ConfigError(AqueductError, ValueError):
    """A setting, argument or address that cannot work; the text names it and says what would."""


class WrongType(ConfigError, TypeError):
    """A setting or an argument that is not of the type that is wanted."""


class StartFailed(AqueductError):
    """An ``on_start`` function of a service raised, or took too long. Nothing is served.

    ``__cause__`` is what it raised.
    """


class LocalProtocolError(AqueductError):
    """This side asked for something the protocol does not allow. The state is unchanged."""


class SendQueueFull(AqueductError):
    """A send that may not wait found the queue at its hard limit; nothing was sent.

    Wait for room (``wait_writable``, or ``send`` instead of ``send_nowait``) and send it again.
    """


class RemoteProtocolError(AqueductError):
    """The peer broke the protocol. ``code`` is what the connection is closed with (AQ-R30)."""

    code = 2


class FrameError(RemoteProtocolError):
    """Bytes that do not decode. ``truncated``: only more bytes were missing."""

    code = 1

    def __init__(self, message: str, *, truncated: bool = False) -> None:
        super().__init__(message)
        self.truncated = truncated


class SequenceError(RemoteProtocolError):
    """Frames that decode but are not allowed here."""

    code = 2


class VersionError(RemoteProtocolError):
    """The peer speaks another version of the protocol, or another protocol."""

    code = 3


class HeadersRejected(RemoteProtocolError):
    """The server's application refused the connection headers."""

    code = 4


class LimitExceeded(RemoteProtocolError):
    """Something above a limit of ``aqueduct.config.Limits``; the text names the field."""

    code = 5


class InternalError(RemoteProtocolError):
    """A fault of the closing side itself."""

    code = 6


class NoDatagrams(RemoteProtocolError):
    """The transport has no datagrams, and the control-stream draft needs them."""

    code = 7


class LinkUnknown(RemoteProtocolError):
    """The listener of Relink does not have the link that was to be resumed.

    ``restarted``: the listener is another instance, so the process that had the link has ended.
    """

    def __init__(self, message: str, *, restarted: bool = False) -> None:
        super().__init__(message)
        self.restarted = restarted


class ConnectionLost(AqueductError, ConnectionError):
    """The connection is gone. Every handle that lived on it reads this (AQ-R27.9).

    ``code`` is the code of the close (None if there was none), ``reason`` its text, and
    ``remote`` whether the peer closed.
    """

    def __init__(
        self, message: str, *, code: int | None = None, reason: str = "", remote: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.remote = remote


class ConnectFailed(ConnectionLost):
    """A connection that never came up; the text says why and what to check."""


class LinkLost(ConnectionLost):
    """A link of ``aqueduct.relink`` is lost: no connection can resume it.

    ``why`` is one of

    - ``"restarted"``: the listener is another process than before,
    - ``"dropped"``: the peer does not know the link any more,
    - ``"expired"``: there was no connection for ``Relink.keep``, or other links took its place,
    - ``"violation"``: one side broke the protocol,
    - ``"closed"``: this side closed it before the peer had done with everything.

    What is unknown then, by channel: ``unconsumed`` has the numbers of messages of this side that
    the peer may or may not have consumed, and ``unconfirmed`` those of them that were committed
    and whose result is not known. What is in neither has its result.
    """

    def __init__(
        self,
        message: str,
        *,
        why: str = "dropped",
        unconsumed: Mapping[int, Sequence[int]] | None = None,
        unconfirmed: Mapping[int, Sequence[int]] | None = None,
        code: int | None = None,
        reason: str = "",
        remote: bool = False,
    ) -> None:
        super().__init__(message, code=code, reason=reason, remote=remote)
        self.why = why
        self.unconsumed: Mapping[int, Sequence[int]] = unconsumed or {}
        self.unconfirmed: Mapping[int, Sequence[int]] = unconfirmed or {}


class ReactiveError(AqueductError):
    """The peer answered a request of ``aqueduct.reactivesocket`` with an ERROR.

    ``data`` is what it said, any bytes, up to 64 KiB. ``word`` and ``text`` are what that is by
    RS-R13; the word is empty if the peer uses none of those known here.
    """

    def __init__(self, message: str, *, word: str = "", text: str = "", data: bytes = b"") -> None:
        super().__init__(message)
        self.word = word
        self.text = text
        self.data = data


class WriteLost(AqueductError):
    """What a writer wrote since its last commit is not in the sink, and nobody will commit it.

    The sink has refused the commit, or another writer has its key. What was committed before is
    there. Open another writer with the same key, and write again from its ``committed.note`` on.
    """


class Ended(AqueductError):
    """The peer ended a request, a sink or a stream of ``aqueduct.bpmux``.

    ``payload`` is what it said with that. A channel of ``aqueduct.relink`` that the peer has closed
    ends so too, without a payload, and a request of ReactiveSocket that the peer has cancelled.
    """

    def __init__(self, message: str, payload: bytes = b"") -> None:
        super().__init__(message)
        self.payload = payload


class ChannelError(AqueductError):
    """How a channel ended. Sticky: every later use of the handle raises the same."""


class Finished(ChannelError):
    """All messages were delivered and the sender finished."""


class Cancelled(ChannelError):
    """The sender was cancelled; undelivered messages were dropped."""


class ReceiverClosed(ChannelError):
    """The receiver was closed; unacknowledged messages may not have been read."""


class LostInTransit(ChannelError):
    """The message that carried this channel to its owner was lost."""


class MessageLost(ChannelError):
    """The one message of a oneshot channel was lost."""


class CallError(AqueductError):
    """One Arrow call failed, or one batch of it.

    ``peer`` is an address, ``handler`` a name, ``batch`` the number of the input batch that the
    handler was at, None if there is none.
    """

    status = "error"
    batch: int | None = None

    def __init__(self, message: str, *, peer: str = "", handler: str = "") -> None:
        super().__init__(message)
        self.peer = peer
        self.handler = handler

    def log_fields(self) -> dict[str, object]:
        """What a line of the log about it has as fields."""
        return {"peer": self.peer, "handler": self.handler, "status": self.status}


class UnknownHandler(CallError):
    """The service has no handler of that name and kind."""

    status = "unknown-handler"


class SchemaMismatch(CallError):
    """Two schemas differ. ``column``, ``wanted`` and ``got`` name the first difference."""

    status = "schema-mismatch"

    def __init__(
        self,
        message: str,
        *,
        peer: str = "",
        handler: str = "",
        column: str = "",
        wanted: str = "",
        got: str = "",
    ) -> None:
        super().__init__(message, peer=peer, handler=handler)
        self.column = column
        self.wanted = wanted
        self.got = got


class HandlerFailed(CallError):
    """The handler raised. ``kind`` is the name of its exception's type, ``detail`` the text.

    Both are as the service sent them. ``remote_traceback`` has lines, which are escaped each.
    """

    status = "handler-failed"

    def __init__(
        self,
        message: str,
        *,
        peer: str = "",
        handler: str = "",
        kind: str = "",
        detail: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message, peer=peer, handler=handler)
        self.kind = kind
        self.detail = detail
        self.remote_traceback = remote_traceback


class Busy(CallError):
    """The service is at its limit of calls or memory; try again later or elsewhere.

    It is also raised for a batch that came too slowly while others waited for its room. The text
    names the setting.
    """

    status = "busy"


class Refused(CallError):
    """The service refused the call: a token it does not accept, or it is ``draining``.

    A service that drains takes no new calls; another one, or the same after its restart, may. A
    call is ``untouched`` if no handler was given anything of it.
    """

    status = "refused"

    def __init__(
        self,
        message: str,
        *,
        peer: str = "",
        handler: str = "",
        draining: bool = False,
        untouched: bool = False,
    ) -> None:
        super().__init__(message, peer=peer, handler=handler)
        self.draining = draining
        self.untouched = untouched


class BatchTooLarge(CallError):
    """A record batch above ``Calls.batch_limit``."""

    status = "batch-too-large"


class BadCall(CallError):
    """The call, or a batch of it, did not follow the Arrow call convention."""

    status = "bad-call"


class DeadlineExceeded(CallError, TimeoutError):
    """The call made no progress, or did not end, in time."""

    status = "deadline-exceeded"
