"""A certificate authority of the tests, with certificates as good or as bad as they ask for."""

from __future__ import annotations

import datetime
import ipaddress
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from aqueduct.carriers.certificates import ClientTls, ServerTls

DAY = datetime.timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


class Authority:
    """Issues certificates."""

    def __init__(self, name: str) -> None:
        self.name = _name(name)
        self.key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._build(self.name, self.key, ca=True, names=(), days=30, age=1)
        self.pem = certificate.public_bytes(serialization.Encoding.PEM)

    def _build(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *,
        ca: bool,
        names: tuple[str, ...],
        days: float,
        age: float,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder: Any = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - age * DAY)
            .not_valid_after(now + days * DAY)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        alternatives: list[x509.GeneralName] = []
        for name in names:
            try:
                alternatives.append(x509.IPAddress(ipaddress.ip_address(name)))
            except ValueError:
                is_uri = "://" in name
                kind = x509.UniformResourceIdentifier if is_uri else x509.DNSName
                alternatives.append(kind(name))
        if alternatives:
            builder = builder.add_extension(
                x509.SubjectAlternativeName(alternatives), critical=False
            )
        return builder.sign(self.key, hashes.SHA256())  # type: ignore[no-any-return]

    def issue(
        self, subject: str, *names: str, days: float = 2, age: float = 1
    ) -> tuple[bytes, bytes]:
        """Certificate and key, valid from ``age`` days ago until in ``days`` days."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._build(_name(subject), key, ca=False, names=names, days=days, age=age)
        return certificate.public_bytes(serialization.Encoding.PEM), _pem(key)

    def server(self, *names: str, **validity: float) -> ServerTls:
        """What a server shows."""
        certificate, key = self.issue("a server", *names, **validity)
        return ServerTls(certificate, key)

    def client(self, subject: str, *names: str, **more: Any) -> ClientTls:
        """What a client shows; ``more`` is what it demands."""
        certificate, key = self.issue(subject, *names)
        return ClientTls(certificate=certificate, key=key, **more)
