"""Whether a peer's certificate is accepted: what can be wrong with it, and what to do about it.

``tls_library`` has who judges: OpenSSL, or Python's ``ssl``. One ``Trust`` is for TLS and for QUIC.
Its verdict differs from that of ``ssl`` in three points:

- Here a name in the subject alone does not count (RFC 9525).
- Here a certificate given as an authority is trusted, even if it is no root.
- Here weak keys and signatures are refused, whatever this system's settings say.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import dsa, ec, rsa

from aqueduct.carriers.certificates import identity_of
from aqueduct.carriers.contract import PeerIdentity
from aqueduct.errors import ConfigError
from aqueduct.escaping import escape

__all__ = ["Flaw", "TlsError", "Whose", "ascii_name", "identity_read", "ip_of", "weakness"]

Whose = Literal["server", "client"]

# Errors of OpenSSL, X509_V_ERR_.
_SIGNATURE: Final = 7
_NOT_YET: Final = 9
_EXPIRED: Final = 10
_PURPOSE: Final = 26
_CANNOT_ISSUE: Final = frozenset({24, 25, 32, 37, 79})
_UNTRUSTED: Final = frozenset({2, 18, 19, 20, 21, 27, 28})
_CONSTRAINTS: Final = frozenset({47, 48, 49, 50, 51, 52, 53})
_OTHER_NAME: Final = frozenset({62, 64})
_WEAK_KEY: Final = 66
_WEAK_CA_KEY: Final = 67
_WEAK_SIGNATURE: Final = 68

# What OpenSSL's security level 2 demands: 112 bits.
_LEAST_BITS: Final = 2048
_LEAST_CURVE: Final = 224
_LEAST_DIGEST: Final = 28  # bytes


@dataclass(frozen=True, slots=True)
class Flaw:
    """Why a certificate is not accepted."""

    code: int
    """X509_V_ERR_ of OpenSSL."""
    depth: int
    """Which certificate of the chain is at fault: 0 is the peer's own."""
    certificate: x509.Certificate | None = None
    """That one; None if it cannot be read."""
    reason: str = ""
    """In the library's words."""

    def explain(self, whose: Whose, name: str) -> str:
        """What is wrong and what to do; ``name`` is what the server was to be called."""
        code, subject = self.code, self._subject
        which = f"the {whose}'s certificate"
        issuer = f"the certificate of the CA {subject}, which vouches for the {whose},"
        at_fault = issuer if self.depth else which
        if code in (_EXPIRED, _NOT_YET):
            return f"{at_fault} {self._out_of_time(code)}; {self._renew(whose)}"
        if code in _OTHER_NAME:
            return (
                f"{which} is for another name than {name!r} (it is for {self._names}); connect by "
                "a name it carries, or give that name with ?server_name="
            )
        if code == _PURPOSE:
            usage = "serverAuth" if whose == "server" else "clientAuth"
            return (
                f"{at_fault} is not for this purpose ({self.reason}); its key usage and its "
                f"extended key usage, if it has them, must allow {usage}"
            )
        if code in _CANNOT_ISSUE and self.depth:
            return (
                f"the certificate {subject}, which vouches for the {whose}, may not do so "
                f"({self.reason}); let a CA issue the {whose}'s certificate"
            )
        if code in (_WEAK_KEY, _WEAK_CA_KEY, _WEAK_SIGNATURE):
            return (
                f"{at_fault} is too weak ({self.reason}); let it be issued anew, with SHA-256 and "
                f"an elliptic curve or RSA of at least {_LEAST_BITS} bits"
            )
        if code in _CONSTRAINTS:
            return f"a CA may not vouch for the names of {which} ({self.reason})"
        if code in _UNTRUSTED or code == _SIGNATURE:
            if whose == "client":
                return f"{which} is not of a CA in ServerTls.client_ca ({self.reason})"
            return (
                f"the issuer of {which} is not trusted here ({self.reason}); pass its CA with "
                "?ca=FILE, or pin the certificate with ?fingerprint=sha256:..."
            )
        return f"{at_fault} cannot be accepted ({self.reason})"

    @property
    def _subject(self) -> str:
        found = self.certificate
        return repr(identity_of(found).subject) if found is not None else "(which is unreadable)"

    @property
    def _names(self) -> str:
        names = () if self.certificate is None else identity_of(self.certificate).names
        return escape(", ".join(names)) or "no name"

    def _out_of_time(self, code: int) -> str:
        found = self.certificate
        if code == _EXPIRED:
            when = "" if found is None else f" since {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
            return f"has expired and is no longer valid{when}"
        when = "" if found is None else f" before {found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        return f"is not yet valid{when}"

    def _renew(self, whose: Whose) -> str:
        if not self.depth:
            return "renew it, or correct this machine's clock"
        where = "?ca=FILE" if whose == "server" else "ServerTls.client_ca"
        return (
            f"renew the CA's certificate there and in {where} if it stands in it, or correct this "
            "machine's clock"
        )


class TlsError(OSError):
    """TLS failed: ``reason`` in the library's words; ``flaw``: of the peer's certificate."""

    def __init__(self, reason: str, flaw: Flaw | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.flaw = flaw


def identity_read(read: Callable[[], x509.Certificate | None]) -> PeerIdentity | None:
    """Who the peer's certificate says it is, with ``read`` to get at it.

    Raises TlsError if it cannot be read: OpenSSL takes some that ``cryptography`` refuses, which
    raises errors of many classes for it.
    """
    try:
        found = read()
        return None if found is None else identity_of(found)
    except Exception as error:
        raise TlsError(f"the peer's certificate cannot be read: {error}") from error


def ascii_name(name: str) -> str:
    """A host's name as certificates and TLS have it; an IP address stays as it is.

    Raises ConfigError for what is no name of a host.
    """
    if ip_of(name) is not None:
        return name
    try:
        found = name if name.isascii() else name.encode("idna").decode()
    except UnicodeError as error:
        raise ConfigError(f"{name!r} is no name of a host ({error})") from error
    if not found or found.startswith(".") or not found.isprintable():
        raise ConfigError(f"{name!r} is no name of a host")
    return found


def ip_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a name is; None if it is none."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def weakness(chain: Sequence[x509.Certificate]) -> Flaw | None:
    """What is too weak in a verified chain. Over TLS OpenSSL looks for that by itself."""
    for depth, certificate in enumerate(chain):
        if _is_weak_key(certificate):
            return Flaw(
                _WEAK_CA_KEY if depth else _WEAK_KEY, depth, certificate, "the key is too short"
            )
        # The last one is trusted for itself: its signature does not matter.
        if depth < len(chain) - 1 and _is_weak_signature(certificate):
            return Flaw(_WEAK_SIGNATURE, depth, certificate, "the digest is too short")
    return None


def _is_weak_key(certificate: x509.Certificate) -> bool:
    try:
        key = certificate.public_key()
    except (UnsupportedAlgorithm, ValueError):
        return True
    if isinstance(key, rsa.RSAPublicKey | dsa.DSAPublicKey):
        return key.key_size < _LEAST_BITS
    return isinstance(key, ec.EllipticCurvePublicKey) and key.key_size < _LEAST_CURVE


def _is_weak_signature(certificate: x509.Certificate) -> bool:
    try:
        digest = certificate.signature_hash_algorithm
    except UnsupportedAlgorithm:
        return True
    return digest is not None and digest.digest_size < _LEAST_DIGEST
