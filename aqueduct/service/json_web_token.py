"""``Jwt``: who may call, by JSON Web Tokens that somebody else signs. It needs the extra ``jwt``.

::

    authorize = aqueduct.Jwt(
        jwks="https://login.example.com/.well-known/jwks.json",
        issuer="https://login.example.com",
        audience="models",
        allow=lambda claims, call: call.handler in claims.get("handlers", ()),
    )
    service = aqueduct.Service("models", authorize=authorize)

A token must have a signature by one of the keys, and an expiry (``exp``) that has not passed. If
it has ``nbf`` or ``iat``, that time must have come. The handler finds what the token says in
``call.state.claims``, and its ``sub`` in ``call.state.caller``.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aqueduct.arguments import KINDS, Duration, Size, any_text
from aqueduct.errors import Busy, ConfigError, Refused
from aqueduct.escaping import logger_of, shown
from aqueduct.reloading import Reload
from aqueduct.service.context import Call
from aqueduct.service.handlers import takes_last

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Jwt"]

log = logger_of(__name__)

Claims: TypeAlias = Mapping[str, Any]
Allow: TypeAlias = Callable[..., "Awaitable[bool | None] | bool | None"]
Pem: TypeAlias = "str | os.PathLike[str] | bytes"

_RSA: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVES: Final = {"secp256r1": ("ES256",), "secp384r1": ("ES384",), "secp521r1": ("ES512",)}
_EDWARDS: Final = ("EdDSA",)
_SIGNED: Final = (*_RSA, "ES256", "ES384", "ES512", *_EDWARDS)
"""Algorithms that sign by a private key, which the service does not have. They are the default."""
_SHARED: Final = {"HS256": 32, "HS384": 48, "HS512": 64}
"""Algorithms with one secret on both sides, and the fewest bytes that it may have."""
_TRIED: Final = 8
"""Keys that are tried for a token that names none: each try costs as much as a small call."""
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_PIECE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class _Key:
    """A key that verifies signatures, by cryptography or as a secret."""

    key: Any
    algorithms: tuple[str, ...]
    kid: str | None = None


@dataclass(frozen=True, slots=True)
class _Verified:
    """A token that was found valid: to check a signature takes as long as a small call."""

    algorithm: str
    kid: str | None
    keys: tuple[_Key, ...]
    """All keys of that time: once others are read, it is checked again."""
    expires: int
    claims: str
    """As JSON: each call has claims of its own, and may change them."""


class Jwt:
    """An ``authorize`` that goes by JSON Web Tokens (RFC 7519).

    The keys come from ``key=``, ``jwks=`` or ``secret=``: one of the three.
    """

    def __init__(
        self,
        *,
        key: Pem | Sequence[Pem] | None = None,
        jwks: str | os.PathLike[str] | None = None,
        secret: str | bytes | None = None,
        algorithms: Iterable[str] | None = None,
        issuer: str | Iterable[str] | None = None,
        audience: str | Iterable[str] | None = None,
        require: str | Iterable[str] = (),
        leeway: Duration = 10.0,
        allow: Allow | None = None,
        refresh: Duration = 600.0,
        retry: Duration = 30.0,
        keep: Duration = 86_400.0,
        timeout: Duration = 10.0,
        limit: Size = "1m",
        remember: int = 1024,
        ca: Pem | None = None,
    ) -> None:
        """Reads keys that are in files. Those at a URL are fetched for the first call.

        - ``key``: public keys, PEM: a file, or the text as bytes, or a list of them.
        - ``jwks``: a set of public keys (RFC 7517): a file or an ``https://`` URL. A token says by
          ``kid`` which of them it was signed by.
        - ``secret``: what signer and service share; ``algorithms`` must then be given, too.
        - ``algorithms``: those that are taken; by default all that need a private key to sign.
        - ``issuer``, ``audience``: what ``iss`` must be, and what ``aud`` must have; one or
          several. Without an audience only tokens without ``aud`` are taken.
        - ``require``: claims that must be there beside ``exp``.
        - ``leeway``: seconds by which the clocks of signer and service may differ.
        - ``allow``: a function of the claims and the Call, which may be left out; it decides as
          ``authorize`` does, and may be a coroutine function.
        - ``refresh``: the set of keys is read again after so many seconds, while calls go on;
          and for a ``kid`` that it does not have, for which calls wait. ``retry``: not before so
          many seconds after the last time, and such calls get Busy till then. ``keep``: how long
          keys count that could not be read again.
        - ``timeout``: seconds for one reading. ``limit``: bytes of the set.
        - ``remember``: valid tokens whose signature is not checked again for each call; 0: none.
          They are checked again once the keys were read again.
        - ``ca``: CAs of the certificate of the URL's host, a PEM file or bytes; by default those of
          the system.

        Raises ConfigError for what cannot work.
        """
        self._jwt = _library()
        ways = {"key": key, "jwks": jwks, "secret": secret}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ConfigError(f"Jwt: one of key=, jwks= and secret= is wanted, and {found} given")
        self._algorithms = _algorithms(algorithms, secret is not None)
        self._issuer = _texts("issuer", issuer)
        self._audience = _texts("audience", audience)
        self._require = list(dict.fromkeys(("exp", *(_texts("require", require) or ()))))
        self._leeway: float = KINDS["duration or zero"].value(leeway, "Jwt: leeway")
        self._refresh: float = KINDS["duration"].value(refresh, "Jwt: refresh")
        self._retry: float = KINDS["duration or zero"].value(retry, "Jwt: retry")
        self._keep: float = KINDS["duration"].value(keep, "Jwt: keep")
        self._timeout: float = KINDS["duration"].value(timeout, "Jwt: timeout")
        self._limit: int = KINDS["size"].value(limit, "Jwt: limit")
        self._remember: int = KINDS["count or zero"].value(remember, "Jwt: remember")
        self._verified: dict[bytes, _Verified] = {}
        self._allow = allow
        if allow is not None:
            KINDS["function"].value(allow, "Jwt: allow")
            self._tells_call = takes_last("Jwt: allow", allow, "(claims, call)")
        self._set: str | Path | None = None
        """Where the set of keys is; None: the keys stay as they are."""
        self._keys: tuple[_Key, ...] = ()
        self._read_at = -float("inf")
        self._tried_at = -float("inf")
        self._complaint = ""
        self._reload = Reload(
            self._renew, name="the reading of the keys", timeout=self._timeout + 1
        )
        if jwks is not None:
            self._set = _place(jwks)
            self._opener = _opener(ca)
            if isinstance(self._set, Path):
                try:
                    self._take()
                except (OSError, ValueError) as error:
                    raise ConfigError(f"Jwt: jwks: {error}") from error
        elif secret is not None:
            self._keys = (_secret(secret, self._algorithms),)
        elif key is not None:
            pems = key if isinstance(key, list | tuple) else [key]
            self._keys = tuple(_public_key(pem) for pem in pems)
            if not self._keys:
                raise ConfigError("Jwt: key is empty; one public key or more is wanted")

    def __call__(self, call: Call) -> Awaitable[bool | None] | bool | None:
        """Raises Refused for a call whose token is not valid.

        Raises Busy without keys, and for a key that may be in a set that is not read again yet.
        """
        token = call.token
        if token is None:
            why = "the service asks for a token, and the call has none; give token=..."
            raise Refused(why, peer=call.peer, handler=call.handler)
        known = self._known(token)
        algorithm, kid = (known.algorithm, known.kid) if known else self._header(call, token)
        if self._waits(algorithm, kid):
            return self._renew_and_decide(call, token, algorithm, kid)
        return self._decide(call, token, algorithm, kid)

    def __repr__(self) -> str:
        return f"<Jwt with {len(self._keys)} keys, {', '.join(self._algorithms)}>"

    async def _renew_and_decide(
        self, call: Call, token: str, algorithm: str, kid: str | None
    ) -> bool | None:
        before = self._read_at
        await self._reload.run()
        answer = self._decide(call, token, algorithm, kid, fresh=self._read_at > before)
        return await answer if inspect.isawaitable(answer) else answer

    def _known(self, token: str) -> _Verified | None:
        """What is remembered of a token that is valid still."""
        if not self._verified:
            return None
        known = self._verified.get(_digest(token))
        if known is None or known.keys is not self._keys:
            return None
        return known if known.expires > time.time() - self._leeway else None

    def _header(self, call: Call, token: str) -> tuple[str, str | None]:
        """What the token says of its signature. Raises Refused."""
        names: Any = {"peer": call.peer, "handler": call.handler}
        try:
            header = self._jwt.get_unverified_header(token)
            algorithm, kid = header.get("alg"), header.get("kid")
        except Exception as error:
            # A stranger may have sent anything.
            raise Refused("the token is no JSON Web Token", **names) from error
        if not isinstance(algorithm, str) or algorithm not in self._algorithms:
            text = f"the token is signed by {shown(algorithm)}, which the service does not take"
            raise Refused(text, **names)
        return algorithm, kid

    def _waits(self, algorithm: str, kid: str | None) -> bool:
        """Whether the set of keys must be read before this call; begins a reading that is due."""
        if self._set is None:
            return False
        now = time.monotonic()
        if now < self._tried_at + self._retry:
            return False
        age = now - self._read_at
        if age >= self._keep or not self._fitting(self._keys, algorithm, kid):
            return True
        if age >= self._refresh:
            self._reload.begin()
        return False

    def _fitting(self, held: tuple[_Key, ...], algorithm: str, kid: str | None) -> list[_Key]:
        """Those of the keys that the token may be signed by."""
        fitting = [key for key in held if algorithm in key.algorithms]
        if kid is None or self._set is None:
            return fitting
        return [key for key in fitting if key.kid == kid]

    def _decide(
        self, call: Call, token: str, algorithm: str, kid: str | None, *, fresh: bool = False
    ) -> Awaitable[bool | None] | bool | None:
        """The answer to a call. ``fresh``: the set of keys was read for it."""
        names: Any = {"peer": call.peer, "handler": call.handler}
        if self._set is not None and time.monotonic() >= self._read_at + self._keep:
            text = "the service cannot check tokens now, as it has no keys; try again later"
            raise Busy(text, **names)
        known = self._known(token)
        if known is None:
            claims = self._verify(token, algorithm, kid, fresh, names)
        else:
            claims = json.loads(known.claims)
        call.state.claims = claims
        call.state.caller = claims.get("sub")
        if self._allow is None:
            return None
        return self._allow(claims, call) if self._tells_call else self._allow(claims)

    def _verify(
        self, token: str, algorithm: str, kid: str | None, fresh: bool, names: Any
    ) -> dict[str, Any]:
        """What the token says, which is true and is remembered. Raises Refused and Busy."""
        held = self._keys  # others may come meanwhile
        keys = self._fitting(held, algorithm, kid)
        if not keys:
            if self._set is not None and not fresh:
                # Anyone can use up a reading, so the key may be a good one that is new.
                text = (
                    "the token is signed by a key that the service does not know, and it cannot "
                    f"read its keys again yet; try again later (retry is {self._retry:g} s)"
                )
                raise Busy(text, **names)
            raise Refused("the token is signed by a key that the service does not know", **names)
        if len(keys) > _TRIED:
            text = f"the token does not say by which of {len(keys)} keys it is signed (kid)"
            raise Refused(text, **names)
        claims = self._claims(token, algorithm, keys, names)
        if self._remember:
            if len(self._verified) >= self._remember:
                self._verified.clear()
            self._verified[_digest(token)] = _Verified(
                algorithm, kid, held, int(claims["exp"]), json.dumps(claims)
            )
        return claims

    def _claims(self, token: str, algorithm: str, keys: list[_Key], names: Any) -> dict[str, Any]:
        """What the token says, if one of the keys has signed it. Raises Refused."""
        failure: Exception | None = None
        for key in keys:
            try:
                return dict(
                    self._jwt.decode(
                        token,
                        key.key,
                        algorithms=[algorithm],
                        issuer=self._issuer,
                        audience=self._audience,
                        leeway=self._leeway,
                        options={"require": self._require},
                    )
                )
            except Exception as error:  # noqa: BLE001  a stranger may have sent anything
                failure = error
                if not isinstance(error, self._jwt.InvalidSignatureError):
                    break
        raise Refused(self._fault(failure), **names) from failure

    def _fault(self, error: Exception | None) -> str:
        """What is wrong with a token, for the client that has shown it."""
        errors = self._jwt.exceptions
        if isinstance(error, errors.MissingRequiredClaimError):
            return f"the token has no claim {error.claim!r}, which the service asks for"
        for kind, text in (
            (errors.ExpiredSignatureError, "the token has expired; get a new one"),
            (errors.ImmatureSignatureError, "the token is not valid yet"),
            (errors.InvalidAudienceError, "the token is for another audience"),
            (errors.InvalidIssuerError, "the token is by another issuer"),
            (errors.InvalidSignatureError, "the signature of the token is wrong"),
        ):
            if isinstance(error, kind):
                return text
        return "the token is not valid"

    # In a thread

    def _renew(self) -> None:
        try:
            self._take()
            if self._complaint:
                log.info("%s: the keys could be read again", self._set)
            self._complaint = ""
        except Exception as error:  # noqa: BLE001  it must not leave callers without an answer
            complaint = f"{type(error).__name__}: {error}"
            if complaint != self._complaint:  # else the log would have it at each try
                self._complaint = complaint
                log.error("%s: the keys could not be read: %s", self._set, complaint)
        self._tried_at = time.monotonic()

    def _take(self) -> None:
        """Reads the set of keys. Raises OSError and ValueError."""
        place = self._set
        assert place is not None
        if isinstance(place, Path):
            with place.open("rb") as file:
                content = file.read(self._limit + 1)
        else:
            content = self._fetch(place)
        if len(content) > self._limit:
            raise ValueError(f"{place} has more than {self._limit} bytes (limit)")
        self._keys = _keys_of(content, str(place))
        self._read_at = time.monotonic()

    def _fetch(self, url: str) -> bytes:
        end = time.monotonic() + self._timeout
        request = urllib.request.Request(url, headers={"Accept": "application/json"})
        content = bytearray()
        try:
            answer = self._opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            error.close()  # it has the body of the answer
            raise
        with answer as response:
            while len(content) <= self._limit:
                piece = response.read1(_PIECE)
                if not piece:
                    break
                content += piece
                if time.monotonic() > end:
                    raise TimeoutError(f"no end came within {self._timeout:g} s (timeout)")
        return bytes(content)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _library() -> ModuleType:
    try:
        import jwt
        import jwt.algorithms
    except ImportError as error:
        raise ConfigError(
            f"Jwt needs PyJWT ({error}); pip install 'aqueduct-arrow[jwt]'"
        ) from error
    if not jwt.algorithms.has_crypto:
        raise ConfigError("Jwt needs cryptography; pip install 'aqueduct-arrow[jwt]'")
    return jwt


def _algorithms(given: Iterable[str] | None, secret: bool) -> tuple[str, ...]:
    known = tuple(_SHARED) if secret else _SIGNED
    if given is None and not secret:
        return _SIGNED
    found = _texts("algorithms", given)
    wrong = [name for name in found or () if name not in known]
    if not found or wrong:
        what = f"algorithms has {shown(wrong[0])}" if wrong else "algorithms is not given"
        belongs = "secret= takes" if secret else "public keys take"
        raise ConfigError(f"Jwt: {what}; {belongs} {', '.join(known)}")
    return tuple(found)


def _texts(name: str, given: Any) -> list[str] | None:
    """One text or several, as a list; None if nothing is given."""
    if given is None or (name == "require" and given == ()):
        return None
    try:
        found = [any_text(each) for each in ([given] if isinstance(given, str) else given)]
    except TypeError:
        found = []
    if not found or not all(found):
        raise ConfigError(f"Jwt: {name} is {shown(given)}; it must be text, or a list of text")
    return found


def _place(jwks: Any) -> str | Path:
    given = KINDS["file"].value(jwks, "Jwt: jwks")
    if isinstance(given, bytes):
        raise ConfigError("Jwt: jwks is bytes; it must be a URL, or the path of a file")
    text = str(os.fspath(given))
    if "://" not in text:
        return Path(text).absolute()
    _check_url(text)
    return text


def _check_url(url: str) -> None:
    """Raises ConfigError for a URL from where anyone on the way could give other keys."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme != "http" or parts.hostname not in _LOOPBACK:
        raise ConfigError(
            f"Jwt: jwks: {shown(url)} is no https:// URL; keys come over TLS, or from this machine"
        )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows where the first address would have been taken, too."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        try:
            _check_url(newurl)
        except ConfigError as error:
            raise urllib.error.URLError(f"it leads to {newurl!r}: {error}") from error
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener(ca: Pem | None) -> urllib.request.OpenerDirector:
    try:
        if isinstance(ca, bytes):
            context = ssl.create_default_context(cadata=ca.decode("ascii"))
        else:
            context = ssl.create_default_context(
                cafile=None if ca is None else os.fspath(KINDS["file"].value(ca, "Jwt: ca"))
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"Jwt: ca: no certificates could be read: {error}") from error
    # Without TLS keys come from this machine alone, and a proxy could give others.
    proxies = {name: url for name, url in urllib.request.getproxies().items() if name != "http"}
    return urllib.request.build_opener(
        urllib.request.ProxyHandler(proxies),
        _Redirects(),
        urllib.request.HTTPSHandler(context=context),
    )


