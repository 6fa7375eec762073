"""TLS 1.3 over a byte stream: contexts, the handshake without waiting, and what went wrong in it.

The library works on memory, so that ciphertext is read and written in large pieces: one call of
the kernel for many records.
"""

from __future__ import annotations

import os
import socket
import ssl
import tempfile
from collections.abc import Sequence
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from aqueduct.carriers.contract import Buffer, PeerIdentity
from aqueduct.carriers.stream.sockets import scratch
from aqueduct.carriers.tls import (
    ClientTls,
    ServerTls,
    certificates_of,
    chain_of,
    identity_of,
)
from aqueduct.errors import ConfigError

__all__ = [
    "ALPN",
    "REFUSAL",
    "Tls",
    "client_context",
    "explain",
    "server_context",
    "speaks_tls",
    "spoken",
]

ALPN: Final = "aqueduct-bpmux"
_RECORD: Final = 16_384
_SEALED: Final = 64 << 10  # bytes encrypted before they are taken from the library
_HANDSHAKE: Final = 22  # record types of TLS
_ALERT: Final = 21
_NOT_YET: Final = 9  # reasons of OpenSSL, X509_V_ERR_
_EXPIRED: Final = 10
_OTHER_NAME: Final = 62
_OTHER_IP: Final = 64
REFUSAL: Final = bytes((_ALERT, 3, 3, 0, 2, 2, 70))
"""A fatal alert, protocol_version: what a server says in TLS to who does not speak it."""


def client_context(tls: ClientTls) -> ssl.SSLContext:
    """What a client demands and shows. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.fingerprint is not None or not tls.verify:
        # A pinned certificate is compared after the handshake; its issuer does not matter.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif tls.ca is None:
        context.load_default_certs()
    else:
        _trust(context, certificates_of(tls.ca, "ca"))
    if tls.certificate is not None:
        _show(context, tls)
    return _finish(context)


def server_context(tls: ServerTls) -> ssl.SSLContext:
    """What a server shows and demands. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _show(context, tls)
    if tls.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, certificates_of(tls.client_ca, "client_ca"))
    return _finish(context)


