"""Certificates of all kinds: one verdict over TLS and QUIC, and that of Python's own ``ssl``."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from OpenSSL import crypto

from aqueduct.address import Address
from aqueduct.carriers import quic, stream
from aqueduct.carriers.certificates import ClientTls, ServerTls
from aqueduct.carriers.tls_library import Trust
from aqueduct.carriers.verify import ascii_name
from aqueduct.config import DEFAULT
from aqueduct.errors import ConfigError, ConnectFailed
from tests.carriers.users import DEADLINE, OVER, met

DAY = datetime.timedelta(days=1)
NOW = datetime.datetime.now(datetime.UTC)
SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
ANY = ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE
KEY = ec.generate_private_key(ec.SECP256R1())
CA_KEY = ec.generate_private_key(ec.SECP256R1())
MIDDLE_KEY = ec.generate_private_key(ec.SECP256R1())
PEM = serialization.Encoding.PEM


def dns(*names: str) -> list[x509.GeneralName]:
    return [x509.DNSName(name) for name in names]


def ips(*addresses: str) -> list[x509.GeneralName]:
    return [x509.IPAddress(ipaddress.ip_address(each)) for each in addresses]


def usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement "
        "key_cert_sign crl_sign encipher_only decipher_only"
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names.split()})


def raw_names(*parts: tuple[int, bytes]) -> x509.UnrecognizedExtension:
    """Alternative names as bytes, whatever the library thinks of them: tag and content."""
    body = b"".join(bytes((0x80 | tag, len(content))) + content for tag, content in parts)
    oid = x509.SubjectAlternativeName.oid
    return x509.UnrecognizedExtension(oid, bytes((0x30, len(body))) + body)


def make(
    subject: str,
    issuer: str,
    *,
    key: Any = KEY,
    by: Any = CA_KEY,
    names: Sequence[x509.GeneralName] = (),
    ca: bool | None = False,
    path: int | None = None,
    purposes: Sequence[x509.ObjectIdentifier] = (),
    more: Sequence[tuple[x509.ExtensionType, bool]] = (),
    days: tuple[float, float] = (-1, 30),
) -> x509.Certificate:
    """A certificate; ``days``: from when to when it is valid, counted from now."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + days[0] * DAY)
        .not_valid_after(NOW + days[1] * DAY)
    )
    if ca is not None:
        builder = builder.add_extension(x509.BasicConstraints(ca, path), critical=True)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if purposes:
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    for extension, critical in more:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(by, hashes.SHA256())


def root(**how: Any) -> x509.Certificate:
    return make("root", "root", **{"key": CA_KEY, "ca": True, **how})


def leaf(*names: x509.GeneralName, issuer: str = "root", **how: Any) -> x509.Certificate:
    return make("a server", issuer, names=names, **how)


def middle(**how: Any) -> x509.Certificate:
    return make("middle", "root", **{"key": MIDDLE_KEY, "ca": True, **how})


def below(*names: x509.GeneralName, **how: Any) -> x509.Certificate:
    return leaf(*names, issuer="middle", by=MIDDLE_KEY, **how)


def pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(one.public_bytes(PEM) for one in certificates)


def key_pem(key: Any) -> bytes:
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(PEM, form, plain)  # type: ignore[no-any-return]