def _secret(secret: Any, algorithms: tuple[str, ...]) -> _Key:
    if not isinstance(secret, str | bytes):
        raise ConfigError(f"Jwt: secret is of the type {type(secret).__name__}; text or bytes")
    held = secret.encode() if isinstance(secret, str) else secret
    least = max(_SHARED[name] for name in algorithms)
    if len(held) < least:
        raise ConfigError(
            f"Jwt: secret has {len(held)} bytes; {', '.join(algorithms)} need {least} or more, "
            "else it can be guessed"
        )
    return _Key(held, algorithms)


def _public_key(pem: Any) -> _Key:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from cryptography.x509 import load_pem_x509_certificate

    given = KINDS["file"].value(pem, "Jwt: key")
    try:
        content = given if isinstance(given, bytes) else Path(given).read_bytes()
    except OSError as error:
        raise ConfigError(f"Jwt: key: {error}") from error
    if b"PRIVATE KEY" in content:
        raise ConfigError("Jwt: key is a private key; the service needs the public one alone")
    try:
        if b"BEGIN CERTIFICATE" in content:
            key: Any = load_pem_x509_certificate(content).public_key()
        else:
            key = load_pem_public_key(content)
    except ValueError as error:
        where = "the bytes" if isinstance(given, bytes) else os.fspath(given)
        raise ConfigError(f"Jwt: key: {where}: no public key in PEM: {error}") from error
    algorithms = _algorithms_of(key)
    if not algorithms:
        raise ConfigError(f"Jwt: key is a {type(key).__name__}; RSA, EC or Ed25519 is wanted")
    return _Key(key, algorithms)


