"""TLS without private names of OpenSSL: when it is taken, and that it speaks with the other."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aqueduct.carriers import tls_openssl, tls_stdlib
from aqueduct.carriers.certificates import ClientTls, dev_certificate
from aqueduct.carriers.stream.tls import ALPN
from aqueduct.carriers.verify import ascii_name
from tests.carriers.certificates import Authority
from tests.carriers.test_stream_connect import Start, refusal, start
from tests.carriers.test_stream_tls import port_of, reached
from tests.carriers.test_verify import CASES
from tests.carriers.users import met

__all__ = ["start"]

US = Authority("us")
THEM = Authority("them")
GOOD = US.server("localhost", "127.0.0.1")
BOTH = (tls_openssl, tls_stdlib)
MIXED = [(tls_stdlib, tls_stdlib), (tls_stdlib, tls_openssl), (tls_openssl, tls_stdlib)]

LENIENT = {"a wildcard below the top", "an odd name alone"}
"""What ``cryptography`` accepts and OpenSSL does not."""
STRICT = {"a name of other letters beside"}
"""What ``cryptography`` cannot read."""

Use = Callable[[ModuleType, ModuleType], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Has clients and servers of byte streams use one library each."""

    def chosen(client: Any, server: Any) -> None:
        def tls(*arguments: Any, **options: Any) -> Any:
            library = server if options["server"] else client
            made = library.Tls if library is tls_openssl else library.PlainTls
            return made(*arguments, **options)

        folder = "aqueduct.carriers.stream"
        monkeypatch.setattr(
            sys.modules[f"{folder}.connect"], "client_context", client.client_context
        )
        monkeypatch.setattr(
            sys.modules[f"{folder}.listener"], "server_context", server.server_context
        )
        monkeypatch.setattr(sys.modules[f"{folder}.connection"], "Tls", tls)

    return chosen


@pytest.mark.parametrize(("client", "server"), MIXED)
async def test_both_libraries_speak_with_each_other(
    start: Start, use: Use, client: ModuleType, server: ModuleType
) -> None:
    use(client, server)
    listener = await start("aqueduct+tls://127.0.0.1:0", tls=GOOD)
    for host in ("localhost", "127.0.0.1"):
        address = f"aqueduct+tls://{host}:{port_of(listener)}"
        carrier = await reached(address, ClientTls(ca=US.pem))
        assert carrier.peer_certificate_fingerprint == GOOD.fingerprint
        assert carrier.peer_identity is not None
        assert carrier.peer_identity.names == ("localhost", "127.0.0.1")
        assert str(carrier.snapshot()["cipher"]).startswith("TLS_")


async def test_a_certificate_that_is_pinned_or_not_checked(start: Start, use: Use) -> None:
    use(tls_stdlib, tls_stdlib)
    listener = await start("aqueduct+tls://127.0.0.1:0", tls=dev_certificate())
    await reached(listener.addresses[0])
    await reached(listener.addresses[0].partition("?")[0] + "?verify=off")


@pytest.mark.parametrize("server", BOTH)
async def test_certificates_that_are_refused_say_why(
    start: Start, use: Use, server: ModuleType
) -> None:
    use(tls_stdlib, server)
    for shown, given, words in (
        (GOOD, ClientTls(ca=THEM.pem), "the issuer of the server's certificate is not trusted"),
        (GOOD, None, "the issuer of the server's certificate is not trusted"),
        (US.server("other.test"), ClientTls(ca=US.pem), "for another name than '127.0.0.1'"),
        (US.server("127.0.0.1", days=-1, age=3), ClientTls(ca=US.pem), "has expired"),
        (US.server("127.0.0.1", days=3, age=-1), ClientTls(ca=US.pem), "is not yet valid"),
    ):
        listener = await start("aqueduct+tls://127.0.0.1:0", tls=shown)
        text = await refusal(f"aqueduct+tls://127.0.0.1:{port_of(listener)}", tls=given)
        assert words in text


@pytest.mark.parametrize("client", BOTH)
async def test_a_certificate_of_a_client_is_demanded(
    start: Start, use: Use, client: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    use(client, tls_stdlib)
    listener = await start(
        "aqueduct+tls://127.0.0.1:0", tls=dataclasses.replace(GOOD, client_ca=THEM.pem)
    )
    address = f"aqueduct+tls://127.0.0.1:{port_of(listener)}"
    await reached(address, THEM.client("spark-7", ca=US.pem))
    with caplog.at_level(logging.WARNING, "aqueduct.carriers.stream"):
        text = await refusal(address, tls=ClientTls(ca=US.pem))
        assert "the server demands a certificate" in text
        await met(lambda: "the client shows no certificate" in caplog.text)


@pytest.mark.parametrize("client", BOTH)
async def test_a_client_of_another_authority_is_refused(
    start: Start, use: Use, client: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    use(client, tls_stdlib)
    listener = await start(
        "aqueduct+tls://127.0.0.1:0", tls=dataclasses.replace(GOOD, client_ca=THEM.pem)
    )
    address = f"aqueduct+tls://127.0.0.1:{port_of(listener)}"
    with caplog.at_level(logging.WARNING, "aqueduct.carriers.stream"):
        text = await refusal(address, tls=US.client("stranger", ca=US.pem))
        assert "the server ended the handshake" in text
        await met(lambda: "not of a CA in ServerTls.client_ca" in caplog.text)


async def test_who_speaks_something_else_is_told(
    start: Start, use: Use, caplog: pytest.LogCaptureFixture
) -> None:
    use(tls_stdlib, tls_stdlib)
    listener = await start("aqueduct+tls://127.0.0.1:0", tls=GOOD)
    with caplog.at_level(logging.WARNING, "aqueduct.carriers.stream"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(listener))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.read()
        writer.close()
        await met(lambda: "it speaks HTTP" in caplog.text)


def test_no_key_stays_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tls_stdlib.server_context(GOOD, ALPN)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CASES)
def test_chains_over_quic_are_judged_alike(name: str) -> None:
    case = CASES[name]
    trust = tls_stdlib.PlainTrust(case.trusted, "server", ascii_name(case.name))
    flaw = trust.verify(case.chain)
    assert (flaw is None) == ((case.good or name in LENIENT) and name not in STRICT)
    assert flaw is None or flaw.explain("server", case.name).isprintable()


WITHOUT = """
import logging
from OpenSSL import SSL

began = SSL.Connection.__init__

def begin(self, *arguments):
    began(self, *arguments)
    del self._from_ssl  # as if another version called it otherwise

SSL.Connection.__init__ = begin
logging.basicConfig(format="%(name)s %(levelname)s %(message)s")

import pyarrow as pa
import aqueduct
from aqueduct.carriers import tls_library

service = aqueduct.Service("test")

@service.handler
def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch

async def main():
    batch = pa.record_batch({"a": list(range(100_000))})
    async with service.serving("aqueduct+tls://127.0.0.1:0", dev_certificate=True) as running:
        async with await aqueduct.Client.connect(running.addresses[0]) as client:
            async with client.exchange("same", [batch] * 20) as stream:
                assert [one async for one in stream] == [batch] * 20

import asyncio
asyncio.run(main())
print(tls_library.Tls.__module__)
"""


def test_a_name_that_is_gone_is_told_once_and_tls_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "aqueduct.carriers.tls_stdlib\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert line == (
        "aqueduct WARNING Connection has no _from_ssl: TLS is by Python's ssl from here on, "
        "which is slower"
    )
