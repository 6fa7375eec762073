"""Certificates: what a client trusts, what a server shows, and a certificate for development."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from aqueduct.address import Address
from aqueduct.arguments import check_fields, checked
from aqueduct.carriers.contract import PeerIdentity
from aqueduct.errors import ConfigError

__all__ = [
    "ClientTls",
    "Pem",
    "ServerTls",
    "certificates_of",
    "chain_of",
    "client_tls",
    "dev_certificate",
    "fingerprint_of",
    "identity_of",
]

Pem: TypeAlias = str | PathLike[str] | bytes
"""A file's path, or PEM text as bytes."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """What a client demands of the server's certificate.

    The default: a CA that Python trusts vouches for it, and for the name in the address.
    """

    ca: Pem | None = None
    """Certificates of the CAs to trust instead of the public ones."""
    fingerprint: str | None = None
    """``sha256:HEX`` of the one certificate to accept; no CA is asked then."""
    verify: bool = True
    """False accepts any certificate: for tests."""
    server_name: str | None = None
    """The name the certificate must carry, if not the address's host."""
    certificate: Pem | None = None
    """The client's own certificate and, after it, its chain, for a server that demands one. Not to
    be had over QUIC: ConfigError."""
    key: Pem | None = field(default=None, repr=False)
    """Its private key; None: it stands in the same PEM as the certificate."""
    key_password: str | None = field(default=None, repr=False)
    """Of the private key."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a server shows."""

    certificate: Pem
    """The certificate and, after it, its chain."""
    key: Pem | None = field(default=None, repr=False)
    """The private key; None: it stands in the same PEM as the certificate."""
    key_password: str | None = field(default=None, repr=False)
    """Of the private key."""
    client_ca: Pem | None = None
    """CAs of the certificates that clients must show. Not to be had over QUIC: ConfigError."""
    development: bool = False
    """Made by ``dev_certificate``: addresses then carry its fingerprint."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def fingerprint(self) -> str:
        """``sha256:HEX`` of the certificate. Raises ConfigError if it cannot be read."""
        return fingerprint_of(certificates_of(self.certificate, "certificate")[0])


def fingerprint_of(certificate: x509.Certificate) -> str:
    """``sha256:HEX`` of the certificate's DER form."""
    der = certificate.public_bytes(serialization.Encoding.DER)
    return "sha256:" + hashlib.sha256(der).hexdigest()


def identity_of(certificate: x509.Certificate) -> PeerIdentity:
    """Who a certificate says its owner is."""
    names: list[str] = []
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, ValueError):
        pass  # none, or not to be read: the subject and the fingerprint remain
    else:
        for kind in (x509.DNSName, x509.UniformResourceIdentifier, x509.RFC822Name, x509.IPAddress):
            names += map(str, found.value.get_values_for_type(kind))
    try:
        subject = certificate.subject.rfc4514_string()
    except ValueError:
        subject = ""  # not to be read
    return PeerIdentity(
        fingerprint=fingerprint_of(certificate),
        subject=subject,
        names=tuple(names),
    )


@checked()
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
    verify = tls.verify and options.get("verify", "on") == "on"
    return replace(tls, verify=verify, **joined)


def certificates_of(pem: Pem, what: str) -> list[x509.Certificate]:
    """The certificates of a PEM text, at least one. Raises ConfigError; ``what`` is in its text."""
    text, called = _read(pem, what)
    try:
        found = x509.load_pem_x509_certificates(text)
    except ValueError as error:
        raise ConfigError(f"{called} holds no certificate in PEM form: {error}") from error
    begun = text.count(b"-----BEGIN CERTIFICATE-----")
    if len(found) < begun:  # the library leaves one out that is cut off
        raise ConfigError(
            f"{called} has {begun} certificates in PEM form, and {len(found)} of them are whole: "
            "the file is cut off, or being written"
        )
    return found


def chain_of(tls: ServerTls | ClientTls) -> tuple[list[x509.Certificate], Any]:
    """The certificate to show, with its chain, and its key. Raises ConfigError."""
    assert tls.certificate is not None
    chain = certificates_of(tls.certificate, "certificate")
    key = _key_of(tls)
    if key.public_key() != chain[0].public_key():
        side = type(tls).__name__
        raise ConfigError(f"{side}.key is not the key of {side}.certificate")
    return chain, key


def _key_of(tls: ServerTls | ClientTls) -> Any:
    given = tls.certificate if tls.key is None else tls.key
    assert given is not None
    text, called = _read(given, "key")
    password = None
    if tls.key_password is not None:  # which a file may have given, in whatever encoding
        password = tls.key_password.encode("utf-8", "surrogateescape")
    try:
        return serialization.load_pem_private_key(text, password)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{called} holds no usable private key in PEM form: {error}") from error


def _read(pem: Pem, what: str) -> tuple[bytes, str]:
    """The PEM text and how to call it in errors."""
    if isinstance(pem, bytes):
        return pem, f"{what} (given as bytes)"
    path = Path(pem)
    try:
        return path.read_bytes(), f"{what} {str(path)!r}"
    except OSError as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {error.strerror}") from error
