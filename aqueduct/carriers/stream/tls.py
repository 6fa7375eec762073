"""TLS 1.3 over a byte stream: contexts, the handshake without waiting, and what went wrong in it.

The library is the OpenSSL of ``cryptography``: newer than what most Pythons have, and much faster
with AES. It works on memory: one call of the kernel is for many records.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from cryptography.hazmat.bindings._rust import _openssl
from OpenSSL import SSL, crypto

from aqueduct._speedups.io.tls_records import Records, use
from aqueduct.carriers.certificates import (
    ClientTls,
    ServerTls,
    certificates_of,
    chain_of,
    identity_of,
)
from aqueduct.carriers.contract import Buffer, PeerIdentity
from aqueduct.carriers.stream.sockets import scratch
from aqueduct.carriers.verify import Flaw, Trust, ascii_name
from aqueduct.errors import ConfigError

__all__ = [
    "ALPN",
    "REFUSAL",
    "Context",
    "Tls",
    "TlsError",
    "client_context",
    "explain",
    "server_context",
    "speaks_tls",
    "spoken",
]

Context = SSL.Context

ALPN: Final = "aqueduct-bpmux"
# AES-128 first: it is the fastest where the processor has AES instructions.
_SUITES: Final = b"TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"
_PIECE: Final = 64 << 10
_HANDSHAKE: Final = 22  # record types of TLS
_ALERT: Final = 21
REFUSAL: Final = bytes((_ALERT, 3, 3, 0, 2, 2, 70))
"""A fatal alert, protocol_version: what a server says in TLS to who does not speak it."""

_lib: Final[Any] = _openssl.lib
_ffi: Final[Any] = _openssl.ffi


def _address(pointer: Any) -> int:
    return int(_ffi.cast("uintptr_t", pointer))


# The same functions that the library's own Python face calls.
use(
    *(
        _address(_ffi.addressof(_lib, name))
        for name in (
            "SSL_read",
            "SSL_write",
            "SSL_get_error",
            "BIO_read",
            "BIO_write",
            "BIO_get_mem_data",
        )
    )
)


class TlsError(OSError):
    """TLS failed: ``reason`` in the library's words; ``flaw``: of the peer's certificate."""

    def __init__(self, reason: str, flaw: Flaw | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.flaw = flaw


@dataclass(slots=True)
class _Verdict:
    """On the certificate of one peer."""

    flaw: Flaw | None = None


def client_context(tls: ClientTls, name: str = "") -> Context:
    """What a client demands and shows; ``name`` is what the server must be called, if it is known.

    Raises ConfigError.
    """
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    # A pinned certificate is compared after the handshake; its issuer does not matter.
    if tls.fingerprint is None and tls.verify:
        context.set_verify(SSL.VERIFY_PEER, _verified)
        authorities = None if tls.ca is None else certificates_of(tls.ca, "ca")
        Trust(authorities, "server", name).fill(context)
    if tls.certificate is not None:
        _show(context, tls)
    context.set_alpn_protos([ALPN.encode()])
    return _finish(context)


def server_context(tls: ServerTls) -> Context:
    """What a server shows and demands. Raises ConfigError."""
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    _show(context, tls)
    if tls.client_ca is not None:
        context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _verified)
        Trust(certificates_of(tls.client_ca, "client_ca"), "client").fill(context)
    context.set_alpn_select_callback(_select)
    # A client may resume a session even if it showed a certificate in it.
    context.set_session_id(ALPN.encode())
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    return _finish(context)


def _finish(context: Context) -> Context:
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_tls13_ciphersuites(_SUITES)
    return context


def _select(connection: SSL.Connection, offered: list[bytes]) -> Any:
    return ALPN.encode() if ALPN.encode() in offered else SSL.NO_OVERLAPPING_PROTOCOLS


def _show(context: Context, tls: ServerTls | ClientTls) -> None:
    """Loads a certificate with its key."""
    chain, key = chain_of(tls)
    try:
        context.use_certificate(chain[0])
        for one in chain[1:]:
            context.add_extra_chain_cert(one)
        context.use_privatekey(key)
    except (SSL.Error, TypeError) as error:
        raise ConfigError(f"the certificate or its key is of no use: {error}") from error


def _verified(
    connection: SSL.Connection, certificate: crypto.X509, code: int, depth: int, good: int
) -> bool:
    """Whether the handshake may go on with this certificate of the chain."""
    if not good:
        verdict: _Verdict = connection.get_app_data()
        verdict.flaw = Flaw.of(code, depth, certificate)
    return bool(good)


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Tls:
    """One end of TLS on a non-blocking socket; it reads there and says what to write."""

    def __init__(
        self, sock: socket.socket, context: Context, server_name: str | None, *, server: bool
    ) -> None:
        self._sock = sock
        self._buffer = scratch("sealed")
        self.first = b""
        """The first bytes that the peer sent."""
        self.complete = False
        connection = self._connection = SSL.Connection(context)
        if not server and server_name and not _is_ip(server_name):
            connection.set_tlsext_host_name(ascii_name(server_name).encode())
        self._verdict = _Verdict()
        connection.set_app_data(self._verdict)
        if server:
            connection.set_accept_state()
        else:
            connection.set_connect_state()
        # The library has no public way to its structures, and none to its records without copies.
        parts: Any = connection
        self.records = Records(
            connection,
            _address(parts._ssl),
            _address(parts._into_ssl),
            _address(parts._from_ssl),
            sock.fileno(),
            _failure,
            self._buffer,
        )
        """What passes once the handshake is over."""
        self.recv_into = self.records.recv_into
        """Decrypts into a buffer; 0: the end. Raises BlockingIOError, TlsError, OSError.

        Fewer bytes than the buffer has room for, and not none: there are no more now.
        """

    def handshake(self) -> bytes:
        """Goes on with the handshake; returns what to send. ``complete`` says if it is over.

        Raises TlsError, and OSError of the socket; before that, ``pending`` may have an alert.
        """
        while not self.complete:
            try:
                self._connection.do_handshake()
                self.complete = True
            except SSL.WantReadError:
                if not self._fill():
                    break
            except (SSL.SysCallError, SSL.ZeroReturnError):
                raise TlsError("unexpected eof") from None
            except SSL.Error as error:
                raise TlsError(_reason(error), self._verdict.flaw) from None
        return self.pending()

    def pending(self) -> bytes:
        """What the library wants to say: parts of the handshake, an alert."""
        pieces = []
        try:
            while True:
                pieces.append(self._connection.bio_read(_PIECE))
        except SSL.WantReadError:
            return b"".join(pieces)

    @property
    def protocol(self) -> str | None:
        """The protocol that both sides want."""
        return self._connection.get_alpn_proto_negotiated().decode() or None

    @property
    def identity(self) -> PeerIdentity | None:
        """Who the peer's certificate says it is."""
        found = self._connection.get_peer_certificate(as_cryptography=True)
        return None if found is None else identity_of(found)

    @property
    def cipher(self) -> str:
        """The cipher in use."""
        return self._connection.get_cipher_name() or ""

    def seal(self, buffers: Sequence[Buffer]) -> list[bytes]:
        """Encrypts; returns all of it, for the socket. Raises TlsError."""
        return self.records.seal(buffers)

    def farewell(self) -> bytes:
        """The close of TLS, for the socket."""
        try:
            self._connection.shutdown()
        except SSL.Error:
            pass  # the peer's answer is not waited for
        return self.pending()

    def _fill(self) -> bool:
        """Reads ciphertext of the handshake; False: there is none now."""
        try:
            count = self._sock.recv_into(self._buffer)
        except BlockingIOError:
            return False
        if count:
            if len(self.first) < 8:
                self.first += bytes(self._buffer[:8])[:count]
            self._connection.bio_write(self._buffer[:count])
        else:
            self._connection.bio_shutdown()
        return True


