"""TLS and the check of certificates by the OpenSSL that ``cryptography`` has in it.

It is newer than what most Pythons have, and much faster with AES. It works on memory: one call of
the kernel is for many records. Over TLS, OpenSSL verifies within the handshake. Over QUIC, aioquic
hands over the chain. ``Trust`` fills the store for both: CAs, purpose and name.

The import raises ``foreign.Missing`` where a private name is gone; ``tls_stdlib`` is used then.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from cryptography import x509
from OpenSSL import SSL, crypto

from aqueduct._speedups.io.tls_records import OpenSslRecords, use
from aqueduct.carriers.certificates import (
    ClientTls,
    ServerTls,
    certificates_of,
    chain_of,
)
from aqueduct.carriers.contract import Buffer, PeerIdentity
from aqueduct.carriers.foreign import Missing, require
from aqueduct.carriers.key_log import key_log_file, write_key
from aqueduct.carriers.verify import (
    Flaw,
    TlsError,
    Whose,
    ascii_name,
    identity_read,
    ip_of,
    weakness,
)
from aqueduct.errors import ConfigError

try:
    from cryptography.hazmat.bindings._rust import _openssl
except ImportError as gone:
    raise Missing(str(gone)) from gone

__all__ = ["Context", "Tls", "Trust", "client_context", "server_context"]

Context = SSL.Context

# AES-128 first: it is the fastest where the processor has AES instructions.
_SUITES: Final = b"TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"
_PIECE: Final = 64 << 10

_lib: Final[Any] = _openssl.lib
_ffi: Final[Any] = _openssl.ffi

_RECORDS: Final = (
    "SSL_read",
    "SSL_write",
    "SSL_get_error",
    "BIO_read",
    "BIO_write",
    "BIO_get_mem_data",
)
require(
    _lib,
    *_RECORDS,
    "ERR_get_error",
    "ERR_reason_error_string",
    "X509_CHECK_FLAG_NEVER_CHECK_SUBJECT",
    "X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS",
    "X509_PURPOSE_SSL_CLIENT",
    "X509_PURPOSE_SSL_SERVER",
    "X509_STORE_set1_param",
    "X509_STORE_set_purpose",
    "X509_VERIFY_PARAM_free",
    "X509_VERIFY_PARAM_new",
    "X509_VERIFY_PARAM_set1_host",
    "X509_VERIFY_PARAM_set1_ip",
    "X509_VERIFY_PARAM_set_hostflags",
    "X509_verify_cert_error_string",
)
require(SSL.Connection(SSL.Context(SSL.TLS_CLIENT_METHOD)), "_ssl", "_into_ssl", "_from_ssl")
require(crypto.X509Store(), "_store")


def _address(pointer: Any) -> int:
    return int(_ffi.cast("uintptr_t", pointer))


# The same functions that the library's own Python face calls.
use(*(_address(_ffi.addressof(_lib, name)) for name in _RECORDS))


def _flaw_of(code: int, depth: int, certificate: crypto.X509 | None) -> Flaw:
    """The flaw that OpenSSL names."""
    found: x509.Certificate | None = None
    if certificate is not None:
        try:
            found = certificate.to_cryptography()
        except ValueError:
            pass  # OpenSSL reads some that are against the standard
    reason: str = _ffi.string(_lib.X509_verify_cert_error_string(code)).decode()
    return Flaw(code, depth, found, reason)


class Trust:
    """What one side demands of the other's certificate.

    ``authorities`` are trusted; None: those that Python trusts. ``whose`` certificate it is decides
    what it must be good for. ``name`` is the DNS name or IP address that it must carry, as
    ``ascii_name`` gives it; empty: any.
    """

    def __init__(
        self, authorities: Sequence[x509.Certificate] | None, whose: Whose, name: str = ""
    ) -> None:
        self._authorities = authorities
        self._whose: Whose = whose
        self._name = name

    def fill(self, context: SSL.Context) -> None:
        """Lets a TLS context verify by this. Raises ConfigError for an authority of no use."""
        store = context.get_cert_store()
        assert store is not None
        self._fill(store)

    def verify(self, chain: Sequence[x509.Certificate]) -> Flaw | None:
        """What is wrong with the first certificate; the others are what the peer showed with it.

        Raises ConfigError for an authority of no use.
        """
        store = crypto.X509Store()
        self._fill(store)
        leaf, *others = map(crypto.X509.from_cryptography, chain)
        try:
            found = crypto.X509StoreContext(store, leaf, others).get_verified_chain()
        except crypto.X509StoreContextError as error:
            code, depth, _ = error.errors
            return _flaw_of(code, depth, error.certificate)
        return weakness([one.to_cryptography() for one in found])

    def _fill(self, store: crypto.X509Store) -> None:
        try:
            if self._authorities is None:
                _trust_public(store)
            else:
                for one in self._authorities:
                    store.add_cert(crypto.X509.from_cryptography(one))
        except crypto.Error as error:
            raise ConfigError(f"an authority's certificate cannot be used: {error}") from error
        # A certificate given as an authority is trusted, be it one for a server that signed itself.
        store.set_flags(crypto.X509StoreFlags.PARTIAL_CHAIN)
        # The library has no public way to say what for, and by which name.
        parts: Any = store
        server = self._whose == "server"
        purpose = _lib.X509_PURPOSE_SSL_SERVER if server else _lib.X509_PURPOSE_SSL_CLIENT
        done = _lib.X509_STORE_set_purpose(parts._store, purpose) == 1
        if done and self._name:
            done = self._demand_name(parts._store)
        if not done:
            raise ConfigError(f"{self._name!r} is no name of a host to OpenSSL")

    def _demand_name(self, store: Any) -> bool:
        demanded = _ffi.gc(_lib.X509_VERIFY_PARAM_new(), _lib.X509_VERIFY_PARAM_free)
        ip = ip_of(self._name)
        if ip is not None:
            done = _lib.X509_VERIFY_PARAM_set1_ip(demanded, ip.packed, len(ip.packed))
        else:
            flags = _lib.X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS
            flags |= _lib.X509_CHECK_FLAG_NEVER_CHECK_SUBJECT
            _lib.X509_VERIFY_PARAM_set_hostflags(demanded, flags)
            name = self._name.encode()
            done = _lib.X509_VERIFY_PARAM_set1_host(demanded, name, len(name))
        return bool(done == 1 and _lib.X509_STORE_set1_param(store, demanded) == 1)


def _trust_public(store: crypto.X509Store) -> None:
    """The CAs that Python itself trusts: the library's own idea is where it was built."""
    paths = ssl.get_default_verify_paths()
    if paths.cafile is not None or paths.capath is not None:
        store.load_locations(paths.cafile, paths.capath)


