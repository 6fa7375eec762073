"""JSON Web Tokens: which are taken, what others are told, and where the keys come from."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import re
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

import aqueduct
from aqueduct.errors import Busy, ConfigError, Refused
from tests.support.calls import TLS, connected, numbers, sync_client, until

LOOSE: Any = aqueduct
EC = ec.generate_private_key(ec.SECP256R1())
OTHER = ec.generate_private_key(ec.SECP256R1())
RSA = rsa.generate_private_key(65537, 2048)
ED = ed25519.Ed25519PrivateKey.generate()
SECRET = "s" * 32


def pem(key: Any) -> bytes:
    found: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return found


def private(key: Any) -> bytes:
    found: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return found


def member(key: Any, **more: Any) -> dict[str, Any]:
    kinds: list[tuple[type, Any]] = [
        (ec.EllipticCurvePrivateKey, ECAlgorithm),
        (rsa.RSAPrivateKey, RSAAlgorithm),
        (ed25519.Ed25519PrivateKey, OKPAlgorithm),
    ]
    algorithm = next(algorithm for kind, algorithm in kinds if isinstance(key, kind))
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), **more}


def key_set(**keys: Any) -> bytes:
    return json.dumps({"keys": [member(key, kid=kid) for kid, key in keys.items()]}).encode()


def token(key: Any = EC, algorithm: str = "ES256", kid: str | None = None, **claims: Any) -> str:
    claims = {"exp": int(time.time()) + 600, "sub": "me"} | claims
    claims = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(claims, key, algorithm, headers=None if kid is None else {"kid": kid})


def service(**options: Any) -> aqueduct.Service:
    made = aqueduct.Service("closed", authorize=aqueduct.Jwt(**options))
    made.handler("echo")(lambda batch: batch)
    made.handler("train")(lambda batch: batch)
    return made


async def refusal(client: aqueduct.Client, shown: Any, handler: str = "echo") -> str:
    """Why a call is refused; "" if it is not."""
    try:
        await client.call(handler, numbers(1), token=shown)
    except Refused as error:
        return str(error)
    return ""


async def test_a_token_that_is_valid_opens_and_others_are_told_why():
    now = int(time.time())
    made = service(key=pem(EC), issuer="them", audience=["models", "all"], require="sub")
    good: dict[str, Any] = {"iss": "them", "aud": "models"}
    parts = token(**good).split(".")
    no_key: Any = None
    none = jwt.encode({"sub": "me", "exp": now + 60} | good, no_key, "none")
    async with connected(made) as client:
        for shown, why in (
            (token(**good), ""),
            (token(**good | {"aud": ["x", "all"]}), ""),
            (token(**good, exp=now - 5, iat=now + 5, nbf=now + 5), ""),  # within leeway
            (token(**good, exp=now - 60), "the token has expired; get a new one"),
            (token(**good, nbf=now + 60), "the token is not valid yet"),
            (token(**good, exp=None), "has no claim 'exp', which the service asks for"),
            (token(**good, exp="x"), "the token is not valid"),
            (token(**good, sub=None), "has no claim 'sub'"),
            (token(iss="them"), "has no claim 'aud'"),
            (token(iss="them", aud="other"), "is for another audience"),
            (token(iss="us", aud="models"), "is by another issuer"),
            (token(OTHER, **good), "the signature of the token is wrong"),
            (".".join((*parts[:2], "AAAA")), "the signature of the token is wrong"),
            (token(RSA, "RS256", **good), "signed by a key that the service does not know"),
            (none, "is signed by 'none', which the service does not take"),
            (token("x" * 32, "HS256", **good), "is signed by 'HS256', which"),
            # The public key as a secret: anyone could sign.
            (
                hmac_by(pem(EC), good | {"sub": "me", "exp": now + 60}),
                "is signed by 'HS256', which",
            ),
            ("", "is no JSON Web Token"),
            ("a.b.c", "is no JSON Web Token"),
            (b"\xff", "is no JSON Web Token"),
            (base64.urlsafe_b64encode(b"[" * 12_000).decode() + ".e30.", "is no JSON Web Token"),
            (None, "asks for a token, and the call has none; give token="),
        ):
            found = await refusal(client, shown)
            assert (found == "") if not why else why in found, (shown, why, found)


def hmac_by(secret: bytes, claims: dict[str, Any]) -> str:
    """A token that the library itself refuses to make."""

    def part(given: bytes) -> bytes:
        return base64.urlsafe_b64encode(given).rstrip(b"=")

    signed = part(b'{"alg":"HS256","typ":"JWT"}') + b"." + part(json.dumps(claims).encode())
    return (signed + b"." + part(hmac.digest(secret, signed, hashlib.sha256))).decode()


async def test_what_an_audience_is_for_counts_without_one_too():
    async with connected(service(key=pem(EC))) as client:
        assert await refusal(client, token()) == ""
        assert "another audience" in await refusal(client, token(aud="models"))


async def test_keys_of_every_kind(tmp_path):
    path = tmp_path / "key.pem"
    path.write_bytes(pem(ED))
    certificate = TLS.certificate
    assert isinstance(certificate, bytes)
    made = service(key=[pem(EC), pem(OTHER), pem(RSA), path, certificate])
    async with connected(made) as client:
        for key, algorithm in (
            (EC, "ES256"),
            (OTHER, "ES256"),
            (RSA, "RS512"),
            (RSA, "PS256"),
            (ED, "EdDSA"),
        ):
            assert await refusal(client, token(key, algorithm)) == ""
        assert "signature" in await refusal(client, token(ec.generate_private_key(ec.SECP256R1())))
    made = service(secret=SECRET, algorithms=["HS256"])
    async with connected(made) as client:
        assert await refusal(client, token(SECRET, "HS256")) == ""
        assert "'ES256', which the service does not" in await refusal(client, token())
        assert "signature" in await refusal(client, token("t" * 32, "HS256"))


async def test_algorithms_can_be_fewer():
    async with connected(service(key=pem(RSA), algorithms="PS256")) as client:
        assert await refusal(client, token(RSA, "PS256")) == ""
        assert "'RS256', which the service does not" in await refusal(client, token(RSA, "RS256"))


async def later(claims: Any) -> bool:
    return bool(claims["sub"] == "me")


@pytest.mark.parametrize(
    "allow",
    [
        lambda claims: claims["sub"] == "me",
        lambda claims, call: claims["sub"] == "me" and call.handler == "echo",
        later,
    ],
)
async def test_a_function_of_the_claims_decides(allow):
    async with connected(service(key=pem(EC), allow=allow)) as client:
        assert await refusal(client, token()) == ""
        assert "does not allow the call" in await refusal(client, token(sub="you"))
        if allow is not later:
            return
        assert "could not decide" in await refusal(client, token(sub=None))  # KeyError


async def test_a_handler_finds_what_the_token_says():
    seen = []
    made = service(key=pem(EC))

    @made.handler("who")
    def who(batch, call):
        seen.append((call.state.caller, call.state.claims["team"]))
        return batch

    async with connected(made) as client:
        assert await refusal(client, token(team="a"), "who") == ""
        assert await refusal(client, token(team="b", sub=None), "who") == ""
    assert seen == [("me", "a"), (None, "b")]


def test_a_sync_client_reads_why():
    with sync_client(service(key=pem(EC)), token=token(exp=1)) as client:
        with pytest.raises(Refused, match="the token has expired"):
            client.call("echo", numbers(1))
        assert client.call("echo", numbers(1), token=token()) == numbers(1)


async def test_a_set_of_keys_in_a_file(tmp_path):
    path = tmp_path / "keys.json"
    path.write_bytes(key_set(one=EC, two=RSA))
    made = service(jwks=path, retry=0)
    async with connected(made) as client:
        assert await refusal(client, token(kid="one")) == ""
        assert await refusal(client, token(RSA, "RS256", kid="two")) == ""
        assert await refusal(client, token()) == ""  # one alone fits
        assert "key that the service does not know" in await refusal(client, token(kid="two"))
        assert "key that the service does not know" in await refusal(client, token(kid="new"))
        assert "signature" in await refusal(client, token(OTHER, kid="one"))
        path.write_bytes(key_set(new=OTHER))
        assert await refusal(client, token(OTHER, kid="new")) == ""
        assert "key that the service does not know" in await refusal(client, token(kid="one"))


async def test_a_set_has_keys_for_signatures_alone(tmp_path, caplog):
    caplog.set_level(logging.INFO, "aqueduct.service.json_web_token")
    path = tmp_path / "keys.json"
    other = json.loads(ECAlgorithm.to_jwk(OTHER))
    members = [
        member(EC, kid="good", alg="ES256"),
        member(EC, kid="enc", use="enc"),
        member(EC, kid="ops", key_ops=["sign"]),
        member(RSA, kid="alg", alg="PS256"),
        {"kty": "oct", "k": "c2VjcmV0", "kid": "oct"},
        {"kty": "EC", "crv": "P-999", "kid": "curve"},
        "text",
        other | {"kid": "private"},
    ]
    path.write_text(json.dumps({"keys": members}))
    async with connected(service(jwks=path, retry=0)) as client:
        assert await refusal(client, token(kid="good")) == ""
        assert await refusal(client, token(RSA, "PS256", kid="alg")) == ""
        for kid in ("enc", "ops", "oct", "curve", "private"):
            assert "does not know" in await refusal(client, token(kid=kid)), kid
        assert "does not know" in await refusal(client, token(RSA, "RS256", kid="alg"))
    left_out = {record.getMessage() for record in caplog.records}
    assert len(left_out) == 3 and all("a key is left out" in text for text in left_out)
    assert "it is a private key" in caplog.text


async def test_a_token_without_a_kid_is_tried_by_few_keys(tmp_path):
    path = tmp_path / "keys.json"
    path.write_bytes(key_set(**{f"k{n}": EC for n in range(9)}))
    async with connected(service(jwks=path)) as client:
        assert "by which of 9 keys it is signed (kid)" in await refusal(client, token())
        assert await refusal(client, token(kid="k8")) == ""


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tokens whose signature is checked from now on."""
    checks: list[str] = []
    verify = jwt.decode

    def check(shown: str, *arguments: Any, **options: Any) -> Any:
        checks.append(shown)
        return verify(shown, *arguments, **options)

    monkeypatch.setattr(jwt, "decode", check)
    return checks


