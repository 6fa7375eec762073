"""TLS by Python's ``ssl``, where a private name is missing that ``tls_openssl`` needs.

Certificates over QUIC are checked by ``cryptography.x509.verification`` then. Both use public
names alone. An answer for a bad certificate says less, and records cost copies.
"""

from __future__ import annotations

import datetime
import os
import secrets
import socket
import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)
from cryptography.x509.verification import (
    Criticality,
    ExtensionPolicy,
    PolicyBuilder,
    Store,
    VerificationError,
)

from aqueduct._speedups.io.tls_records import PlainRecords
from aqueduct.carriers.certificates import (
    ClientTls,
    ServerTls,
    certificates_of,
    chain_of,
)
from aqueduct.carriers.contract import Buffer, PeerIdentity
from aqueduct.carriers.key_log import key_log_file
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

__all__ = ["Context", "PlainTls", "PlainTrust", "client_context", "server_context"]

Context = ssl.SSLContext

_NOT_YET, _EXPIRED, _UNTRUSTED = 9, 10, 20  # X509_V_ERR_ of OpenSSL


def client_context(tls: ClientTls, name: str, *protocols: str) -> Context:
    """What a client demands and shows, and the ``protocols`` that it speaks within.

    ``name`` is what the server must be called; empty: anything. Raises ConfigError.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT, protocols)
    context.check_hostname = False
    # A pinned certificate is compared after the handshake; its issuer does not matter.
    if tls.fingerprint is None and tls.verify:
        context.check_hostname = bool(name)
        context.hostname_checks_common_name = False
        authorities = None if tls.ca is None else certificates_of(tls.ca, "ca")
        _trust(context, authorities)
    else:
        context.verify_mode = ssl.CERT_NONE
    if tls.certificate is not None:
        _show(context, tls)
    return context


def server_context(tls: ServerTls, *protocols: str) -> Context:
    """What a server shows and demands, and what it speaks within, the best first.

    Raises ConfigError.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, protocols)
    _show(context, tls)
    if tls.client_ca is not None:
        _trust(context, certificates_of(tls.client_ca, "client_ca"))
    context.num_tickets = 0
    return context


def _context(kind: ssl._SSLMethod, protocols: Sequence[str]) -> Context:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(list(protocols))
    keys = key_log_file()
    if keys is not None:
        context.keylog_filename = keys
    return context


def _trust(context: Context, authorities: Sequence[x509.Certificate] | None) -> None:
    context.verify_mode = ssl.CERT_REQUIRED
    # A certificate given as an authority is trusted, be it one for a server that signed itself.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if authorities is None:
        context.set_default_verify_paths()
        return
    try:
        for one in authorities:
            context.load_verify_locations(cadata=one.public_bytes(Encoding.DER))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"an authority's certificate cannot be used: {error}") from error


def _show(context: Context, tls: ServerTls | ClientTls) -> None:
    """Loads a certificate with its key, which ``ssl`` takes from a file alone."""
    chain, key = chain_of(tls)
    password = secrets.token_hex(16)
    text = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password.encode())
    )
    with tempfile.TemporaryDirectory(prefix="aqueduct-tls-") as folder:
        path = Path(folder) / "shown.pem"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text + b"".join(one.public_bytes(Encoding.PEM) for one in chain))
        try:
            context.load_cert_chain(path, password=password)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"the certificate or its key cannot be used: {error}") from error


