"""Certificates: what a client trusts, what a server shows, and a certificate for development."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from aioquic.quic.configuration import QuicConfiguration
from aioquic.tls import CipherSuite
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from aqueduct.address import Address
from aqueduct.config import Config
from aqueduct.errors import ConfigError

__all__ = [
    "ALPN",
    "ClientTls",
    "ServerTls",
    "client_configuration",
    "client_tls",
    "dev_certificate",
    "fingerprint_of",
    "server_configuration",
]

ALPN = "aqueduct"
DATAGRAM_FRAME_SIZE = 65_535  # announced to the peer: as large as packets can be

# AES-128 first: it is the fastest where the processor has AES instructions.
_SUITES = (
    CipherSuite.AES_128_GCM_SHA256,
    CipherSuite.AES_256_GCM_SHA384,
    CipherSuite.CHACHA20_POLY1305_SHA256,
)

Pem: TypeAlias = str | PathLike[str] | bytes
"""A file's path, or PEM text as bytes."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """What a client demands of the server's certificate. The default: the public CAs."""

    ca: Pem | None = None
    """Certificates of the CAs to trust instead of the public ones."""
    fingerprint: str | None = None
    """``sha256:HEX`` of the one certificate to accept; no CA is asked then."""
    verify: bool = True
    """False accepts any certificate: for tests."""
    server_name: str | None = None
    """The name the certificate must carry, if not the address's host."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a server shows."""

    certificate: Pem
    """The certificate and, after it, its chain."""
    key: Pem | None = field(default=None, repr=False)
    """The private key; None: it stands in the same PEM as the certificate."""
    password: str | None = field(default=None, repr=False)
    """Of the private key."""
    client_ca: Pem | None = None
    """CAs of the certificates that clients must show. Not to be had over QUIC: ConfigError."""
    development: bool = False
    """Made by ``dev_certificate``: addresses then carry its fingerprint."""

    @property
    def fingerprint(self) -> str:
        """``sha256:HEX`` of the certificate. Raises ConfigError if it cannot be read."""
        return fingerprint_of(_certificates(self.certificate, "certificate")[0])


def fingerprint_of(certificate: x509.Certificate) -> str:
    """``sha256:HEX`` of the certificate's DER form."""
    der = certificate.public_bytes(serialization.Encoding.DER)
    return "sha256:" + hashlib.sha256(der).hexdigest()


def dev_certificate(names: Iterable[str] = (), *, days: float = 30) -> ServerTls:
    """Makes a self-signed certificate in memory, for localhost, 127.0.0.1, ::1 and ``names``.

    Clients pin it (``?fingerprint=...``, see ``ServerTls.fingerprint``), as no CA vouches for it.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "aqueduct development")])
    alternatives: list[x509.GeneralName] = []
    for name in dict.fromkeys(("localhost", "127.0.0.1", "::1", *names)):
        try:
            alternatives.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            alternatives.append(x509.DNSName(name))
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return ServerTls(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        development=True,
    )


def client_tls(address: Address, tls: ClientTls | None) -> ClientTls:
    """Joins the options of the address and ``tls``. Raises ConfigError where they differ."""
    tls = tls or ClientTls()
    options = address.options
    joined: dict[str, Any] = {
        "ca": tls.ca,
        "fingerprint": tls.fingerprint.lower() if tls.fingerprint else None,
        "server_name": tls.server_name,
    }
    for name, value in joined.items():
        given = options.get(name)
        if given is not None and value is not None and given != value:
            raise ConfigError(
                f"{address}: {name} is {given!r} in the address and {value!r} in ClientTls; "
                "give one of them"
            )
        joined[name] = value if given is None else given
    return ClientTls(verify=tls.verify and options.get("verify", "on") == "on", **joined)


def client_configuration(address: Address, config: Config, tls: ClientTls) -> QuicConfiguration:
    """The QUIC library's settings for a client. Raises ConfigError."""
    configuration = _configuration(config, is_client=True)
    configuration.server_name = tls.server_name or address.host
    if tls.fingerprint is not None or not tls.verify:
        # A pinned certificate is compared after the handshake; its issuer does not matter.
        configuration.verify_mode = ssl.CERT_NONE
    else:
        configuration.verify_mode = ssl.CERT_REQUIRED
        if tls.ca is not None:
            authorities = _certificates(tls.ca, "ca")
            configuration.cadata = b"".join(
                authority.public_bytes(serialization.Encoding.PEM) for authority in authorities
            )
    return configuration


def server_configuration(config: Config, tls: ServerTls) -> QuicConfiguration:
    """The QUIC library's settings for a server. Raises ConfigError."""
    if tls.client_ca is not None:
        raise ConfigError(
            "ServerTls.client_ca: a client certificate cannot be demanded over QUIC (aioquic has "
            "no call for it); authorize clients by a token instead"
        )
    configuration = _configuration(config, is_client=False)
    chain = _certificates(tls.certificate, "certificate")
    key = _private_key(tls)
    if key.public_key() != chain[0].public_key():
        raise ConfigError("ServerTls.key is not the key of ServerTls.certificate")
    configuration.certificate = chain[0]
    configuration.certificate_chain = chain[1:]
    configuration.private_key = key
    return configuration


def _configuration(config: Config, *, is_client: bool) -> QuicConfiguration:
    return QuicConfiguration(
        is_client=is_client,
        alpn_protocols=[ALPN],
        cipher_suites=list(_SUITES),
        idle_timeout=config.timing.idle_timeout,
        max_data=config.flow.initial_window * config.flow.streams,
        max_stream_data=config.flow.initial_window,
        max_datagram_frame_size=DATAGRAM_FRAME_SIZE,
    )


def _read(pem: Pem, what: str) -> tuple[bytes, str]:
    """The PEM text and how to call it in errors."""
    if isinstance(pem, bytes):
        return pem, f"{what} (given as bytes)"
    path = Path(pem)
    try:
        return path.read_bytes(), f"{what} {str(path)!r}"
    except OSError as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {error.strerror}") from error


def _certificates(pem: Pem, what: str) -> list[x509.Certificate]:
    text, called = _read(pem, what)
    try:
        return x509.load_pem_x509_certificates(text)
    except ValueError as error:
        raise ConfigError(f"{called} holds no certificate in PEM form: {error}") from error


def _private_key(tls: ServerTls) -> Any:
    given = tls.certificate if tls.key is None else tls.key
    text, called = _read(given, "key")
    password = None if tls.password is None else tls.password.encode()
    try:
        return serialization.load_pem_private_key(text, password)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{called} holds no usable private key in PEM form: {error}") from error