async def test_a_token_is_verified_once_until_it_expires_or_the_keys_change(tmp_path, monkeypatch):
    path, checks, seen = tmp_path / "keys.json", counted(monkeypatch), []
    path.write_bytes(key_set(one=EC))
    made = service(jwks=path, retry=0, leeway=0)

    @made.handler("who")
    def who(batch, call):
        call.state.claims["roles"].append("admin")
        seen.append(call.state.claims["roles"])
        return batch

    shown = token(kid="one", roles=["guest"])
    async with connected(made) as client:
        for _ in range(3):
            assert await refusal(client, shown, "who") == ""
        assert (checks, seen) == ([shown], [["guest", "admin"]] * 3)
        soon = token(kid="one", exp=int(time.time()) + 2)
        found = ""
        while not found:
            found = await refusal(client, soon)
        assert "has expired" in found
        path.write_bytes(key_set(two=OTHER))
        assert await refusal(client, token(OTHER, kid="two")) == ""
        assert "does not know" in await refusal(client, shown)


async def test_no_more_tokens_are_remembered_than_was_said(monkeypatch):
    checks = counted(monkeypatch)
    tokens = [token(sub=f"user {number}") for number in range(4)]
    for remember, expected in ((0, 8), (2, 8), (4, 4)):
        checks.clear()
        async with connected(service(key=pem(EC), remember=remember)) as client:
            for shown in (*tokens, *tokens):
                assert await refusal(client, shown) == ""
        assert len(checks) == expected


