"""Why a QUIC connection does not come up: each reason has its own words."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import gc
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aioquic.asyncio.server import serve
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import encode_quic_version_negotiation, pull_quic_header
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from aqueduct.address import Address
from aqueduct.carriers import quic
from aqueduct.carriers.certificates import fingerprint_of
from aqueduct.config import DEFAULT
from aqueduct.errors import ConfigError, ConnectFailed
from tests.carriers.users import DEADLINE, OVER, TLS, Recorder, timing

QUICK = timing(connect_timeout=0.5)
Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts listeners and closes them, and what was accepted, at the end."""
    started: list[quic.QuicListener] = []
    accepted: list[Any] = []

    async def make(address: str = "aqueduct://127.0.0.1:0", tls: Any = TLS, **options: Any) -> Any:
        listener = await quic.listen(Address.parse(address), DEFAULT, tls, accepted.append)
        started.append(listener)
        return listener

    yield make
    for carrier in accepted:
        carrier.close(0, "the test is over")
    for listener in started:
        listener.close()
        await asyncio.wait_for(listener.wait_closed(), DEADLINE)


def plain(listener: Any) -> Address:
    """The listener's address without its fingerprint."""
    address = Address.parse(listener.addresses[0])
    return Address(address.scheme, address.host, address.port)


async def refusal(address: Address | str, tls: Any = None, config: Any = DEFAULT) -> str:
    if isinstance(address, str):
        address = Address.parse(address)
    with pytest.raises(ConnectFailed) as caught:
        await quic.connect(address, config, tls)
    assert str(address) in str(caught.value)
    assert caught.value.reason
    return str(caught.value)


async def connected(address: Address | str, tls: Any = None) -> None:
    if isinstance(address, str):
        address = Address.parse(address)
    carrier = await quic.connect(address, DEFAULT, tls)
    user = Recorder(carrier, DEFAULT)
    await user.until(lambda: user.begun)
    carrier.close(0, "")
    await user.until(lambda: user.lost)


def with_options(address: Address, **options: str) -> Address:
    return Address(address.scheme, address.host, address.port, options)


def ca_file(tmp_path: Path, tls: quic.ServerTls) -> Path:
    path = tmp_path / "ca.pem"
    assert isinstance(tls.certificate, bytes)
    path.write_bytes(tls.certificate)
    return path


# the network


async def test_a_name_that_does_not_resolve() -> None:
    text = await refusal("aqueduct://no-such-host.invalid:4433")
    assert "'no-such-host.invalid' does not resolve" in text


@pytest.mark.parametrize("host", [f"{'x' * 70}.test", "a..test"])
async def test_a_name_that_cannot_be_one(host: str) -> None:
    text = await refusal(f"aqueduct://{host}:4433")
    assert "is no name of a host" in text


async def test_port_0_is_none_to_connect_to() -> None:
    text = await refusal("aqueduct://127.0.0.1:0")
    assert "no server listens at port 0" in text


async def test_nobody_listens() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = await refusal(f"aqueduct://127.0.0.1:{port}")
    assert "connection refused" in text and "is the server started" in text


async def test_nothing_answers() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        text = await refusal(f"aqueduct://127.0.0.1:{port}", config=QUICK)
    assert f"nothing answers UDP at 127.0.0.1:{port} within 0.5 s" in text
    assert "firewalls" in text


