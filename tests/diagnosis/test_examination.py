"""The doctor, before services that are set up wrongly in one way each."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import aqueduct
from aqueduct.address import Address
from aqueduct.carriers.certificates import ClientTls
from aqueduct.diagnosis import Finding, Severity, examine
from aqueduct.diagnosis.certificate_check import judge
from aqueduct.diagnosis.examination import _round_trips as round_trips
from aqueduct.diagnosis.findings import within
from aqueduct.diagnosis.machine_checks import packet_size, udp_buffers
from aqueduct.errors import ConfigError
from tests.carriers.certificates import Authority

US = Authority("us")
CA = ClientTls(ca=US.pem)
NOBODY = 65_534

service = aqueduct.Service("patients", benchmark=True)


def served(text: str) -> Address:
    return Address.parse(text)


def by_check(found: list[Finding]) -> dict[str, Finding]:
    made = {each.check: each for each in found}
    assert len(made) == len(found)
    return made


def failures(found: list[Finding]) -> set[str]:
    return {each.check for each in found if each.status is Severity.FAILED}


@asynccontextmanager
async def tls_service(*names: str, days: float = 60) -> AsyncIterator[int]:
    """A service over TLS and QUIC whose certificate is ours; gives its port."""
    certificate, key = US.issue("patients", *names, days=days, age=90)
    address = "aqueduct+tls://127.0.0.1:0"
    async with service.serving(address, certificate=certificate, key=key) as serving:
        yield served(serving.addresses[0]).port


@asynccontextmanager
async def tcp_server(answer: bytes | None) -> AsyncIterator[int]:
    """A server that says ``answer`` to what it is told; None: it is silent."""
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is not None:
            await reader.read(1)
            writer.write(answer)
        else:
            await done.wait()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            done.set()


async def test_a_good_service_has_nothing_wrong() -> None:
    async with tls_service("127.0.0.1") as port:
        found = by_check(await examine(f"aqueduct+tls://127.0.0.1:{port}", tls=CA))
    assert failures(list(found.values())) == set()
    assert found["name"].facts["addresses"] == ["127.0.0.1"]
    certificate = found["certificate"]
    assert certificate.status is Severity.OK
    assert certificate.facts["names"] == ["127.0.0.1"]
    assert 59 < certificate.facts["days"] < 61
    assert len(certificate.facts["subjects"]) == 1
    service_found = found["service"].facts
    assert service_found["service"] == "patients"
    assert service_found["library"] == service_found["library_here"]
    assert found["clock"].status is Severity.OK
    trip = found["round trip"].facts
    assert 0 < trip["least"] <= trip["median"] <= trip["most"]
    # Nothing listens for QUIC, and TLS is spoken at the port for TCP: neither was asked for.
    assert found["reach aqueduct"].status is Severity.NOTE
    assert found["reach aqueduct+tcp"].status is Severity.NOTE
    assert found["path MTU"].facts["mtu"] > 1280


@pytest.mark.parametrize(
    ("names", "days", "tls", "says", "mends"),
    [
        (("127.0.0.1",), -1, CA, "has expired", "renew it"),
        (("other.example",), 60, CA, "for another name", "server_name"),
        (("127.0.0.1",), 60, None, "is not trusted here", "ca=FILE"),
    ],
    ids=["expired", "another name", "unknown CA"],
)
async def test_a_bad_certificate_is_told_beside_a_way_that_is_good(
    names: tuple[str, ...], days: float, tls: ClientTls | None, says: str, mends: str
) -> None:
    async with tls_service(*names, days=days) as port:
        found = await examine(f"aqueduct+tls://127.0.0.1:{port}", tls=tls)
    checks = by_check(found)
    assert failures(found) == {"certificate", "service"}
    assert says in checks["certificate"].text
    assert mends in checks["certificate"].remedy
    assert checks["reach aqueduct+tls"].status is Severity.OK


async def test_a_certificate_that_ends_soon_is_warned_of() -> None:
    async with tls_service("127.0.0.1", days=3) as port:
        found = by_check(await examine(f"aqueduct+tls://127.0.0.1:{port}", tls=CA))
    assert found["certificate"].status is Severity.WARNING
    assert "renew it before" in found["certificate"].remedy


async def test_where_nothing_listens_all_that_can_be_said_is_said() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound, and no listener
        port = sock.getsockname()[1]
        found = await examine(f"aqueduct+tls://127.0.0.1:{port}")
    checks = by_check(found)
    assert failures(found) == {"reach aqueduct+tls", "service"}
    assert "refused" in checks["reach aqueduct+tls"].text
    assert "ss -ltn" in checks["reach aqueduct+tls"].remedy
    assert checks["certificate"].status is Severity.NOTE
    assert checks["UDP buffers"].status is not Severity.FAILED


@contextmanager
def dropped_connects() -> Iterator[int]:
    """A port whose SYNs are dropped: the queue of its listener is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = []
        try:
            for _ in range(3):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
                fillers.append(filler)
            yield listener.getsockname()[1]
        finally:
            for filler in fillers:
                filler.close()


