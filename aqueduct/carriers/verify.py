"""Whether a peer's certificate is accepted: one verifier, OpenSSL's, for TLS and for QUIC.

Over TLS, OpenSSL verifies within the handshake. Over QUIC, aioquic hands over the chain. ``Trust``
fills the store for both: CAs, purpose and name. Python's ``ssl`` calls the same functions of
OpenSSL. Its verdict differs in three points:

- Here a name in the subject alone does not count (RFC 9525).
- Here a certificate given as an authority is trusted, even if it is no root.
- Here weak keys and signatures are refused, whatever this system's settings say.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.bindings._rust import _openssl
from cryptography.hazmat.primitives.asymmetric import dsa, ec, rsa
from OpenSSL import SSL, crypto

from aqueduct.carriers.certificates import identity_of
from aqueduct.errors import ConfigError
from aqueduct.escaping import escape

__all__ = ["Flaw", "Trust", "Whose", "ascii_name"]

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

_lib: Final[Any] = _openssl.lib
_ffi: Final[Any] = _openssl.ffi


@dataclass(frozen=True, slots=True)
class Flaw:
    """Why a certificate is not accepted."""

    code: int
    """X509_V_ERR_ of OpenSSL."""
    depth: int
    """Which certificate of the chain is at fault: 0 is the peer's own."""
    certificate: x509.Certificate | None = None
    """That one; None if it cannot be read."""

    @classmethod
    def of(cls, code: int, depth: int, certificate: crypto.X509 | None) -> Flaw:
        """The flaw that OpenSSL names."""
        found: x509.Certificate | None = None
        if certificate is not None:
            try:
                found = certificate.to_cryptography()
            except ValueError:
                pass  # OpenSSL reads some that are against the standard
        return cls(code, depth, found)

    @property
    def reason(self) -> str:
        """In OpenSSL's words."""
        text: str = _ffi.string(_lib.X509_verify_cert_error_string(self.code)).decode()
        return text

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
            return Flaw.of(code, depth, error.certificate)
        return _weakness([one.to_cryptography() for one in found])

    def _fill(self, store: crypto.X509Store) -> None:
        try:
            if self._authorities is None:
                _trust_public(store)
            else:
                for one in self._authorities:
                    store.add_cert(crypto.X509.from_cryptography(one))
        except crypto.Error as error:
            raise ConfigError(f"an authority's certificate is of no use: {error}") from error
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
        ip = _ip_of(self._name)
        if ip is not None:
            done = _lib.X509_VERIFY_PARAM_set1_ip(demanded, ip.packed, len(ip.packed))
        else:
            flags = _lib.X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS
            flags |= _lib.X509_CHECK_FLAG_NEVER_CHECK_SUBJECT
            _lib.X509_VERIFY_PARAM_set_hostflags(demanded, flags)
            name = self._name.encode()
            done = _lib.X509_VERIFY_PARAM_set1_host(demanded, name, len(name))
        return bool(done == 1 and _lib.X509_STORE_set1_param(store, demanded) == 1)


def ascii_name(name: str) -> str:
    """A host's name as certificates and TLS have it; an IP address stays as it is.

    Raises ConfigError for what is no name of a host.
    """
    if _ip_of(name) is not None:
        return name
    try:
        found = name if name.isascii() else name.encode("idna").decode()
    except UnicodeError as error:
        raise ConfigError(f"{name!r} is no name of a host ({error})") from error
    if not found or found.startswith(".") or not found.isprintable():
        raise ConfigError(f"{name!r} is no name of a host")
    return found


def _ip_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _trust_public(store: crypto.X509Store) -> None:
    """The CAs that Python itself trusts: the library's own idea is where it was built."""
    paths = ssl.get_default_verify_paths()
    if paths.cafile is not None or paths.capath is not None:
        store.load_locations(paths.cafile, paths.capath)


def _weakness(chain: Sequence[x509.Certificate]) -> Flaw | None:
    """What is too weak in a verified chain. Over TLS OpenSSL looks for that by itself."""
    for depth, certificate in enumerate(chain):
        if _is_weak_key(certificate):
            return Flaw(_WEAK_CA_KEY if depth else _WEAK_KEY, depth, certificate)
        # The last one is trusted for itself: nothing depends on who signed it.
        if depth < len(chain) - 1 and _is_weak_signature(certificate):
            return Flaw(_WEAK_SIGNATURE, depth, certificate)
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