@pytest.fixture
async def two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine's resolver says, every name has ::1 and 127.0.0.1."""

    async def both(host: str, port: int, **_: Any) -> list[Any]:
        return [
            (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("::1", port, 0, 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.1", port)),
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)


async def test_the_addresses_of_a_name_are_tried_in_turn(two_addresses: None) -> None:
    carriers: list[Any] = []
    listener = await quic.listen(
        Address.parse("aqueduct://both.test:0"), DEFAULT, TLS, carriers.append
    )
    port = Address.parse(listener.addresses[0]).port
    listener._doors[0].socket.close()  # ::1 refuses now, 127.0.0.1 accepts
    await connected(f"aqueduct://both.test:{port}?verify=off")
    listener.close()
    carriers[0].abandon(OVER)
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)


async def test_the_second_address_is_tried_when_the_first_is_silent(
    start: Start, two_addresses: None
) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as silent:
        silent.bind(("::1", 0))
        port = silent.getsockname()[1]
        await start(f"aqueduct://both.test:{port}")  # says in a warning that ::1 is taken
        carrier = await quic.connect(
            Address.parse(f"aqueduct://both.test:{port}?verify=off"), timing(connect_timeout=2.0)
        )
    assert carrier.peer == f"127.0.0.1:{port}"
    carrier.abandon(OVER)


async def test_each_address_that_failed_is_named(two_addresses: None) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = await refusal(f"aqueduct://both.test:{port}")
    assert f"127.0.0.1:{port}: connection refused" in text
    assert f"[::1]:{port}: connection refused" in text


async def test_ipv6(start: Start) -> None:
    listener = await start("aqueduct://[::1]:0")
    assert listener.addresses[0].startswith("aqueduct://[::1]:")
    await connected(listener.addresses[0])


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_a_listener_of_both_families(start: Start, host: str) -> None:
    listener = await start("aqueduct://[::]:0")
    port = Address.parse(listener.addresses[0]).port
    await connected(f"aqueduct://{host}:{port}?verify=off")


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "[::]"])
async def test_answers_leave_from_the_address_that_was_asked(start: Start, everywhere: str) -> None:
    """On a machine with several addresses the system's choice may be another one."""
    listener = await start(f"aqueduct://{everywhere}:0")
    port = Address.parse(listener.addresses[0]).port
    for host in ("127.0.0.1", "127.0.0.2", "127.1.2.3"):
        await connected(f"aqueduct://{host}:{port}?verify=off")


async def test_a_listener_at_every_address_of_a_name(start: Start, two_addresses: None) -> None:
    listener = await start("aqueduct://both.test:0")
    port = Address.parse(listener.addresses[0]).port
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe, pytest.raises(OSError):
            probe.bind((host, port))
    await connected(f"aqueduct://both.test:{port}?verify=off")


async def test_a_cancelled_connect_leaves_nothing_open() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        address = Address.parse(f"aqueduct://127.0.0.1:{silent.getsockname()[1]}")
        task = asyncio.create_task(quic.connect(address, DEFAULT))
        await asyncio.get_running_loop().sock_recv(_nonblocking(silent), 65_536)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    gc.collect()  # an open socket would be a ResourceWarning, and that an error