class PlainTls:
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
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = None if server or not server_name else ascii_name(server_name)
        self._object = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server, server_hostname=name
        )
        self.records = PlainRecords(self)
        """What passes once the handshake is over."""

    def handshake(self) -> bytes:
        """Goes on with the handshake; returns what to send. ``complete`` says if it is over.

        Raises TlsError, and OSError of the socket; before that, ``pending`` may have an alert.
        """
        while not self.complete:
            try:
                self._object.do_handshake()
                self.identity = identity_read(self._certificate)
                self.complete = True
            except ssl.SSLWantReadError:
                if not self._fill():
                    break
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                raise TlsError("unexpected eof") from None
            except ssl.SSLCertVerificationError as error:
                flaw = Flaw(error.verify_code, 0, reason=error.verify_message)
                raise TlsError(_reason(error), flaw) from None
            except ssl.SSLError as error:
                raise TlsError(_reason(error)) from None
        return self.pending()

    def _certificate(self) -> x509.Certificate | None:
        found = self._object.getpeercert(binary_form=True)
        return None if found is None else x509.load_der_x509_certificate(found)

    def pending(self) -> bytes:
        """What the library wants to say: parts of the handshake, an alert."""
        return self._outgoing.read()

    @property
    def protocol(self) -> str | None:
        """The protocol that both sides want."""
        return self._object.selected_alpn_protocol()

    @property
    def cipher(self) -> str:
        """The cipher in use."""
        cipher = self._object.cipher()
        return "" if cipher is None else cipher[0]

    def recv_into(self, target: Buffer) -> int:
        """Decrypts into a buffer; 0: the end. Raises BlockingIOError, TlsError, OSError.

        Fewer bytes than the buffer has room for, and not none: there are no more now.
        """
        got = 0
        room = memoryview(target)
        if room.readonly:
            raise BufferError("memory that can be written is needed")
        while got < len(room):
            try:
                count: Any = self._object.read(len(room) - got, room[got:])
            except ssl.SSLWantReadError:
                if self._fill():
                    continue
                if got:
                    break
                raise BlockingIOError from None
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                break
            except ssl.SSLError as error:
                raise TlsError(_reason(error)) from None
            if not count:
                break
            got += count
        return got

    def seal(self, buffers: Sequence[Buffer]) -> list[bytes]:
        """Encrypts; returns all of it, for the socket. Raises TlsError."""
        left = memoryview(b"".join(buffers))
        try:
            while left:
                written: int = self._object.write(left)
                left = left[written:]
        except ssl.SSLError as error:
            raise TlsError(_reason(error)) from None
        sealed = self._outgoing.read()
        return [sealed] if sealed else []

    def farewell(self) -> bytes:
        """The close of TLS, for the socket."""
        try:
            self._object.unwrap()
        except (ssl.SSLError, ValueError):
            pass  # the peer's answer is not waited for
        return self.pending()

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


class PlainTrust:
    """What one side demands of a certificate, for a carrier that has the chain and no TLS.

    ``authorities`` are trusted; None: those that Python trusts. ``whose`` certificate it is decides
    what it must be good for. ``name`` is the DNS name or IP address that it must carry, as
    ``ascii_name`` gives it; empty: any.
    """

    def __init__(
        self, authorities: Sequence[x509.Certificate] | None, whose: Whose, name: str = ""
    ) -> None:
        self._authorities = authorities
        self._whose = whose
        self._name = name

    def verify(self, chain: Sequence[x509.Certificate]) -> Flaw | None:
        """What is wrong with the first certificate; the others are what the peer showed with it."""
        leaf, *others = chain
        now = datetime.datetime.now(datetime.UTC)
        for depth, one in enumerate(chain):
            if one.not_valid_after_utc < now:
                return Flaw(_EXPIRED, depth, one, "certificate has expired")
            if one.not_valid_before_utc > now:
                return Flaw(_NOT_YET, depth, one, "certificate is not yet valid")
        trusted = self._authorities
        if trusted is None:
            context = ssl.create_default_context()
            found = context.get_ca_certs(binary_form=True)
            trusted = [x509.load_der_x509_certificate(one) for one in found]
        if not trusted:
            return Flaw(_UNTRUSTED, 0, leaf, "no authority is trusted here")
        if leaf in trusted:  # it is trusted for itself
            return weakness([leaf])
        policies = {
            "ca_policy": _lenient(ExtensionPolicy.webpki_defaults_ca(), _may_sign),
            "ee_policy": _lenient(ExtensionPolicy.webpki_defaults_ee(), _may_speak),
        }
        builder = PolicyBuilder().store(Store(list(trusted))).extension_policies(**policies)
        try:
            if self._whose == "client":
                verified = builder.build_client_verifier().verify(leaf, others).chain
            else:
                verified = builder.build_server_verifier(self._subject()).verify(leaf, others)
        except VerificationError as error:
            return Flaw(_UNTRUSTED, 0, leaf, str(error))
        return weakness(verified)

    def _subject(self) -> x509.DNSName | x509.IPAddress:
        ip = ip_of(self._name)
        return x509.DNSName(self._name) if ip is None else x509.IPAddress(ip)


def _may_sign(policy: object, certificate: object, usage: x509.KeyUsage | None) -> None:
    if usage is not None and not usage.key_cert_sign:
        raise ValueError("an authority whose key usage does not allow to sign certificates")


def _may_speak(policy: object, certificate: object, usage: x509.KeyUsage | None) -> None:
    if usage is not None and not (
        usage.digital_signature or usage.key_encipherment or usage.key_agreement
    ):
        raise ValueError("the key usage does not allow TLS")


def _lenient(policy: ExtensionPolicy, usage: Any) -> ExtensionPolicy:
    """Extensions that the public authorities must set may be missing, as they are for OpenSSL."""
    for extension in (x509.AuthorityKeyIdentifier, x509.SubjectKeyIdentifier):
        policy = policy.may_be_present(extension, Criticality.AGNOSTIC, None)
    return policy.may_be_present(x509.KeyUsage, Criticality.AGNOSTIC, usage)


def _reason(error: ssl.SSLError) -> str:
    """What the library says."""
    return (error.reason or str(error)).replace("_", " ").lower()