class Keys:
    """A server of a set of keys, over TLS."""

    def __init__(self) -> None:
        self.content: bytes | int = b""
        """What it answers; a number: this status."""
        self.location = ""
        self.asked = 0
        self.gate = threading.Event()
        self.gate.set()
        keys = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                keys.asked += 1
                keys.gate.wait(30)
                if keys.location:
                    self.send_response(302)
                    self.send_header("Location", keys.location)
                    self.end_headers()
                elif isinstance(keys.content, int):
                    self.send_error(keys.content)
                else:
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(keys.content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that does not know the certificate

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"https://127.0.0.1:{self.server.server_port}/keys"

    @contextmanager
    def serving(self) -> Iterator[Keys]:
        thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.gate.set()
            self.server.shutdown()
            self.server.server_close()
            thread.join(30)


@pytest.fixture
def keys(tmp_path) -> Iterator[Keys]:
    found = Keys()
    path = tmp_path / "server.pem"
    assert isinstance(TLS.certificate, bytes) and isinstance(TLS.key, bytes)
    path.write_bytes(TLS.certificate + TLS.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    found.server.socket = context.wrap_socket(
        found.server.socket, server_side=True, do_handshake_on_connect=False
    )
    with found.serving():
        yield found


def fetching(keys: Keys, **options: Any) -> aqueduct.Service:
    return service(jwks=keys.url, ca=TLS.certificate, **options)


async def test_keys_are_fetched_once_and_again_for_one_that_is_new(keys):
    keys.content = key_set(one=EC)
    made = fetching(keys, retry=0)
    assert keys.asked == 0  # who only imports the service asks for nothing
    async with connected(made) as client:
        for _ in range(3):
            assert await refusal(client, token(kid="one")) == ""
        assert keys.asked == 1
        keys.content = key_set(one=EC, two=OTHER)
        assert await refusal(client, token(OTHER, kid="two")) == ""
        assert keys.asked == 2


async def test_strangers_cannot_have_keys_fetched_all_the_time(keys):
    keys.content = key_set(one=EC)
    async with connected(fetching(keys)) as client:
        assert "does not know" in await refusal(client, token(kid="x"))
        for number in range(5):
            with pytest.raises(Busy, match="does not know, and it cannot read its keys again yet"):
                await client.call("echo", numbers(1), token=token(kid=f"x{number}"))
        assert keys.asked == 1
        assert await refusal(client, token(kid="one")) == ""


async def test_a_new_key_is_not_refused_before_the_set_is_read_again(keys):
    keys.content = key_set(one=EC)
    good = token(OTHER, kid="two")
    async with connected(fetching(keys, retry=0.5)) as client:
        assert "does not know" in await refusal(client, token(kid="invented"))
        keys.content = key_set(one=EC, two=OTHER)
        found: list[str] = []
        while not found or found[-1]:  # a machine may be slower than half a second
            try:
                assert await refusal(client, good) == ""
                found.append("")
            except Busy as error:
                found.append(str(error))
        assert all("try again later (retry is 0.5 s)" in text for text in found if text)


async def test_a_key_is_not_refused_by_a_set_that_could_not_be_read(keys):
    keys.content = key_set(one=EC)
    async with connected(fetching(keys, retry=0)) as client:
        assert await refusal(client, token(kid="one")) == ""
        keys.content = 500
        with pytest.raises(Busy, match="try again later"):
            await client.call("echo", numbers(1), token=token(OTHER, kid="two"))
        keys.content = key_set(two=OTHER)
        assert await refusal(client, token(OTHER, kid="two")) == ""


async def test_keys_that_are_old_are_renewed_while_calls_go_on(keys):
    keys.content = key_set(one=EC)
    async with connected(fetching(keys, refresh=0.001, retry=0)) as client:
        assert await refusal(client, token(kid="one")) == ""
        keys.gate.clear()
        keys.content = key_set(two=OTHER)
        assert await refusal(client, token(kid="one")) == ""
        await until(lambda: keys.asked == 2)
        assert await refusal(client, token(kid="one")) == ""
        keys.gate.set()

        async def renewed() -> bool:
            return "does not know" in await refusal(client, token(kid="one"))

        while not await renewed():
            pass


async def test_without_keys_clients_are_to_come_later(keys, caplog):
    keys.content = 500
    made = fetching(keys, retry=0)
    async with connected(made) as client:
        for _ in range(2):
            with pytest.raises(Busy, match="cannot check tokens now, as it has no keys; try again"):
                await client.call("echo", numbers(1), token=token(kid="one"))
        (record,) = caplog.records  # it is said once
        assert "the keys could not be read: HTTPError: HTTP Error 500" in record.getMessage()
        keys.content = key_set(one=EC)
        assert await refusal(client, token(kid="one")) == ""


async def test_keys_that_cannot_be_read_again_count_for_a_while(keys, caplog):
    keys.content = key_set(one=EC)
    async with connected(fetching(keys, retry=0, keep=0.3)) as client:

        async def has_keys() -> bool:
            try:
                return await refusal(client, token(kid="one")) == ""
            except Busy:
                return False

        while not await has_keys():  # a machine may be slower than that
            pass
        keys.content = b"{}"
        while await has_keys():
            pass
        assert "is no set of keys" in caplog.text


@pytest.mark.parametrize(
    ("content", "location", "said"),
    [
        (b" " * 2000, "", r"more than 1000 bytes \(limit\)"),
        (b"", "http://example.com/keys", "is no https:// URL"),
        (b"", "file:///etc/passwd", "Redirection to url .* is not allowed"),
        (b"", "ftp://127.0.0.1/keys", "is no https:// URL"),
        (b'{"keys": []}', "", "has no key of RSA, EC or Ed25519"),
    ],
)
async def test_answers_that_are_not_taken(keys, content, location, said, caplog):
    keys.content, keys.location = content, location
    async with connected(fetching(keys, limit=1000)) as client:
        with pytest.raises(Busy, match="no keys"):
            await client.call("echo", numbers(1), token=token(kid="one"))
    assert re.search(said, caplog.text)


async def test_a_server_that_does_not_answer_holds_up_no_call_for_ever(keys, caplog):
    keys.gate.clear()
    async with connected(fetching(keys, timeout=0.05)) as client:
        with pytest.raises(Busy, match="no keys"):
            await client.call("echo", numbers(1), token=token(kid="one"))
    assert "timed out" in caplog.text


async def test_a_server_without_a_certificate_that_is_known(keys, caplog):
    async with connected(service(jwks=keys.url)) as client:
        with pytest.raises(Busy, match="no keys"):
            await client.call("echo", numbers(1), token=token(kid="one"))
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "one of key=, jwks= and secret= is wanted, and none of them given"),
        ({"key": pem(EC), "secret": SECRET}, "and key and secret given"),
        ({"key": b"text"}, "Jwt: key: the bytes: no public key in PEM"),
        ({"key": "/absent.pem"}, "Jwt: key: .*No such file"),
        ({"key": 5}, "Jwt: key is 5; it must be the path of a PEM file"),
        ({"key": []}, "Jwt: key is empty"),
        ({"key": private(EC)}, "key is a private key; the service needs the public one"),
        (
            {"key": pem(ec.generate_private_key(ec.SECP256K1()))},
            "Jwt: key is a .*; RSA, EC or Ed25519",
        ),
        ({"jwks": "http://example.com/keys"}, "is no https:// URL; keys come over TLS"),
        ({"jwks": "https:///keys"}, "is no https:// URL"),
        ({"jwks": b"{}"}, "jwks is bytes; it must be a URL, or the path"),
        ({"jwks": "/absent.json"}, "Jwt: jwks: .*No such file"),
        ({"jwks": "https://x/", "ca": b"text"}, "Jwt: ca: no certificates could be read"),
        ({"secret": SECRET}, "algorithms is not given; secret= takes HS256, HS384, HS512"),
        ({"secret": SECRET, "algorithms": ["HS512"]}, "secret has 32 bytes; HS512 need 64 or more"),
        ({"secret": 5, "algorithms": ["HS256"]}, "secret is of the type int"),
        ({"secret": SECRET, "algorithms": ["ES256"]}, "algorithms has 'ES256'; secret= takes"),
        ({"key": pem(EC), "algorithms": ["none"]}, "algorithms has 'none'; public keys take RS256"),
        ({"key": pem(EC), "algorithms": ["HS256"]}, "algorithms has 'HS256'; public keys take"),
        ({"key": pem(EC), "algorithms": []}, "algorithms is "),
        ({"key": pem(EC), "issuer": 5}, "issuer is 5; it must be text, or a list of text"),
        ({"key": pem(EC), "audience": [""]}, "audience is"),
        ({"key": pem(EC), "require": [5]}, "require is"),
        ({"key": pem(EC), "leeway": -1}, "Jwt: leeway is -1"),
        ({"key": pem(EC), "refresh": 0}, "Jwt: refresh is 0"),
        ({"key": pem(EC), "retry": "x"}, "Jwt: retry is 'x'"),
        ({"key": pem(EC), "keep": 0}, "Jwt: keep is 0"),
        ({"key": pem(EC), "timeout": 0}, "Jwt: timeout is 0"),
        ({"key": pem(EC), "limit": 0}, "Jwt: limit is 0"),
        ({"key": pem(EC), "remember": -1}, "Jwt: remember is -1"),
        ({"key": pem(EC), "allow": "me"}, "Jwt: allow is 'me'; it must be a function"),
        ({"key": pem(EC), "allow": lambda: True}, r"Jwt: allow is called with \(claims, call\)"),
    ],
)
def test_what_cannot_work_is_refused(options, why):
    with pytest.raises(ConfigError, match=why) as caught:
        LOOSE.Jwt(**options)
    assert SECRET not in str(caught.value)


