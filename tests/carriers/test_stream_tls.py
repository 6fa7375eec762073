"""TLS over byte streams: certificates good and bad on both sides, and who speaks something else."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import ssl
from pathlib import Path
from typing import Any

import pytest

from aqueduct.address import Address
from aqueduct.carriers import stream
from aqueduct.carriers.certificates import ClientTls, ServerTls, dev_certificate
from aqueduct.config import DEFAULT
from aqueduct.errors import ConfigError
from tests.carriers.certificates import Authority
from tests.carriers.test_stream_connect import Start, refusal, start
from tests.carriers.users import DEADLINE, OVER, TLS, Pair, Recorder, met, transfer

__all__ = ["start"]

US = Authority("us")
THEM = Authority("them")
GOOD = US.server("localhost", "127.0.0.1")


def port_of(listener: stream.StreamListener) -> int:
    return Address.parse(listener.addresses[0]).port


async def reached(address: str, tls: ClientTls | None = None) -> stream.StreamCarrier:
    """A connection that carries bytes both ways."""
    carrier = await stream.connect(Address.parse(address), DEFAULT, tls)
    user = Recorder(carrier, DEFAULT)
    await user.until(lambda: user.begun)
    carrier.ping()
    carrier.flush()
    await user.until(lambda: user.pongs)
    carrier.abandon(OVER)
    return carrier


# What a client demands.


async def test_a_certificate_that_is_trusted(start: Start, tmp_path: Path) -> None:
    listener = await start("aqueduct+tls://127.0.0.1:0", tls=GOOD)
    assert "fingerprint" not in listener.addresses[0]
    (tmp_path / "ca.pem").write_bytes(US.pem)
    for host in ("localhost", "127.0.0.1"):
        address = f"aqueduct+tls://{host}:{port_of(listener)}"
        await reached(f"{address}?ca={tmp_path}/ca.pem")
        carrier = await reached(address, ClientTls(ca=US.pem))
        assert carrier.peer_certificate_fingerprint == GOOD.fingerprint
        assert carrier.peer_identity is not None
        assert carrier.peer_identity.subject == "CN=a server"
        assert carrier.peer_identity.names == ("localhost", "127.0.0.1")
        assert carrier.snapshot()["cipher"] == "TLS_AES_128_GCM_SHA256"


async def test_a_name_given_by_hand(start: Start) -> None:
    listener = await start("aqueduct+tls://127.0.0.1:0", tls=US.server("inner.test"))
    address = f"aqueduct+tls://127.0.0.1:{port_of(listener)}"
    await reached(f"{address}?server_name=inner.test", ClientTls(ca=US.pem))
    text = await refusal(address, tls=ClientTls(ca=US.pem))
    assert "is for another name than '127.0.0.1'" in text and "?server_name=" in text
    text = await refusal(f"{address}?server_name=outer.test", tls=ClientTls(ca=US.pem))
    assert "is for another name than 'outer.test'" in text


async def test_a_certificate_for_any_name_below_one_and_one_for_none(start: Start) -> None:
    listener = await start("aqueduct+tls://127.0.0.1:0", tls=US.server("*.inner.test"))
    address = f"aqueduct+tls://127.0.0.1:{port_of(listener)}"
    await reached(f"{address}?server_name=a.inner.test", ClientTls(ca=US.pem))
    for name in ("inner.test", "a.b.inner.test", "a.outer.test"):
        text = await refusal(f"{address}?server_name={name}", tls=ClientTls(ca=US.pem))
        assert f"for another name than {name!r} (it is for *.inner.test)" in text
    listener = await start("aqueduct+tls://127.0.0.1:0", tls=US.server())
    address = f"aqueduct+tls://localhost:{port_of(listener)}"
    text = await refusal(address, tls=ClientTls(ca=US.pem))
    assert "for another name than 'localhost' (it is for no name)" in text


async def test_the_public_authorities_are_those_of_python(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = await start("aqueduct+tls://127.0.0.1:0", tls=GOOD)
    (tmp_path / "ca.pem").write_bytes(US.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    await reached(f"aqueduct+tls://localhost:{port_of(listener)}")


async def test_an_issuer_that_is_not_trusted(start: Start) -> None:
    listener = await start("aqueduct+tls://127.0.0.1:0", tls=GOOD)
    address = f"aqueduct+tls://127.0.0.1:{port_of(listener)}"
    for tls in (None, ClientTls(ca=THEM.pem)):
        text = await refusal(address, tls=tls)
        assert "the issuer of the server's certificate is not trusted here" in text
        assert "?ca=FILE" in text and "?fingerprint=" in text


@pytest.mark.parametrize(("days", "age"), [(-1, 3), (3, -1)])
async def test_a_certificate_out_of_its_time(start: Start, days: float, age: float) -> None:
    bad = US.server("127.0.0.1", days=days, age=age)
    listener = await start("aqueduct+tls://127.0.0.1:0", tls=bad)
    address = f"aqueduct+tls://127.0.0.1:{port_of(listener)}"
    text = await refusal(address, tls=ClientTls(ca=US.pem))
    assert ("has expired" if days < 0 else "not yet valid") in text
    assert "correct this machine's clock" in text


async def test_a_pinned_certificate(start: Start) -> None:
    development = dev_certificate()
    listener = await start("aqueduct+tls://127.0.0.1:0", tls=development)
    assert f"fingerprint={development.fingerprint}" in listener.addresses[0]
    await reached(listener.addresses[0])
    await reached(listener.addresses[0].partition("?")[0] + "?verify=off")
    other = TLS.fingerprint
    text = await refusal(f"aqueduct+tls://127.0.0.1:{port_of(listener)}?fingerprint={other}")
    assert f"the server's certificate is {development.fingerprint}, not {other}" in text


async def test_a_development_certificate_given_as_authority(start: Start) -> None:
    listener = await start("aqueduct+tls://127.0.0.1:0")
    assert isinstance(TLS.certificate, bytes)
    address = f"aqueduct+tls://localhost:{port_of(listener)}"
    await reached(address, ClientTls(ca=TLS.certificate))


# What a server demands.


async def server_side(address: str, tls: ClientTls | None, listener_tls: ServerTls) -> Any:
    """The server's carrier of a connection that came up."""
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    listener = await stream.listen(
        Address.parse(address), DEFAULT, listener_tls, accepted.set_result
    )
    carrier = await stream.connect(Address.parse(listener.addresses[0]), DEFAULT, tls)
    server = await asyncio.wait_for(accepted, DEADLINE)
    pair = Pair(Recorder(carrier, DEFAULT), Recorder(server, DEFAULT))
    await transfer(pair, 300_000)
    for end in (carrier, server):
        end.abandon(OVER)
    listener.close()
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)
    return server