@dataclass(slots=True)
class _Verdict:
    """On the certificate of one peer."""

    flaw: Flaw | None = None


def client_context(tls: ClientTls, name: str, *protocols: str) -> Context:
    """What a client demands and shows, and the ``protocols`` that it speaks within.

    ``name`` is what the server must be called; empty: anything. Raises ConfigError.
    """
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    # A pinned certificate is compared after the handshake; its issuer does not matter.
    if tls.fingerprint is None and tls.verify:
        context.set_verify(SSL.VERIFY_PEER, _verified)
        authorities = None if tls.ca is None else certificates_of(tls.ca, "ca")
        Trust(authorities, "server", name).fill(context)
    if tls.certificate is not None:
        _show(context, tls)
    context.set_alpn_protos([protocol.encode() for protocol in protocols])
    return _finish(context)


def server_context(tls: ServerTls, *protocols: str) -> Context:
    """What a server shows and demands, and what it speaks within, the best first.

    Raises ConfigError.
    """
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    _show(context, tls)
    if tls.client_ca is not None:
        context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, _verified)
        Trust(certificates_of(tls.client_ca, "client_ca"), "client").fill(context)
    wanted = [protocol.encode() for protocol in protocols]

    def select(connection: SSL.Connection, offered: list[bytes]) -> Any:
        common = (protocol for protocol in wanted if protocol in offered)
        return next(common, SSL.NO_OVERLAPPING_PROTOCOLS)

    context.set_alpn_select_callback(select)
    # A client may resume a session even if it showed a certificate in it.
    context.set_session_id(wanted[0])
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    return _finish(context)


def _finish(context: Context) -> Context:
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_tls13_ciphersuites(_SUITES)
    keys = key_log_file()
    if keys is not None:
        context.set_keylog_callback(lambda _, line: write_key(keys, line))
    return context


def _show(context: Context, tls: ServerTls | ClientTls) -> None:
    """Loads a certificate with its key."""
    chain, key = chain_of(tls)
    try:
        context.use_certificate(chain[0])
        for one in chain[1:]:
            context.add_extra_chain_cert(one)
        context.use_privatekey(key)
    except (SSL.Error, TypeError) as error:
        raise ConfigError(f"the certificate or its key cannot be used: {error}") from error


def _verified(
    connection: SSL.Connection, certificate: crypto.X509, code: int, depth: int, good: int
) -> bool:
    """Whether the handshake may go on with this certificate of the chain."""
    if not good:
        verdict: _Verdict = connection.get_app_data()
        verdict.flaw = _flaw_of(code, depth, certificate)
    return bool(good)


class Tls:
    """One end of TLS on a non-blocking socket; it reads there and says what to write."""

    def __init__(
        self,
        sock: socket.socket,
        context: Context,
        server_name: str | None,
        *,
        server: bool,
        scratch: memoryview,
    ) -> None:
        """``scratch``: memory for ciphertext, which is used within a call alone."""
        self._sock = sock
        self._buffer = scratch
        self.first = b""
        """The first bytes that the peer sent."""
        self.complete = False
        self.identity: PeerIdentity | None = None
        """Who the peer's certificate says it is, once the handshake is complete."""
        connection = self._connection = SSL.Connection(context)
        if not server and server_name and ip_of(server_name) is None:
            connection.set_tlsext_host_name(ascii_name(server_name).encode())
        self._verdict = _Verdict()
        connection.set_app_data(self._verdict)
        if server:
            connection.set_accept_state()
        else:
            connection.set_connect_state()
        # The library has no public way to its structures, and none to its records without copies.
        parts: Any = connection
        self.records = OpenSslRecords(
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
                self.identity = identity_read(self._certificate)
                self.complete = True
            except SSL.WantReadError:
                if not self._fill():
                    break
            except (SSL.SysCallError, SSL.ZeroReturnError):
                raise TlsError("unexpected eof") from None
            except SSL.Error as error:
                raise TlsError(_reason(error), self._verdict.flaw) from None
        return self.pending()

    def _certificate(self) -> x509.Certificate | None:
        return self._connection.get_peer_certificate(as_cryptography=True)

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