def _algorithms_of(key: Any) -> tuple[str, ...]:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    if isinstance(key, RSAPublicKey):
        return _RSA
    if isinstance(key, EllipticCurvePublicKey):
        return _CURVES.get(key.curve.name, ())
    return _EDWARDS if isinstance(key, Ed25519PublicKey) else ()


def _keys_of(content: bytes, where: str) -> tuple[_Key, ...]:
    """The keys of a set that verify signatures. Raises ValueError if there is none."""
    import jwt

    wanted = f'{where} is no set of keys: {{"keys": [...]}} is wanted'
    try:
        members = json.loads(content)["keys"]
    except Exception as error:
        raise ValueError(wanted) from error
    if not isinstance(members, list):
        raise ValueError(wanted)
    found = []
    for member in members:
        try:
            key = _member(member, jwt)
        except Exception as error:  # noqa: BLE001  others of the set may do
            log.info("%s: a key is left out: %s", where, error)
            continue
        if key is not None:
            found.append(key)
    if not found:
        raise ValueError(f"{where} has no key of RSA, EC or Ed25519 for signatures")
    return tuple(found)


def _member(member: Any, jwt: Any) -> _Key | None:
    if member.get("use", "sig") != "sig" or "verify" not in member.get("key_ops", ["verify"]):
        return None
    if member["kty"] not in ("RSA", "EC", "OKP"):
        return None  # a secret is no secret in a set that is fetched
    named = member.get("alg")
    key = jwt.PyJWK(member).key
    if hasattr(key, "public_key"):
        raise ValueError("it is a private key")
    algorithms = _algorithms_of(key)
    kid = member.get("kid")
    return _Key(
        key,
        algorithms if named is None else tuple(name for name in algorithms if name == named),
        kid if isinstance(kid, str) else None,
    )
