"""One connection of ReactiveSocket over a WebSocket: each frame is one binary message."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from aqueduct.address import Address
from aqueduct.carriers.binding import host_port
from aqueduct.carriers.foreign import Missing, require, warn_once
from aqueduct.carriers.transports.byte_transport import ByteTransport
from aqueduct.config import Config
from aqueduct.errors import (
    AqueductError,
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    FrameError,
    LimitExceeded,
    RemoteProtocolError,
)
from aqueduct.escaping import escape
from aqueduct.protocol.reactivesocket.cost import HEADER_BYTES
from aqueduct.reactivesocket.transport import FrameUser

if TYPE_CHECKING:
    from websockets.client import ClientProtocol
    from websockets.server import ServerProtocol

__all__ = ["WebTransport", "require_websockets"]

_REASON: Final = 120  # bytes of the reason of a close; 123 are possible
_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\n\r\n"
_TOO_EARLY: Final = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"
_NORMAL, _VIOLATION, _TOO_BIG = 1000, 1002, 1009


def require_websockets(address: Address) -> None:
    """Raises ConfigError where the library for WebSockets is not installed."""
    try:
        import websockets  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{address}: WebSockets need the package websockets: "
            "pip install 'aqueduct-arrow[websocket]'"
        ) from error


@cache
def _require_one_frame(method: Any) -> None:
    """Raises Missing if ``recv_frame`` takes something else than a frame."""
    taken = list(inspect.signature(method).parameters)
    if taken != ["self", "frame"]:
        raise Missing(f"{method.__qualname__} takes {', '.join(taken[1:]) or 'nothing'}")


class WebTransport(ByteTransport):
    """A WebSocket, on either side. The library ``websockets`` knows its protocol.

    Pings leave while nothing comes, each ``ReactiveSocket.ping`` seconds. A peer that stays silent
    for three times as long is gone.
    """

    def __init__(
        self,
        config: Config,
        user: FrameUser,
        address: Address,
        peer: str = "",
        *,
        client: bool,
        origins: Sequence[str] = (),
        origin: str | None = None,
        setup_required: bool = True,
    ) -> None:
        """``origins`` may connect to a server; ``origin`` is what a client says of itself.

        ``setup_required``: the first message to a server is a SETUP.
        """
        from websockets.client import ClientProtocol
        from websockets.server import ServerProtocol
        from websockets.uri import parse_uri

        super().__init__(config, "reactivesocket", peer)
        self._user = user
        self._address = address
        self._settings = config.reactivesocket
        self._open = False
        self._shaken = 0
        """Bytes of the peer's handshake."""
        self._parts: bytearray | None = None
        """A message of which fragments have come; None: there is none."""
        self._pinging: asyncio.TimerHandle | None = None
        self._pinged_at = 0.0
        """When the last ping left."""
        self._server: ServerProtocol | None = None
        self._client: ClientProtocol | None = None
        self._ws: Any
        most = self._settings.frame_bytes
        self._stranger = setup_required and not client
        """Whether no message has come: until its SETUP a peer gets no memory for more."""
        if client:
            kind = "wss" if address.certified else "ws"
            where = host_port((address.host, address.port))
            uri = parse_uri(f"{kind}://{where}{address.path}")
            self._ws = self._client = ClientProtocol(
                uri,
                origin=origin,  # type: ignore[arg-type]
                max_size=most,
            )
        else:
            allowed: list[Any] = [None, *origins]
            self._ws = self._server = ServerProtocol(origins=allowed, max_size=most)
        if self._stranger:
            self._limit_first()

    # ByteTransport

    @property
    def free(self) -> bool:
        """Whether messages can leave at once."""
        return self._open and super().free

    @property
    def coming(self) -> int:
        """Bytes that came of a message, or a handshake, that is not whole."""
        if not self._open:
            return self._shaken
        return len(self._ws.reader.buffer) + len(self._parts or b"")

    def made(self) -> None:
        """The connection is there: a client asks for the WebSocket."""
        try:
            self._user.made()
        except AqueductError as error:
            self.abort()
            self._user.gone(error)
            return
        if self._client is not None:
            self._client.send_request(self._client.connect())
            self._say()

    def received(self, data: bytes, now: float) -> None:
        """The next bytes."""
        ws = self._ws
        if not self._open:
            self._shaken += len(data)
            if self._shaken > self._settings.setup_bytes:
                if self._server is not None:
                    self.write(_TOO_LARGE)
                most = self._settings.setup_bytes
                text = f"the handshake of the WebSocket is above {most} bytes"
                self._refused(ValueError(f"{text} (ReactiveSocket.setup_bytes)"))
                return
        ws.receive_data(data)
        found = ws.events_received()
        if self._server is not None and not self._open and (len(found) > 1 or ws.parser_exc):
            ws.data_to_send()  # answers to what is too early
            self.write(_TOO_EARLY)
            text = "it sent frames before its WebSocket was accepted (RFC 6455, section 4.1)"
            self._refused(ValueError(text))
            return
        self._say()
        for event in found:
            if self._open:
                self._take_frame(event, now)
            else:
                self._shake(event)
        if not self._open:
            if ws.handshake_exc is not None:
                self._refused(ws.handshake_exc)
            elif self._server is not None:
                self._user.came()
            return
        if ws.parser_exc is not None:
            self._user.core.refuse(self._error_of(ws.parser_exc))
        self._user.came()

    def take(self, limit: int) -> tuple[Iterable[Any], int]:
        """The messages that are to leave next."""
        ws, found, size = self._ws, [], 0
        while self._open and ws.close_sent is None and size < limit:
            message = self._user.core.take_message()
            if message is None:
                break
            buffers, _ = message
            ws.send_binary(buffers[0] if len(buffers) == 1 else b"".join(buffers))
            for each in ws.data_to_send():
                found.append(each)
                size += len(each)
        return found, size

    def drained(self) -> None:
        """The kernel takes bytes again."""
        self._user.drained()

    def hold(self, held: bool) -> None:
        """Reads nothing while ``held``. That is no silence of the peer."""
        if self.held and not held:
            self.heard_at = self._loop.time()
        super().hold(held)

    def farewell(self) -> bytes:
        """The close of the WebSocket."""
        ws = self._ws
        if not self._open or ws.close_sent is not None or ws.close_rcvd is not None:
            return b""
        error = self._user.core.error
        code = _NORMAL
        if error is not None:
            code = _TOO_BIG if isinstance(error, LimitExceeded) else _VIOLATION
        reason = escape(str(error or "")).encode()[:_REASON].decode(errors="ignore")
        ws.send_close(code, reason)
        return b"".join(ws.data_to_send())

    def lost(self, error: Exception | None) -> None:
        """The connection is over."""
        if self._pinging is not None:
            self._pinging.cancel()
        if not self._open and error is None and self._client is not None:
            self._ws.receive_eof()  # a response may end with the connection
            refusal = self._ws.handshake_exc
            if getattr(refusal, "response", None) is not None:
                self._refused(refusal)
            text = "the server closed the connection in the handshake of the WebSocket"
            if self._address.certified and self.heard_at is None:
                text += "; it has said nothing within TLS: perhaps it demands another certificate"
            error = ConnectFailed(f"{self._address}: {text}", reason=text)
        self._user.gone(error)

    def abort(self) -> None:
        """Ends it now."""
        if self._pinging is not None:
            self._pinging.cancel()
        super().abort()

    # Within

    def _say(self) -> None:
        """Sends what the library has to say: of the handshake, pongs, a close.

        Of pongs for which there is no room the last one alone leaves (RFC 6455, section 5.5.3).
        """
        data = b"".join(self._ws.data_to_send())
        if not data:
            return
        if not self._open or self._ws.close_sent is not None:
            self.write(data)
        else:
            self.answer(data)

    def _shake(self, event: Any) -> None:
        """The request of a client, or the response of a server."""
        server = self._server
        if server is not None:
            if event.path.partition("?")[0] == self._address.path:
                response = server.accept(event)
            else:
                text = f"nothing is served at {escape(event.path)} here\n"
                response = server.reject(404, text)
            server.send_response(response)
            self._say()
            if response.status_code != 101:
                self._refused(server.handshake_exc or ValueError(response.reason_phrase))
                return
        elif self._ws.handshake_exc is not None:
            return
        self.stepped_at = self.heard_at
        self._open = True
        self._ping()
        self._user.opened()

    def _refused(self, error: Exception) -> None:
        """The handshake has failed."""
        why = str(error)
        if self._client is not None:
            response = getattr(error, "response", None)
            if response is not None:
                body = bytes(response.body or b"")[:200].decode(errors="replace").strip()
                why = f"the server answers HTTP {response.status_code}"
                if body:
                    why += f": {escape(body)}"
            failure: ConnectionLost = ConnectFailed(f"{self._address}: {why}", reason=why)
        else:
            failure = ConnectionLost(f"{self.peer} gets no WebSocket: {why}", reason=why)
        self._user.fail(failure)

    def _limit_first(self) -> None:
        """Until the first message is there, the library takes no larger one than a SETUP."""
        ws = self._ws
        try:
            require(ws, "recv_frame", "max_message_size")
            _require_one_frame(type(ws).recv_frame)
        except Missing as error:
            warn_once(
                error,
                "a first message above ReactiveSocket.setup_bytes is refused once it is there, "
                "and not before",
            )
            return
        ws.max_message_size = self._settings.setup_bytes + HEADER_BYTES
        ws.recv_frame = self._take_first

    def _take_first(self, frame: Any) -> None:
        """The library has a frame. What is behind the first message may be larger.

        It may stand in the same bytes, so the library has to know at once.
        """
        from websockets.frames import DATA_OPCODES

        ws = self._ws
        type(ws).recv_frame(ws, frame)
        if frame.fin and frame.opcode in DATA_OPCODES:
            self._stranger = False
            ws.max_message_size = self._settings.frame_bytes
            del ws.recv_frame

    def _take_frame(self, frame: Any, now: float) -> None:
        from websockets.frames import Opcode

        core = self._user.core
        if self._stranger and not self._is_first(frame):
            return
        if frame.opcode is Opcode.BINARY:
            if frame.fin:
                core.receive_data(frame.data, now)
            else:
                self._parts = bytearray(frame.data)
        elif frame.opcode is Opcode.CONT and self._parts is not None:
            self._parts += frame.data
            if frame.fin:
                whole, self._parts = bytes(self._parts), None
                core.receive_data(whole, now)
        elif frame.opcode is Opcode.TEXT:
            core.refuse(FrameError("a text message: frames of ReactiveSocket are binary messages"))
        elif frame.opcode is Opcode.CLOSE:
            close = self._ws.close_rcvd
            if close is not None and close.reason:
                self.said = escape(close.reason)
            core.receive_eof()

    def _is_first(self, frame: Any) -> bool:
        """Whether the first message may go on by this frame, where the library did not look."""
        from websockets.frames import DATA_OPCODES

        if frame.opcode in DATA_OPCODES:
            size, most = (
                len(self._parts or b"") + len(frame.data),
                self._settings.setup_bytes + HEADER_BYTES,
            )
            if size > most:
                text = f"a message is too large: over the limit of {most} bytes"
                self._user.core.refuse(LimitExceeded(f"{text} (ReactiveSocket.setup_bytes)"))
                return False
            if frame.fin:
                self._stranger = False
                self._ws.max_message_size = self._settings.frame_bytes
        return True

    def _error_of(self, error: Exception) -> RemoteProtocolError:
        """What the library did not take."""
        from websockets.exceptions import PayloadTooBig

        if isinstance(error, PayloadTooBig):
            name = "setup_bytes" if self._stranger else "frame_bytes"
            return LimitExceeded(f"a message is too large: {error} (ReactiveSocket.{name})")
        return FrameError(f"the WebSocket is broken: {error}")

    def _ping(self) -> None:
        """Pings a peer that says nothing, and gives it up after a while."""
        now, every = self._loop.time(), self._settings.ping
        heard = now if self.held or self.heard_at is None else self.heard_at
        if now - heard >= 3 * every and self._pinged_at > heard:
            text = f"{self.peer} was silent for {3 * every:g} s, and answers no pings"
            self._user.fail(ConnectionLost(f"{text} (ReactiveSocket.ping)", reason="silence"))
            self.cut()
            return
        if now - heard >= every and self.free and self._ws.close_sent is None:
            self._ws.send_ping(b"")
            self._say()
            self._pinged_at = now
        self._pinging = self._loop.call_later(every, self._ping)
