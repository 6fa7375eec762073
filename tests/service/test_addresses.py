"""A service at addresses of every kind at once, and what its handlers learn of who calls."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import aqueduct
from aqueduct.carriers.binding import is_loopback
from aqueduct.carriers.contract import PeerCredentials
from aqueduct.client.client import Client
from aqueduct.errors import ConfigError, ConnectFailed, Refused
from tests.support.calls import TLS, everything, numbers

SCHEMES = ("aqueduct", "aqueduct+tls", "aqueduct+tcp", "aqueduct+unix", "memory")
MINE = PeerCredentials(os.getpid(), os.geteuid(), os.getegid())


def address_of(scheme: str, folder: Path) -> str:
    if scheme == "aqueduct+unix":
        return f"{scheme}://{folder}/service.sock"
    return f"memory://{folder.name}" if scheme == "memory" else f"{scheme}://127.0.0.1:0"


@pytest.fixture
def seen() -> list[aqueduct.Call]:
    return []


@pytest.fixture
def service(seen):
    service = aqueduct.Service("everywhere", authorize=seen.append)

    @service.handler("echo")
    async def echo(batches, call):
        assert call is seen[-1]
        async for batch in batches:
            yield batch

    return service


async def test_all_schemes_at_once(service, seen, tmp_path):
    addresses = [address_of(scheme, tmp_path) for scheme in SCHEMES]
    async with service.serving(addresses, dev_certificate=True) as running:
        assert [address.partition(":")[0] for address in running.addresses] == list(SCHEMES)
        pins = [re.search(r"fingerprint=sha256:\w{64}$", text) for text in running.addresses]
        assert [pin is not None for pin in pins] == [True, True, False, False, False]
        for address in running.addresses:
            async with await Client.connect(address) as client:
                assert await everything(client.exchange("echo", [numbers(1)])) == [numbers(1)]
    assert [call.peer_credentials for call in seen] == [None, None, None, MINE, MINE]
    assert [call.peer_identity for call in seen] == [None] * 5
    assert not (tmp_path / "service.sock").exists()


async def test_a_certificate_is_asked_for_by_the_address_that_needs_it(service, tmp_path):
    for scheme in ("aqueduct", "aqueduct+tls"):
        with pytest.raises(ConfigError, match=re.escape(f"{scheme}://127.0.0.1:0: ")) as caught:
            async with service.serving(
                address_of("aqueduct+unix", tmp_path), f"{scheme}://127.0.0.1:0"
            ):
                pass
        assert "needs a certificate" in str(caught.value)
        assert not (tmp_path / "service.sock").exists()
    async with service.serving(address_of("aqueduct+tcp", tmp_path)):
        pass


OUTSIDE = "0.0.0.0"


@pytest.mark.parametrize(
    ("address", "warned"),
    [
        (f"aqueduct+tcp://{OUTSIDE}:0", True),
        ("aqueduct+tcp://127.0.0.1:0", False),
        ("aqueduct+tcp://localhost:0", False),
        (f"aqueduct+tls://{OUTSIDE}:0", False),
    ],
)
async def test_tcp_that_others_reach_is_warned_of_once(service, caplog, address, warned):
    with caplog.at_level(logging.WARNING, "aqueduct.carriers.stream"):
        async with service.serving(address, dev_certificate=True):
            pass
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == warned
    if warned:
        assert "is not encrypted; aqueduct+tls://" in texts[0]
        assert address.partition(":0")[0] in texts[0]


# -------------------------------------------------------- who is calling


async def test_a_unix_socket_names_the_process(service, seen, tmp_path):
    """A process of its own calls; the kernel says which."""
    async with service.serving(address_of("aqueduct+unix", tmp_path)) as running:
        text = """
            import sys
            import pyarrow as pa
            import aqueduct

            with aqueduct.SyncClient(sys.argv[1]) as client:
                print(len(list(client.exchange("echo", [pa.record_batch({"x": [1]})]))))
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            textwrap.dedent(text),
            running.addresses[0],
            stdout=subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(process.communicate(), 60)
        assert out == b"1\n"
    (call,) = seen
    assert call.peer_credentials == PeerCredentials(process.pid, os.geteuid(), os.getegid())