def test_keys_from_this_machine_need_no_tls():
    LOOSE.Jwt(jwks="http://localhost:1/keys")


@pytest.mark.parametrize("leads", [False, True])
async def test_keys_from_this_machine_come_through_no_proxy(keys, monkeypatch, leads):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    plain, proxy = Keys(), Keys()
    plain.content, proxy.content = key_set(one=EC), key_set(one=OTHER)
    url = plain.url.replace("https:", "http:")
    with plain.serving(), proxy.serving():
        monkeypatch.setenv("http_proxy", proxy.url.replace("https:", "http:"))
        if leads:
            keys.location = url
        jwks = keys.url if leads else url
        async with connected(service(jwks=jwks, ca=TLS.certificate)) as client:
            assert await refusal(client, token(kid="one")) == ""
            assert "signature" in await refusal(client, token(OTHER, kid="one"))
        assert (plain.asked, proxy.asked, keys.asked) == (1, 0, int(leads))


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jwt", None)
    with pytest.raises(ConfigError, match=r"pip install 'aqueduct-arrow\[jwt\]'"):
        LOOSE.Jwt(key=pem(EC))


def test_the_repr_shows_no_secret():
    made: Callable[..., Any] = LOOSE.Jwt
    assert repr(made(secret=SECRET, algorithms="HS256")) == "<Jwt with 1 keys, HS256>"