async def test_a_firewall_that_drops_is_named() -> None:
    with dropped_connects() as port:
        found = await examine(f"aqueduct+tcp://127.0.0.1:{port}", timeout=0.4)
    checks = by_check(found)
    assert failures(found) == {"reach aqueduct+tcp", "service"}
    assert f"let TCP port {port} through the firewalls" in checks["reach aqueduct+tcp"].remedy


async def test_a_listener_that_never_answers_is_no_firewall() -> None:
    async with tcp_server(None) as port:
        found = await examine(f"aqueduct+tls://127.0.0.1:{port}", timeout=0.4)
    checks = by_check(found)
    assert failures(found) == {"reach aqueduct+tls", "service"}
    assert "was reached, but" in checks["reach aqueduct+tls"].text
    assert "firewall" not in checks["reach aqueduct+tls"].remedy
    assert checks["certificate"].status is Severity.NOTE


@pytest.mark.parametrize("scheme", ["aqueduct+tls", "aqueduct+tcp"])
async def test_a_server_of_another_protocol_is_recognized(scheme: str) -> None:
    async with tcp_server(b"HTTP/1.1 400 Bad Request\r\n\x1b[31m\r\n") as port:
        found = await examine(f"{scheme}://127.0.0.1:{port}", timeout=2)
    checks = by_check(found)
    assert failures(found) == {f"reach {scheme}", "service"}
    assert "it speaks HTTP" in checks[f"reach {scheme}"].text
    assert "correct the scheme or the port" in checks[f"reach {scheme}"].remedy
    assert all(each.text.isprintable() for each in found)


async def test_blocked_udp_is_told_with_the_carrier_that_works() -> None:
    async with tls_service("127.0.0.1") as port:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
            silent.bind(("127.0.0.1", port))
            found = await examine(f"aqueduct://127.0.0.1:{port}", tls=CA, timeout=1.5)
    check = by_check(found)["reach aqueduct"]
    assert check.status is Severity.FAILED
    assert f"let UDP port {port} through the firewalls" in check.remedy
    assert "aqueduct+tls:// works" in check.remedy


async def test_over_quic_the_certificate_and_the_datagrams_are_told() -> None:
    certificate, key = US.issue("patients", "127.0.0.1", "*.example", days=60)
    address = "aqueduct://127.0.0.1:0"
    async with service.serving(address, certificate=certificate, key=key) as serving:
        port = served(serving.addresses[0]).port
        found = by_check(await examine(f"aqueduct://127.0.0.1:{port}", tls=CA))
    assert failures(list(found.values())) == set()
    assert sorted(found["certificate"].facts["names"]) == ["*.example", "127.0.0.1"]
    assert found["datagrams"].facts["size"] >= 1200