def _reason(error: SSL.Error) -> str:
    """The first of what the library says: the rest is what followed from it."""
    said = error.args[0] if error.args else None
    return str(said[0][2]) if isinstance(said, list) and said else str(error)


def _failure() -> TlsError:
    """What the library says of an error, the first of it."""
    reason = ""
    while code := _lib.ERR_get_error():
        text = _lib.ERR_reason_error_string(code)
        if text and not reason:
            reason = _ffi.string(text).decode()
    return TlsError(reason or "no reason given")


def speaks_tls(data: bytes) -> bool:
    """Whether these first bytes of a peer are TLS: a handshake or an alert."""
    return len(data) >= 2 and data[0] in (_HANDSHAKE, _ALERT) and data[1] == 3


def explain(error: TlsError, first: bytes, server_name: str, *, server: bool) -> str:
    """What a failed handshake means, and what to do about it."""
    who = "the client" if server else "the server"
    if first and not speaks_tls(first):
        plain = "aqueduct+tcp://" if not server else "aqueduct+tls:// there"
        return f"{who} does not speak TLS ({spoken(first)}); use {plain}"
    if error.flaw is not None:
        return error.flaw.explain("client" if server else "server", server_name)
    reason = error.reason.lower()
    if "certificate required" in reason or "did not return a certificate" in reason:
        if server:
            return "the client shows no certificate, which ServerTls.client_ca demands"
        return "the server demands a certificate: give one in ClientTls.certificate"
    if "alert" in reason:
        return f"{who} ended the handshake: {reason[reason.index('alert') :]}"
    if "eof" in reason:
        return f"{who} closed the connection in the handshake"
    return f"the handshake failed: {reason}"


def spoken(first: bytes) -> str:
    """What a peer speaks, by its first bytes."""
    if speaks_tls(first):
        return "it speaks TLS"
    if first.startswith((b"GET ", b"PUT ", b"POST", b"HEAD", b"HTTP/", b"PRI * ", b"OPTIONS ")):
        return "it speaks HTTP"
    if first.startswith(b"SSH-"):
        return "it speaks SSH"
    if first[:2] == bytes((0xA8, 0)):
        return "it speaks Aqueduct without TLS"
    return f"its first bytes are {first[:8]!r}"