async def test_authorize_may_go_by_the_process(tmp_path):
    def only_others(call: aqueduct.Call) -> None:
        if call.peer_credentials is None or call.peer_credentials.uid == os.geteuid():
            raise Refused("not for this user")

    service = aqueduct.Service("others", authorize=only_others)
    service.handler("echo")(lambda batch: batch)
    async with service.serving(address_of("aqueduct+unix", tmp_path)) as running:
        async with await Client.connect(running.addresses[0]) as client:
            with pytest.raises(Refused, match="not for this user"):
                await everything(client.exchange("echo", [numbers(1)]))


class Authority:
    """A CA, and what it vouches for."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(_pem(self._sign(self._name, self._key, [], authority=True)))

    def client(self, name: str, *names: str) -> aqueduct.ClientTls:
        """A certificate of a client who trusts the service's."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._sign(subject, key, names, authority=False)
        file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        file.write_bytes(_pem(certificate))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return aqueduct.ClientTls(ca=TLS.certificate, certificate=file, key=key_file)

    def _sign(self, subject, key, names, *, authority):
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
        )
        if names:
            found = [x509.DNSName(name) for name in names]
            builder = builder.add_extension(x509.SubjectAlternativeName(found), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


async def test_a_certificate_names_the_client(tmp_path, seen):
    def by_name(call: aqueduct.Call) -> None:
        seen.append(call)
        if call.peer_identity is None or "reader.example" not in call.peer_identity.names:
            raise Refused("who is this?")

    service = aqueduct.Service("known", authorize=by_name)
    service.handler("echo")(lambda batch: batch)
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    tls = aqueduct.ServerTls(TLS.certificate, TLS.key, client_ca=ours.file)
    async with service.serving("aqueduct+tls://localhost:0", tls=tls) as running:
        (address,) = running.addresses
        reader = ours.client("reader", "reader.example", "reader.internal")
        async with await Client.connect(address, tls=reader) as client:
            assert await everything(client.exchange("echo", [numbers(1)])) == [numbers(1)]
        identity = seen[0].peer_identity
        assert identity is not None
        assert identity.subject == "CN=reader"
        assert identity.names == ("reader.example", "reader.internal")
        certificate = x509.load_pem_x509_certificate((tmp_path / "reader.pem").read_bytes())
        assert identity.fingerprint == f"sha256:{certificate.fingerprint(hashes.SHA256()).hex()}"
        assert seen[0].peer_credentials is None
        async with await Client.connect(address, tls=ours.client("writer")) as client:
            with pytest.raises(Refused, match="who is this"):
                await everything(client.exchange("echo", [numbers(1)]))
        for unknown in (aqueduct.ClientTls(ca=TLS.certificate), others.client("stranger")):
            with pytest.raises(ConnectFailed, match=r"certificate|unknown ca"):
                await Client.connect(address, tls=unknown)
        loop = asyncio.get_running_loop()

        def in_a_thread() -> int:
            with aqueduct.SyncClient(address, tls=reader) as client:
                return len(list(client.exchange("echo", [numbers(1)])))

        assert await loop.run_in_executor(None, in_a_thread) == 1
        assert len(seen) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"client_ca": "x.pem"}, "without a certificate of the service's own"),
        ({"client_ca": "x.pem", "tls": TLS}, re.escape("give ServerTls(client_ca=...)")),
        ({"client_ca": "/nowhere.pem", "dev_certificate": True}, "/nowhere.pem"),
    ],
)
async def test_client_certificates_that_cannot_work(service, options, words):
    with pytest.raises(ConfigError, match=words):
        async with service.serving("aqueduct+tls://localhost:0", **options):
            pass


async def test_a_service_may_be_run_at_a_list_of_addresses(tmp_path):
    """``Service.run`` in a process of its own; a signal ends it, and the socket file goes."""
    app = """
        import sys
        import aqueduct

        service = aqueduct.Service("listed")
        service.handler("echo")(lambda batch: batch)
        service.run(sys.argv[1:], dev_certificate=True)
    """
    path = tmp_path / "a.sock"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(app),
        f"aqueduct+unix://{path}?mode=0660",
        "aqueduct+tls://127.0.0.1:0",
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        for _ in range(2):
            address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
            async with await Client.connect(address) as client:
                assert await everything(client.exchange("echo", [numbers(1)])) == [numbers(1)]
        assert path.stat().st_mode & 0o777 == 0o660
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert not path.exists()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_the_loopback_is_told_from_the_rest():
    for host, inside in [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
    ]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        assert is_loopback((host, 1) if family == socket.AF_INET else (host, 1, 0, 0)) is inside