def _finish(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    return context


def _trust(context: ssl.SSLContext, authorities: list[x509.Certificate]) -> None:
    context.load_verify_locations(
        cadata=b"".join(one.public_bytes(serialization.Encoding.DER) for one in authorities)
    )
    # A certificate given as an authority is trusted, be it one for a server that signed itself.
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN


def _show(context: ssl.SSLContext, tls: ServerTls | ClientTls) -> None:
    """Loads a certificate with its key, which the ssl module takes from a file alone."""
    chain, key = chain_of(tls)
    # The key lies in that file encrypted, with a password that nobody else has.
    password = os.urandom(32).hex().encode()
    encryption = serialization.BestAvailableEncryption(password)
    pem = [one.public_bytes(serialization.Encoding.PEM) for one in chain]
    pem.append(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(pem))
        file.flush()
        try:
            context.load_cert_chain(file.name, password=password)
        except ssl.SSLError as error:
            raise ConfigError(f"the certificate or its key is of no use: {error}") from error


class Tls:
    """One end of TLS on a non-blocking socket; it reads there and says what to write."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None, *, server: bool
    ) -> None:
        self._sock = sock
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server, server_hostname=server_name
        )
        self._buffer = scratch("sealed")
        self.first = b""
        """The first bytes that the peer sent."""
        self.complete = False

    def handshake(self) -> bytes:
        """Goes on with the handshake; returns what to send. ``complete`` says if it is over.

        Raises ssl.SSLError, and OSError of the socket; before that, ``pending`` may have an alert.
        """
        while not self.complete:
            try:
                self._object.do_handshake()
                self.complete = True
            except ssl.SSLWantReadError:
                if not self._fill():
                    break
        return self._outgoing.read()

    def pending(self) -> bytes:
        """What the library wants to say at last: an alert."""
        return self._outgoing.read()

    @property
    def protocol(self) -> str | None:
        """The protocol that both sides want."""
        return self._object.selected_alpn_protocol()

    @property
    def identity(self) -> PeerIdentity | None:
        """Who the peer's certificate says it is."""
        der = self._object.getpeercert(binary_form=True)
        return None if der is None else identity_of(x509.load_der_x509_certificate(der))

    @property
    def cipher(self) -> str:
        """The cipher in use."""
        found = self._object.cipher()
        return "" if found is None else found[0]

    def recv_into(self, target: memoryview) -> int:
        """Decrypts into ``target``; 0: the end. Raises BlockingIOError, ssl.SSLError, OSError.

        Fewer bytes than ``target`` has room for, and not none: there are no more now.
        """
        read: Any = self._object.read  # with a buffer it returns a number
        size = len(target)
        got = 0
        while got < size:
            try:
                count = read(size - got, target[got:])
            except ssl.SSLWantReadError:
                if self._fill():
                    continue
                if got:
                    break
                raise BlockingIOError from None
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                break  # without a close of TLS, too: the protocol above has a close of its own
            if not count:
                break
            got += count
        return got

    def seal(self, buffers: Sequence[Buffer]) -> list[bytes]:
        """Encrypts; returns all of it, for the socket. Raises ssl.SSLError."""
        write = self._object.write
        sealed: list[bytes] = []
        waiting = 0
        for buffer in buffers:
            view = buffer if len(buffer) <= _RECORD else memoryview(buffer)
            at, size = 0, len(buffer)
            while at < size:
                count = write(view[at : at + _RECORD] if size > _RECORD else view)
                at += count
                waiting += count
                if waiting >= _SEALED:  # while it is in the processor's cache
                    sealed.append(self._outgoing.read())
                    waiting = 0
        if waiting:
            sealed.append(self._outgoing.read())
        return sealed

    def farewell(self) -> bytes:
        """The close of TLS, for the socket."""
        try:
            self._object.unwrap()
        except (ssl.SSLError, OSError):
            pass  # the peer's answer is not waited for
        return self._outgoing.read()

    def _fill(self) -> bool:
        """Reads ciphertext; False: there is none now."""
        try:
            count = self._sock.recv_into(self._buffer)
        except BlockingIOError:
            return False
        if count:
            if len(self.first) < 8:
                self.first += bytes(self._buffer[:8])[:count]
            self._incoming.write(self._buffer[:count])
        else:
            self._incoming.write_eof()
        return True


def speaks_tls(data: bytes) -> bool:
    """Whether these first bytes of a peer are TLS: a handshake or an alert."""
    return len(data) >= 2 and data[0] in (_HANDSHAKE, _ALERT) and data[1] == 3


def explain(error: ssl.SSLError, first: bytes, server_name: str, *, server: bool) -> str:
    """What a failed handshake means, and what to do about it."""
    who = "the client" if server else "the server"
    if first and not speaks_tls(first):
        plain = "aqueduct+tcp://" if not server else "aqueduct+tls:// there"
        return f"{who} does not speak TLS ({spoken(first)}); use {plain}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return _unverified(error, server_name, server=server)
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "certificate required" in reason or "did not return a certificate" in reason:
        if server:
            return "the client shows no certificate, which ServerTls.client_ca demands"
        return "the server demands a certificate: give one in ClientTls.certificate"
    if "alert" in reason:
        return f"{who} ended the handshake: {reason.replace('tlsv1 ', '').replace('tlsv13 ', '')}"
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


def _unverified(error: ssl.SSLCertVerificationError, server_name: str, *, server: bool) -> str:
    text = error.verify_message
    whose = "client" if server else "server"
    if error.verify_code in (_EXPIRED, _NOT_YET):
        return f"the {whose}'s certificate: {text}; renew it, or correct this machine's clock"
    if error.verify_code in (_OTHER_NAME, _OTHER_IP):
        return (
            f"the server's certificate is for another name than {server_name!r} ({text}); connect "
            "by the name it carries, or give that name with ?server_name="
        )
    if server:
        return f"the client's certificate is not of a CA in ServerTls.client_ca ({text})"
    return (
        f"the issuer of the server's certificate is not trusted here ({text}); pass its CA with "
        "?ca=FILE, or pin the certificate with ?fingerprint=sha256:..."
    )