def _nonblocking(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    return sock


# certificates


async def test_the_issuer_is_not_known(start: Start) -> None:
    text = await refusal(plain(await start()))
    assert "issuer of the server's certificate is not trusted" in text
    assert "?ca=FILE" in text and "?fingerprint=sha256:" in text


async def test_a_given_ca_vouches(start: Start, tmp_path: Path) -> None:
    address = plain(await start())
    path = ca_file(tmp_path, TLS)
    await connected(with_options(address, ca=str(path)))
    await connected(address, quic.ClientTls(ca=path))
    await connected(address, quic.ClientTls(ca=path.read_bytes()))
    await connected(
        Address("aqueduct", "127.0.0.1", address.port), quic.ClientTls(ca=path, server_name="::1")
    )


async def test_the_certificate_is_for_another_name(start: Start, tmp_path: Path) -> None:
    address = plain(await start())
    path = str(ca_file(tmp_path, TLS))
    text = await refusal(with_options(address, ca=path, server_name="example.org"))
    assert "for another name than 'example.org'" in text and "localhost" in text
    assert "?server_name=" in text


async def test_names_of_a_development_certificate(start: Start, tmp_path: Path) -> None:
    tls = quic.dev_certificate(["example.org", "10.1.2.3"])
    address = plain(await start(tls=tls))
    path = str(ca_file(tmp_path, tls))
    for name in ("example.org", "10.1.2.3", "localhost", "::1"):
        await connected(with_options(address, ca=path, server_name=name))


async def test_an_expired_certificate(start: Start, tmp_path: Path) -> None:
    tls = quic.dev_certificate(days=-0.01)
    address = plain(await start(tls=tls))
    text = await refusal(with_options(address, ca=str(ca_file(tmp_path, tls))))
    assert "no longer valid" in text and "renew it" in text and "clock" in text


async def test_a_pinned_certificate(start: Start) -> None:
    listener = await start()
    assert f"fingerprint={TLS.fingerprint}" in listener.addresses[0]
    await connected(listener.addresses[0])
    await connected(
        plain(listener),
        quic.ClientTls(
            fingerprint=TLS.fingerprint.upper()[:7].lower() + TLS.fingerprint[7:].upper()
        ),
    )
    wrong = "sha256:" + "0" * 64
    text = await refusal(with_options(plain(listener), fingerprint=wrong))
    assert TLS.fingerprint in text and wrong in text and "?fingerprint=" in text


async def test_a_pinned_certificate_may_be_expired(start: Start) -> None:
    """The pin says which certificate it must be; nothing else is asked."""
    listener = await start(tls=quic.dev_certificate(days=-0.01))
    await connected(listener.addresses[0])


async def test_verification_can_be_turned_off(start: Start) -> None:
    address = plain(await start())
    await connected(with_options(address, verify="off"))
    await connected(address, quic.ClientTls(verify=False))


async def test_the_fingerprint_of_the_server_is_known_to_the_client(start: Start) -> None:
    listener = await start()
    carrier = await quic.connect(Address.parse(listener.addresses[0]), DEFAULT)
    assert carrier.peer_certificate_fingerprint == TLS.fingerprint
    identity = carrier.peer_identity
    assert identity is not None
    assert identity.fingerprint == TLS.fingerprint
    assert identity.subject == "CN=aqueduct development"
    assert identity.names == ("localhost", "127.0.0.1", "::1")
    assert carrier.peer_credentials is None
    assert isinstance(TLS.certificate, bytes)
    assert fingerprint_of(x509.load_pem_x509_certificate(TLS.certificate)) == TLS.fingerprint
    carrier.abandon(OVER)


# other protocols


async def test_a_server_that_is_not_aqueduct(start: Start, tmp_path: Path) -> None:
    configuration = QuicConfiguration(is_client=False, alpn_protocols=["h3"])
    assert isinstance(TLS.certificate, bytes) and isinstance(TLS.key, bytes)
    (tmp_path / "c.pem").write_bytes(TLS.certificate)
    (tmp_path / "k.pem").write_bytes(TLS.key)
    configuration.load_cert_chain(tmp_path / "c.pem", tmp_path / "k.pem")
    server = await serve("127.0.0.1", 0, configuration=configuration)
    transport: Any = server._transport
    port = transport.get_extra_info("sockname")[1]
    try:
        text = await refusal(f"aqueduct://127.0.0.1:{port}?verify=off")
    finally:
        server.close()
    assert "speaks QUIC but not Aqueduct" in text


class OldServer(asyncio.DatagramProtocol):
    """Knows but one version of QUIC, and that is none of ours."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        from aioquic._buffer import Buffer

        header = pull_quic_header(Buffer(data=data), host_cid_length=8)
        self.transport.sendto(
            encode_quic_version_negotiation(
                source_cid=header.destination_cid,
                destination_cid=header.source_cid,
                supported_versions=[0x1A2A3A4A],
            ),
            addr,
        )


async def test_a_server_of_another_version_of_quic() -> None:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(OldServer, local_addr=("127.0.0.1", 0))
    try:
        port = transport.get_extra_info("sockname")[1]
        text = await refusal(f"aqueduct://127.0.0.1:{port}")
    finally:
        transport.close()
    assert "no version of QUIC that is known here" in text


class Echo(asyncio.DatagramProtocol):
    """Answers, but not in QUIC."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.transport.sendto(b"HTTP/1.1 400 Bad Request\r\n\r\n", addr)
        self.transport.sendto(data, addr)


async def test_a_server_that_does_not_speak_quic() -> None:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(Echo, local_addr=("127.0.0.1", 0))
    try:
        port = transport.get_extra_info("sockname")[1]
        text = await refusal(f"aqueduct://127.0.0.1:{port}", config=QUICK)
    finally:
        transport.close()
    assert "nothing answers" in text or "ended the handshake" in text


# settings


@pytest.mark.parametrize(
    ("options", "tls", "words"),
    [
        ("?ca=/nowhere/ca.pem", None, "ca '/nowhere/ca.pem' cannot be read"),
        ("", quic.ClientTls(ca=b"no PEM"), "ca (given as bytes) holds no certificate"),
        ("?server_name=a", quic.ClientTls(server_name="b"), "server_name is 'a'"),
        ("?ca=a", quic.ClientTls(ca="b"), "ca is 'a' in the address and 'b'"),
        ("", quic.ClientTls(certificate=TLS.certificate, key=TLS.key), "cannot show a certificate"),
    ],
)
async def test_settings_of_a_client_that_cannot_work(options: str, tls: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await quic.connect(Address.parse(f"aqueduct://localhost:1{options}"), DEFAULT, tls)
    assert words in str(caught.value)


OTHER = quic.dev_certificate()


@pytest.mark.parametrize(
    ("tls", "words"),
    [
        (dataclasses.replace(TLS, client_ca=b"x"), "client certificate cannot be demanded"),
        (dataclasses.replace(TLS, key=OTHER.key), "is not the key of"),
        (dataclasses.replace(TLS, key=None), "no usable private key"),
        (dataclasses.replace(TLS, key_password="secret"), "no usable private key"),
        (quic.ServerTls("/nowhere/c.pem"), "certificate '/nowhere/c.pem' cannot be read"),
        (quic.ServerTls(b"-----BEGIN", b""), "holds no certificate"),
    ],
)
async def test_settings_of_a_server_that_cannot_work(tls: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await quic.listen(Address.parse("aqueduct://127.0.0.1:0"), DEFAULT, tls, lambda c: None)
    assert words in str(caught.value)


def certified(curve: ec.EllipticCurve, names: int) -> quic.ServerTls:
    """A certificate that signed itself, for so many names."""
    key = ec.generate_private_key(curve)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a server")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(f"host-{i:04}.test") for i in range(names)]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return quic.ServerTls(
        certificate.public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


async def test_a_key_that_signs_no_handshake_over_quic_is_refused_by_the_server() -> None:
    with pytest.raises(ConfigError, match=r"secp521r1 signs no handshake over QUIC.*aqueduct\+tls"):
        tls = certified(ec.SECP521R1(), 1)
        await quic.listen(Address.parse("aqueduct://127.0.0.1:0"), DEFAULT, tls, lambda c: None)


async def test_certificates_as_long_as_can_be_connect_and_longer_ones_are_refused(
    start: Start,
) -> None:
    listener = await start(tls=certified(ec.SECP384R1(), 900))
    await connected(with_options(plain(listener), verify="off"))
    with pytest.raises(ConfigError, match=r"bytes; over QUIC they may be 15360.*aqueduct\+tls"):
        await start(tls=certified(ec.SECP384R1(), 1000))


async def test_certificate_and_key_in_one_file(start: Start, tmp_path: Path) -> None:
    assert isinstance(TLS.certificate, bytes) and isinstance(TLS.key, bytes)
    path = tmp_path / "both.pem"
    path.write_bytes(TLS.key + TLS.certificate)
    listener = await start(tls=quic.ServerTls(path))
    await connected(with_options(plain(listener), verify="off"))


async def test_the_key_is_not_shown() -> None:
    assert "PRIVATE" not in repr(TLS)


async def test_a_port_that_is_taken(start: Start) -> None:
    listener = await start()
    with pytest.raises(ConfigError, match=r"cannot be listened at.*in use"):
        await start(str(plain(listener)))


async def test_a_host_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match="does not resolve"):
        await quic.listen(
            Address.parse("aqueduct://no-such-host.invalid:0"), DEFAULT, TLS, lambda c: None
        )
    with pytest.raises(ConfigError, match="cannot be listened at"):
        await quic.listen(Address.parse("aqueduct://192.0.2.1:0"), DEFAULT, TLS, lambda c: None)


STRANGER = """
import asyncio, logging, ssl, sys
CONFIGURE
import aqueduct
from aioquic.asyncio import connect
from aioquic.quic.configuration import QuicConfiguration

async def main():
    service = aqueduct.Service("quiet")
    async with service.serving("aqueduct://127.0.0.1:0", dev_certificate=True) as running:
        port = aqueduct.address.Address.parse(running.addresses[0]).port
        other = QuicConfiguration(alpn_protocols=["h3"], verify_mode=ssl.CERT_NONE)
        try:
            async with connect("127.0.0.1", port, configuration=other):
                pass
        except ConnectionError:
            print("refused")

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("configure", "said"),
    [
        ("", False),
        ("logging.basicConfig()", True),
        ("logging.getLogger('quic').addHandler(logging.StreamHandler())", True),
        ("logging.getLogger('quic').setLevel('DEBUG'); logging.basicConfig()", True),
        ("logging.basicConfig(level='ERROR')", False),
    ],
)
def test_aioquic_writes_to_the_terminal_only_what_was_asked_for(configure: str, said: bool) -> None:
    """Its logger is a library's: silent until somebody configures logging, and theirs then."""
    code = STRANGER.replace("CONFIGURE", configure)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=DEADLINE
    )
    assert done.stdout == "refused\n"
    assert ("ALPN" in done.stderr) is said, done.stderr
    if not said:
        assert done.stderr == ""