async def test_a_client_certificate_reaches_the_server() -> None:
    demanding = dataclasses.replace(GOOD, client_ca=THEM.pem)
    mine = THEM.client("spark-7", "spiffe://cluster/spark", "spark.test", ca=US.pem)
    server = await server_side("aqueduct+tls://127.0.0.1:0", mine, demanding)
    assert server.peer_identity.subject == "CN=spark-7"
    assert server.peer_identity.names == ("spark.test", "spiffe://cluster/spark")
    assert server.peer_certificate_fingerprint == server.peer_identity.fingerprint
    plain = await server_side("aqueduct+tls://127.0.0.1:0", ClientTls(ca=US.pem), GOOD)
    assert (plain.peer_identity, plain.peer_certificate_fingerprint) == (None, None)


async def test_a_client_without_the_certificate_that_is_demanded(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    demanding = dataclasses.replace(GOOD, client_ca=THEM.pem)
    listener = await start("aqueduct+tls://127.0.0.1:0", tls=demanding)
    address = f"aqueduct+tls://127.0.0.1:{port_of(listener)}"
    with caplog.at_level(logging.WARNING, "aqueduct.carriers.stream"):
        text = await refusal(address, tls=ClientTls(ca=US.pem))
        assert "the server demands a certificate: give one in ClientTls.certificate" in text
        await met(lambda: not listener.connections)
    assert "the client shows no certificate, which ServerTls.client_ca demands" in caplog.text


async def test_a_client_certificate_of_another_authority(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    demanding = dataclasses.replace(GOOD, client_ca=THEM.pem)
    listener = await start("aqueduct+tls://127.0.0.1:0", tls=demanding)
    address = f"aqueduct+tls://127.0.0.1:{port_of(listener)}"
    with caplog.at_level(logging.WARNING, "aqueduct.carriers.stream"):
        text = await refusal(address, tls=US.client("stranger", ca=US.pem))
        assert "the server ended the handshake" in text and "unknown ca" in text
        await met(lambda: not listener.connections)
    assert "the client's certificate is not of a CA in ServerTls.client_ca" in caplog.text


async def test_the_server_hears_why_a_client_goes(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    listener = await start("aqueduct+tls://127.0.0.1:0", tls=GOOD)
    with caplog.at_level(logging.WARNING, "aqueduct.carriers.stream"):
        await refusal(f"aqueduct+tls://127.0.0.1:{port_of(listener)}", tls=ClientTls(ca=THEM.pem))
        await met(lambda: not listener.connections)
    assert "the client ended the handshake" in caplog.text
    assert "unknown ca" in caplog.text


# Who speaks something else.


async def test_a_plain_client_on_a_tls_port(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    listener = await start("aqueduct+tls://127.0.0.1:0")
    with caplog.at_level(logging.WARNING, "aqueduct.carriers.stream"):
        text = await refusal(f"aqueduct+tcp://127.0.0.1:{port_of(listener)}")
        await met(lambda: not listener.connections)
    assert "the server does not speak Aqueduct: it speaks TLS; use aqueduct+tls://" in text
    assert "the client does not speak TLS (it speaks Aqueduct without TLS)" in caplog.text


async def test_a_tls_client_on_a_plain_port(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    listener = await start("aqueduct+tcp://127.0.0.1:0")
    with caplog.at_level(logging.WARNING, "aqueduct.carriers.stream"):
        text = await refusal(f"aqueduct+tls://127.0.0.1:{port_of(listener)}?verify=off")
        await met(lambda: not listener.connections)
    assert "the server does not speak TLS (it speaks Aqueduct without TLS)" in text
    assert "use aqueduct+tcp://" in text
    assert "the client does not speak Aqueduct: it speaks TLS" in caplog.text
    assert "this port is plain, for aqueduct+tcp://" in caplog.text


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
async def test_a_browser(start: Start, scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    listener = await start(f"aqueduct+{scheme}://127.0.0.1:0")
    with caplog.at_level(logging.WARNING, "aqueduct.carriers.stream"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(listener))
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(DEADLINE):
            await reader.read()
            await met(lambda: not listener.connections)
        writer.close()
    assert "it speaks HTTP" in caplog.text


async def test_a_peer_that_speaks_tls_but_another_protocol(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    listener = await start("aqueduct+tls://127.0.0.1:0")
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with caplog.at_level(logging.WARNING, "aqueduct.carriers.stream"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(listener), ssl=context)
        async with asyncio.timeout(DEADLINE):
            assert await reader.read() == b""
            await met(lambda: not listener.connections)
        writer.close()
    assert "the client speaks TLS but not Aqueduct (no common ALPN protocol)" in caplog.text


async def test_a_server_that_speaks_tls_but_another_protocol(tmp_path: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    assert isinstance(TLS.certificate, bytes) and isinstance(TLS.key, bytes)
    (tmp_path / "both.pem").write_bytes(TLS.certificate + TLS.key)
    context.load_cert_chain(tmp_path / "both.pem")

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    text = await refusal(f"aqueduct+tls://127.0.0.1:{port}?verify=off")
    assert "the server speaks TLS but not Aqueduct (no common ALPN protocol)" in text
    server.close()


async def test_tls_1_2_is_refused(start: Start) -> None:
    listener = await start("aqueduct+tls://127.0.0.1:0")
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", port_of(listener), ssl=context)
    await met(lambda: not listener.connections)


# Settings.


@pytest.mark.parametrize(
    ("tls", "words"),
    [
        (None, "TLS needs a certificate"),
        (dataclasses.replace(GOOD, key=TLS.key), "ServerTls.key is not the key of"),
        (dataclasses.replace(GOOD, key=None), "no usable private key"),
        (dataclasses.replace(GOOD, client_ca=b"x"), "client_ca (given as bytes) holds no"),
        (ServerTls("/nowhere/c.pem"), "certificate '/nowhere/c.pem' cannot be read"),
    ],
)
async def test_settings_of_a_server_that_cannot_work(tls: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await stream.listen(
            Address.parse("aqueduct+tls://127.0.0.1:0"), DEFAULT, tls, lambda carrier: None
        )
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "tls", "words"),
    [
        ("?ca=/nowhere/ca.pem", None, "ca '/nowhere/ca.pem' cannot be read"),
        ("", ClientTls(ca=b"no PEM"), "ca (given as bytes) holds no certificate"),
        ("", ClientTls(certificate=TLS.certificate), "no usable private key"),
        (
            "",
            ClientTls(certificate=TLS.certificate, key=GOOD.key),
            "ClientTls.key is not the key of ClientTls.certificate",
        ),
        ("?server_name=a", ClientTls(server_name="b"), "server_name is 'a' in the address"),
    ],
)
async def test_settings_of_a_client_that_cannot_work(
    options: str, tls: ClientTls | None, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        await stream.connect(Address.parse(f"aqueduct+tls://localhost:1{options}"), DEFAULT, tls)
    assert words in str(caught.value)


async def test_a_connection_lost_in_the_handshake(start: Start) -> None:
    listener = await start("aqueduct+tls://127.0.0.1:0")
    _, writer = await asyncio.open_connection("127.0.0.1", port_of(listener))
    await met(lambda: listener.half_open == 1)
    writer.write(b"\x16\x03\x01")
    writer.close()
    await met(lambda: not listener.connections)

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    text = await refusal(f"aqueduct+tls://127.0.0.1:{port}?verify=off")
    assert "the server closed the connection" in text or "reset the connection" in text
    server.close()