def by_sha1(certificate: x509.Certificate) -> x509.Certificate:
    """The same, signed with SHA-1, which ``cryptography`` no longer does."""
    again = crypto.X509.from_cryptography(certificate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        again.sign(crypto.PKey.from_cryptography_key(CA_KEY), "sha1")
    return again.to_cryptography()


ROOT = root()
RSA_1024 = rsa.generate_private_key(65537, 1024)
RSA_2048 = rsa.generate_private_key(65537, 2048)
HOST = dns("host.test")
UNKNOWN = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.99999.1"), b"\x05\x00")


def constrained(permitted: list[x509.GeneralName] | None, excluded: Any = None) -> x509.Certificate:
    return middle(more=[(x509.NameConstraints(permitted, excluded), True)])


@dataclass(frozen=True)
class Case:
    chain: Sequence[x509.Certificate]
    good: bool
    """What TLS and QUIC say."""
    name: str = "host.test"
    trusted: Sequence[x509.Certificate] = (ROOT,)
    says: str = ""
    """Part of the error."""
    key: Any = KEY
    differs: bool = False
    """Whether ``ssl`` says the opposite; the comment beside says why."""
    hidden: bool = False
    """Whether a server of some OpenSSL refuses to show it over TCP; one of ``ssl`` shows it."""


OTHER_NAME = "is for another name than"
CASES = {
    # names
    "the name": Case([leaf(*HOST)], True),
    "the name in capitals": Case([leaf(*dns("HOST.Test"))], True),
    "the name among others": Case([leaf(*dns("a.test", "host.test", "b.test"))], True),
    "another name": Case([leaf(*dns("other.test"))], False, says=f"{OTHER_NAME} 'host.test'"),
    "a name above": Case([leaf(*dns("test"))], False, says=OTHER_NAME),
    "a name below": Case([leaf(*dns("a.host.test"))], False, says=OTHER_NAME),
    "no name at all": Case([leaf()], False, says="it is for no name"),
    "the name in the subject alone": Case(
        [make("host.test", "root")],
        False,
        says=OTHER_NAME,
        differs=True,  # RFC 9525
    ),
    "the name in the subject, another beside": Case(
        [make("host.test", "root", names=dns("other.test"))], False, says=OTHER_NAME
    ),
    "a wildcard": Case([leaf(*dns("*.host.test"))], True, "a.host.test"),
    "a wildcard for two labels": Case([leaf(*dns("*.host.test"))], False, "a.b.host.test"),
    "a wildcard for none": Case([leaf(*dns("*.host.test"))], False),
    "a wildcard below the top": Case([leaf(*dns("*.test"))], False),
    "a wildcard alone": Case([leaf(*dns("*"))], False),
    "a wildcard in a label": Case([leaf(*dns("h*.host.test"))], False, "hi.host.test"),
    "a wildcard behind a label": Case([leaf(*dns("a.*.test"))], False, "a.host.test"),
    "two wildcards": Case([leaf(*dns("*.*.test"))], False, "a.host.test"),
    "a wildcard for an A-label": Case([leaf(*dns("*.host.test"))], True, "xn--bcher-kva.host.test"),
    "an international name": Case([leaf(*dns("xn--bcher-kva.test"))], True, "b\u00fccher.test"),
    "an IPv4 address": Case([leaf(*ips("127.0.0.1"))], True, "127.0.0.1"),
    "another IPv4 address": Case([leaf(*ips("127.0.0.2"))], False, "127.0.0.1", says=OTHER_NAME),
    "an IPv6 address": Case([leaf(*ips("::1"))], True, "::1"),
    "an IPv6 address written at length": Case([leaf(*ips("::1"))], True, "0:0:0:0:0:0:0:1"),
    "an address as a DNS name": Case([leaf(*dns("127.0.0.1"))], False, "127.0.0.1"),
    "a name where an address is asked": Case([leaf(*HOST)], False, "127.0.0.1"),
    # names that cannot be read, beside one that can
    "an address as a DNS name beside": Case([leaf(*dns("127.0.0.1", "host.test"))], True),
    "an address both ways": Case([leaf(*dns("127.0.0.1"), *ips("127.0.0.1"))], True, "127.0.0.1"),
    "a wildcard of localhost beside": Case([leaf(*dns("*.localhost", "host.test"))], True),
    "an odd wildcard beside": Case([leaf(*dns("a.*.test", "*", "host.test"))], True),
    "an empty name beside": Case([leaf(*dns("", "host.test"))], True),
    "a number beside": Case([leaf(*dns("42", "host.test"))], True),
    "an address and a mail address beside": Case(
        [leaf(x509.RFC822Name("me@a.test"), *ips("10.0.0.1"), *HOST)], True
    ),
    "an odd URI beside": Case([leaf(x509.UniformResourceIdentifier("no-scheme"), *HOST)], True),
    "a directory name beside": Case([leaf(x509.DirectoryName(ROOT.subject), *HOST)], True),
    "an address of five bytes beside": Case(
        [leaf(more=[(raw_names((7, b"12345"), (2, b"host.test")), False)])], True
    ),
    "a name of other letters beside": Case(
        [leaf(more=[(raw_names((2, b"b\xfccher"), (2, b"host.test")), False)])], True
    ),
    "an odd name alone": Case([leaf(*dns("*.localhost"))], False, "a.localhost", says=OTHER_NAME),
    # what for
    "for servers": Case([leaf(*HOST, purposes=[SERVER])], True),
    "for servers and clients": Case([leaf(*HOST, purposes=[CLIENT, SERVER])], True),
    "for clients alone": Case([leaf(*HOST, purposes=[CLIENT])], False, says="allow serverAuth"),
    "for anything": Case([leaf(*HOST, purposes=[ANY])], False, says="allow serverAuth"),
    "a key usage of servers": Case(
        [leaf(*HOST, more=[(usage(digital_signature=True), True)])], True
    ),
    "a key usage of something else": Case(
        [leaf(*HOST, more=[(usage(crl_sign=True), True)])], False, says="allow serverAuth"
    ),
    # time
    "expired": Case([leaf(*HOST, days=(-3, -1))], False, says="has expired and is no longer valid"),
    "not valid yet": Case([leaf(*HOST, days=(1, 3))], False, says="is not yet valid before"),
    "an expired CA": Case(
        [leaf(*HOST)],
        False,
        trusted=[root(days=(-3, -1))],
        says="the certificate of the CA 'CN=root', which vouches for the server, has expired",
    ),
    "a CA that is not valid yet": Case(
        [leaf(*HOST)], False, trusted=[root(days=(1, 3))], says="of the CA 'CN=root'"
    ),
    # chains
    "an intermediate CA": Case([below(*HOST), middle()], True),
    "an intermediate CA that is missing": Case([below(*HOST)], False, says="issuer of the server"),
    "an intermediate CA among others": Case([below(*HOST), leaf(*dns("x")), middle()], True),
    "an expired intermediate CA": Case(
        [below(*HOST), middle(days=(-3, -1))],
        False,
        says="of the CA 'CN=middle', which vouches for the server, has expired",
    ),
    "an intermediate CA that is none": Case(
        [below(*HOST), middle(ca=False)], False, says="'CN=middle', which vouches"
    ),
    "an intermediate CA without constraints": Case(
        [below(*HOST), middle(ca=None)], False, says="may not do so"
    ),
    "an intermediate CA that may not sign": Case(
        [below(*HOST), middle(more=[(usage(digital_signature=True), True)])], False
    ),
    "an intermediate CA for clients": Case(
        [below(*HOST), middle(purposes=[CLIENT])], False, says="allow serverAuth"
    ),
    "a path that is too long": Case(
        [below(*HOST), middle()], False, trusted=[root(path=0)], says="path length"
    ),
    "a path that is short enough": Case([below(*HOST), middle(path=0)], True),
    "a root that is no CA": Case([leaf(*HOST)], False, trusted=[root(ca=False)]),
    "an unknown CA": Case([leaf(*HOST)], False, trusted=[make("x", "x", ca=True, by=KEY)]),
    "a CA of the same name": Case(
        [leaf(*HOST)], False, trusted=[root(key=MIDDLE_KEY, by=MIDDLE_KEY)], says="not trusted here"
    ),
    "itself as the CA": Case(
        [(alone := make("alone", "alone", by=KEY, names=HOST, ca=True))], True, trusted=[alone]
    ),
    "itself as the CA, though it is none": Case(
        [(odd := make("odd", "odd", by=KEY, names=HOST))], True, trusted=[odd]
    ),
    "signed by itself": Case([alone], False, says="not trusted here"),
    "an intermediate CA given as authority": Case(
        [below(*HOST)],
        True,
        trusted=[middle()],
        differs=True,  # what is given is trusted
    ),
    # names that a CA may vouch for
    "within the names of its CA": Case([below(*HOST), constrained(dns("test"))], True),
    "outside the names of its CA": Case(
        [below(*HOST), constrained(dns("other"))], False, says="may not vouch for the names"
    ),
    "among the names that its CA may not": Case(
        [below(*HOST), constrained(None, dns("host.test"))], False, says="may not vouch"
    ),
    # extensions and strength
    "an unknown extension": Case([leaf(*HOST, more=[(UNKNOWN, False)])], True),
    "an unknown critical extension": Case(
        [leaf(*HOST, more=[(UNKNOWN, True)])], False, says="critical extension"
    ),
    "RSA of 2048 bits": Case([leaf(*HOST, key=RSA_2048)], True, key=RSA_2048),
    "signed with SHA-1": Case([by_sha1(leaf(*HOST))], False, says="is too weak", hidden=True),
    "a root signed with SHA-1": Case([leaf(*HOST)], True, trusted=[by_sha1(ROOT)]),
    "a CA with RSA of 1024 bits": Case(
        [leaf(*HOST, by=RSA_1024)],
        False,
        trusted=[root(key=RSA_1024, by=RSA_1024)],
        says="is too weak",
    ),
}


def lax_server(case: Case, tmp_path: Path) -> ssl.SSLContext:
    """A server that shows what it likes."""
    (tmp_path / "chain.pem").write_bytes(pem(*case.chain))
    (tmp_path / "key.pem").write_bytes(key_pem(case.key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.load_cert_chain(tmp_path / "chain.pem", tmp_path / "key.pem")
    return context


def verdict_of_ssl(case: Case, tmp_path: Path) -> bool:
    """Whether Python's own TLS accepts the certificate."""
    ours = lax_server(case, tmp_path)
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    theirs.set_ciphers("DEFAULT:@SECLEVEL=2")
    theirs.load_verify_locations(cadata=pem(*case.trusted).decode())
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = ours.wrap_bio(up, down, server_side=True)
    client = theirs.wrap_bio(down, up, server_hostname=case.name)
    for _ in range(10):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError:
                return False
            if end is client:
                return True
    raise AssertionError("the handshake does not come to an end")


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    """Starts a listener; closes it at the end."""
    listeners: list[Any] = []
    accepted: list[Any] = []

    async def begin(scheme: str, tls: ServerTls | ssl.SSLContext) -> Address:
        if isinstance(tls, ssl.SSLContext):
            server = await asyncio.start_server(lambda _, up: up.close(), "127.0.0.1", 0, ssl=tls)
            listeners.append(server)
            return Address.parse(f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        room: Any = quic if scheme == "aqueduct" else stream
        listening = Address.parse(f"{scheme}://127.0.0.1:0")
        listeners.append(await room.listen(listening, DEFAULT, tls, accepted.append))
        return Address.parse(listeners[-1].addresses[0])

    yield begin
    for carrier in accepted:
        carrier.abandon(OVER)
    for listener in listeners:
        listener.close()
        await asyncio.wait_for(listener.wait_closed(), DEADLINE)


SCHEMES = {"tls": "aqueduct+tls", "quic": "aqueduct"}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", CASES)
async def test_a_certificate_is_judged_as_ssl_does(
    name: str, scheme: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    case = CASES[name]
    shown: ServerTls | ssl.SSLContext = ServerTls(pem(*case.chain), key_pem(case.key))
    if case.hidden and scheme == "tls":
        shown = lax_server(case, tmp_path)
    address = await start(SCHEMES[scheme], shown)
    room: Any = quic if scheme == "quic" else stream
    tls = ClientTls(ca=pem(*case.trusted), server_name=case.name)
    text = ""
    try:
        carrier = await room.connect(address, DEFAULT, tls)
        carrier.abandon(OVER)
    except ConnectFailed as error:
        text = str(error)
    assert (not text) == case.good, text
    assert case.says in text and text.isprintable()
    assert (verdict_of_ssl(case, tmp_path) != case.good) == case.differs


WEAK = Case([leaf(*HOST, key=RSA_1024)], False, key=RSA_1024)


async def test_a_key_of_1024_bits_is_too_weak(start: Callable[..., Any], tmp_path: Path) -> None:
    tls = ClientTls(ca=pem(ROOT), server_name="host.test")
    shown = ServerTls(pem(*WEAK.chain), key_pem(RSA_1024))
    with pytest.raises(ConfigError, match="key too small"):
        await start("aqueduct+tls", shown)
    with pytest.raises(ConnectFailed, match="is too weak"):
        await quic.connect(await start("aqueduct", shown), DEFAULT, tls)
    server = await asyncio.start_server(
        lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=lax_server(WEAK, tmp_path)
    )
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectFailed, match="is too weak"):
            await stream.connect(Address.parse(f"aqueduct+tls://127.0.0.1:{port}"), DEFAULT, tls)
    assert not verdict_of_ssl(WEAK, tmp_path)


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_the_advice_for_an_expired_authority_names_it(
    scheme: str, start: Callable[..., Any]
) -> None:
    address = await start(SCHEMES[scheme], ServerTls(pem(leaf(*HOST)), key_pem(KEY)))
    room: Any = quic if scheme == "quic" else stream
    old = root(days=(-3, -1))
    with pytest.raises(ConnectFailed) as caught:
        await room.connect(address, DEFAULT, ClientTls(ca=pem(old), server_name="host.test"))
    text = str(caught.value)
    assert f"no longer valid since {old.not_valid_after_utc:%Y-%m-%d}" in text
    assert "renew the CA's certificate there and in ?ca=FILE" in text
    assert "pass its CA" not in text and "not trusted here" not in text


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_server_that_is_not_trusted_gets_no_connection(scheme: str) -> None:
    room: Any = quic if scheme == "quic" else stream
    accepted: list[Any] = []
    listener = await room.listen(
        Address.parse(f"{SCHEMES[scheme]}://127.0.0.1:0"),
        DEFAULT,
        ServerTls(pem(leaf(*HOST, purposes=[CLIENT])), key_pem(KEY)),
        accepted.append,
    )
    address = Address.parse(listener.addresses[0])
    with pytest.raises(ConnectFailed):
        await room.connect(address, DEFAULT, ClientTls(ca=pem(ROOT), server_name="host.test"))
    await met(lambda: not listener.half_open)
    assert accepted == []
    listener.close()
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)


# Certificates of clients, which TLS alone has.


CLIENTS = {
    "any": (leaf(), ""),
    "for clients": (leaf(purposes=[CLIENT]), ""),
    "for servers alone": (leaf(purposes=[SERVER]), "allow clientAuth"),
    "expired": (leaf(days=(-3, -1)), "the client's certificate has expired"),
    "of another CA": (make("x", "x", by=KEY), "is not of a CA in ServerTls.client_ca"),
    "with an unknown critical extension": (leaf(more=[(UNKNOWN, True)]), "critical extension"),
    "with a name that cannot be read": (leaf(more=[(raw_names((7, b"12345")), False)]), ""),
}


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_certificate_of_a_client(
    name: str, start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    shown, says = CLIENTS[name]
    demanding = ServerTls(pem(leaf(*HOST)), key_pem(KEY), client_ca=pem(ROOT))
    address = await start("aqueduct+tls", demanding)
    mine = ClientTls(
        ca=pem(ROOT), server_name="host.test", certificate=pem(shown), key=key_pem(KEY)
    )
    if not says:
        carrier = await stream.connect(address, DEFAULT, mine)
        carrier.abandon(OVER)
        return
    with pytest.raises(ConnectFailed, match="the server ended the handshake"):
        await stream.connect(address, DEFAULT, mine)
    assert says in caplog.text


# Names as they are given.


@pytest.mark.parametrize(
    "name", ["", ".", ".host.test", "a" * 64 + "\u00fc.test", "a\nb", "\u00fc..b"]
)
async def test_what_is_no_name_of_a_host(name: str, start: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="is no name of a host"):
        ascii_name(name)


@pytest.mark.parametrize("name", ["host.test", "127.0.0.1", "::1", "fe80::1%lo", "localhost"])
def test_names_that_stay_as_they_are(name: str) -> None:
    assert ascii_name(name) == name


def test_a_chain_is_judged_without_a_connection() -> None:
    trust = Trust([ROOT], "server", "host.test")
    assert trust.verify([leaf(*HOST)]) is None
    flaw = trust.verify([below(*HOST), middle(days=(-3, -1))])
    assert flaw is not None and (flaw.code, flaw.depth) == (10, 1)
    flaw = trust.verify([leaf(*dns("a\x1b[31m.test"))])
    assert flaw is not None and flaw.explain("server", "host.test").isprintable()