@contextmanager
def without_privileges() -> Iterator[None]:
    """As a user who may not everything: root is nobody for a while."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


async def test_a_socket_file_without_permission_is_told_with_its_rights() -> None:
    with tempfile.TemporaryDirectory(prefix="aq-") as folder:
        os.chmod(folder, 0o755)
        path = f"{folder}/s"
        async with service.serving(f"aqueduct+unix://{path}"):
            good = await examine(f"aqueduct+unix://{path}")
            os.chmod(path, 0)
            with without_privileges():
                found = await examine(f"aqueduct+unix://{path}")
    assert failures(good) == set()
    assert failures(found) == {"socket file", "reach aqueduct+unix", "service"}
    assert by_check(found)["socket file"].facts["mode"] == "0000"
    assert "mode=0660" in by_check(found)["socket file"].remedy


async def test_a_socket_file_that_is_none_is_told(tmp_path: Path) -> None:
    missing = await examine(f"aqueduct+unix://{tmp_path}/none")
    assert "socket file" in failures(missing)
    (tmp_path / "plain").touch()
    plain = by_check(await examine(f"aqueduct+unix://{tmp_path}/plain"))
    assert "it is no socket" in plain["socket file"].text


async def test_an_address_of_the_name_that_does_not_answer_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def both(host: str, port: int, *args: object, **options: object) -> list[tuple[object, ...]]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (each, port)) for each in ("127.0.0.1", "127.0.0.2")]

    async with service.serving("aqueduct+tcp://127.0.0.1:0") as serving:
        port = served(serving.addresses[0]).port
        # No name of this machine has two addresses for certain.
        monkeypatch.setattr(socket, "getaddrinfo", both)
        found = by_check(await examine(f"aqueduct+tcp://two.example:{port}"))
    assert found["name"].facts["addresses"] == ["127.0.0.1", "127.0.0.2"]
    assert found["reach aqueduct+tcp"].status is Severity.OK
    assert found["addresses"].status is Severity.WARNING
    assert list(found["addresses"].facts["bad"]) == [f"127.0.0.2:{port}"]


async def test_a_name_that_does_not_resolve_ends_what_needs_it() -> None:
    found = await examine("aqueduct+tls://no-such-host.invalid", timeout=5)
    assert failures(found) == {"name"}
    assert [each.check for each in found] == ["name", "UDP buffers"]


async def test_without_a_token_the_versions_are_not_known() -> None:
    closed = aqueduct.Service("closed", authorize=lambda call: call.token == "secret")
    async with closed.serving("aqueduct+tcp://127.0.0.1:0") as serving:
        found = by_check(await examine(serving.addresses[0]))
        wrong = by_check(await examine(serving.addresses[0], token="guess"))
        shown = by_check(await examine(serving.addresses[0], token="secret"))
    assert wrong["service"].status is Severity.FAILED
    assert "does not answer this token" in wrong["service"].text
    assert wrong["service"].remedy == "show a token that the service knows: --token-file FILE"
    assert found["service"].status is Severity.NOTE
    assert "--token-file" in found["service"].remedy
    assert "does not tell its time" in found["clock"].text
    assert shown["service"].status is Severity.OK
    assert "does not tell its time" in shown["clock"].text


async def test_a_clock_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = SimpleNamespace(time=lambda: time.time() + 120)
    monkeypatch.setattr("aqueduct.service.benchmark.time", fast)
    async with service.serving("aqueduct+tcp://127.0.0.1:0") as serving:
        found = by_check(await examine(serving.addresses[0]))
    assert found["clock"].status is Severity.WARNING
    assert "s ahead of ours" in found["clock"].text
    assert 119 < found["clock"].facts["skew"] < 121


@pytest.mark.parametrize(
    ("host", "command"),
    [
        ("models.example", "mtr models.example"),
        ("10.1.2.3", "mtr 10.1.2.3"),
        ("", "top"),
        ("localhost", "top"),
        ("127.0.0.1", "top"),
        ("[::1]", "top"),
    ],
)
async def test_round_trips_that_vary_come_with_the_command_for_this_host(
    host: str, command: str
) -> None:
    trips = iter([0.001] * 9 + [1.0])

    async def ping() -> float:
        return next(trips)

    found = await round_trips(ping, host)
    assert found.status is Severity.WARNING
    assert found.remedy.endswith(f": {command}")


async def test_a_socket_file_without_a_listener_asks_for_the_service(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="aq-") as folder:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(f"{folder}/s")
        found = by_check(await examine(f"aqueduct+unix://{folder}/s"))
    assert found["reach aqueduct+unix"].status is Severity.FAILED
    assert found["reach aqueduct+unix"].remedy.startswith("start the service")


async def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="only services at aqueduct://"):
        await examine("reactivesocket+tcp://localhost")
    with pytest.raises(ConfigError, match="no certificate on this carrier"):
        await examine("aqueduct+tcp://localhost", tls=CA)


async def test_a_check_that_hangs_or_breaks_is_a_finding() -> None:
    async def hang() -> list[Finding]:
        await asyncio.Event().wait()
        return []

    async def broken() -> list[Finding]:
        raise RuntimeError("two\nlines")

    (slow,) = await within(0.01, "slow", hang)
    (bad,) = await within(10, "bad", broken)
    assert (slow.status, slow.text) == (Severity.FAILED, "no answer within 0.01 s")
    assert (bad.status, bad.text) == (Severity.FAILED, "two lines")


def test_buffers_that_are_too_small_come_with_the_command() -> None:
    found = udp_buffers(1 << 30, needed=True)
    assert found.status is Severity.WARNING
    assert found.remedy.startswith("sysctl -w net.core.")
    assert udp_buffers(1 << 30, needed=False).status is Severity.NOTE
    assert udp_buffers(4096, needed=True).status is Severity.OK


def test_the_packet_size_of_the_way_is_read() -> None:
    found = packet_size(socket.AF_INET, ("127.0.0.1", 9), quic=True)
    assert (found.status, found.facts["mtu"] >= 1500) == (Severity.OK, True)
    nowhere = packet_size(socket.AF_INET, ("255.255.255.255", 9), quic=True)
    assert nowhere.status is Severity.NOTE and "Permission denied" in nowhere.text


def test_a_pin_is_compared() -> None:
    other = "sha256:" + 64 * "0"
    certificate, _ = US.issue("patients", "127.0.0.1", days=60)
    from cryptography import x509

    chain = x509.load_pem_x509_certificates(certificate)
    place = Address.parse(f"aqueduct+tls://127.0.0.1?fingerprint={other}")
    (found,) = judge(place, None, chain)
    assert found.status is Severity.FAILED
    assert found.facts["fingerprint"] in found.remedy
    pinned = Address.parse(f"aqueduct+tls://127.0.0.1?fingerprint={found.facts['fingerprint']}")
    assert judge(pinned, None, chain)[0].status is Severity.OK
    unchecked = Address.parse("aqueduct+tls://127.0.0.1?verify=off")
    assert judge(unchecked, None, chain)[0].status is Severity.WARNING
    (none,) = judge(place, None, [])
    assert none.status is Severity.FAILED
    assert "--certificate FILE --key FILE" in none.remedy
