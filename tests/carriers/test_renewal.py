"""Certificates that are renewed while a service runs: who sees which, and what cannot be used."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

import aqueduct
from aqueduct import reactivesocket
from aqueduct.carriers import renewal
from aqueduct.carriers.certificates import ClientTls, ServerTls, certificates_of, fingerprint_of
from aqueduct.carriers.renewal import Renewed
from aqueduct.errors import AqueductError, ConfigError
from tests.carriers.certificates import Authority
from tests.service.reactive_clients import asked, rows_of, words
from tests.service.test_workers import BRIEF, crew
from tests.support.calls import config, numbers, until

US = Authority("us")
OURS = ClientTls(ca=US.pem)
NAMES = ("localhost", "127.0.0.1")
ADDRESSES = (
    "aqueduct://127.0.0.1:0",
    "aqueduct+tls://127.0.0.1:0",
    "aqueduct+tls://127.0.0.1:0?resume=60s",
    "reactivesocket+tls://127.0.0.1:0",
    "reactivesocket+wss://127.0.0.1:0",
)
CHECKED = config(timing={"certificate_check": 0.02, "close_linger": 0.1})
LOGGER = "aqueduct.carriers.renewal"


class Files:
    """A certificate and its key in a directory, as a program renews them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        self.fingerprint = ""

    def renew(self) -> str:
        """Puts new files in their places; the fingerprint."""
        certificate, key = US.issue("a server", *NAMES)
        put(self.certificate, certificate)
        put(self.key, key)
        self.fingerprint = fingerprint_of(certificates_of(certificate, "it")[0])
        return self.fingerprint

    @property
    def tls(self) -> ServerTls:
        return ServerTls(self.certificate, self.key)


def put(path: Path, content: bytes) -> None:
    """Replaces a file in one step."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    new.replace(path)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    found = Files(tmp_path)
    found.renew()
    return found


def echo(settings: Any = CHECKED) -> aqueduct.Service:
    service = aqueduct.Service("renewed", config=settings)

    @service.handler("echo")
    async def same(batches):
        async for batch in batches:
            yield batch

    @service.handler("one")
    async def one(batch):
        return batch

    return service


async def rows_from(given: asyncio.Queue[int]) -> AsyncIterator[Any]:
    while True:
        yield numbers(await given.get())


async def reaches(address: str, fingerprint: str) -> bool:
    """Whether a new connection is shown the certificate of this fingerprint."""
    joint = "&" if "?" in address else "?"
    pinned = f"{address}{joint}fingerprint={fingerprint}"
    try:
        if address.startswith("reactivesocket"):
            await (await reactivesocket.connect(pinned)).close()
        else:
            await (await aqueduct.Client.connect(pinned)).close()
    except AqueductError as error:
        if "fingerprint" not in str(error):
            raise
        return False
    return True


async def becomes(address: str, fingerprint: str) -> None:
    async with asyncio.timeout(20):
        while not await reaches(address, fingerprint):  # noqa: ASYNC110  the service says nothing
            await asyncio.sleep(0.02)


async def test_a_new_certificate_is_for_new_connections_and_old_ones_go_on(files, caplog):
    caplog.set_level(logging.INFO, LOGGER)
    before = files.fingerprint
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        running = await enter(echo().serving(*ADDRESSES, tls=files.tls, drain=0))
        streams, askers = [], []
        for address in running.addresses:
            if address.startswith("reactivesocket"):
                askers.append(await enter(await reactivesocket.connect(address, tls=OURS)))
                continue
            client = await enter(await aqueduct.Client.connect(address, tls=OURS))
            given: asyncio.Queue[int] = asyncio.Queue()
            stream = client.exchange("echo", rows_from(given), schema=numbers().schema)
            given.put_nowait(1)
            assert (await anext(stream)) == numbers(1)
            streams.append((given, stream))
        after = files.renew()
        for address in running.addresses:
            await becomes(address, after)
            assert not await reaches(address, before)
        for given, stream in streams:  # the same call, of the same connection
            given.put_nowait(2)
            assert (await anext(stream)) == numbers(2)
            await stream.aclose()
        for asker in askers:
            assert rows_of((await asker.request(asked("one", words("a")))).data) == [["a"]]
        assert len(running.connections) >= len(ADDRESSES)
    said = [each.getMessage() for each in caplog.records if after in each.getMessage()]
    assert said and "valid until 20" in said[0]


async def test_files_of_no_use_change_nothing_and_are_tried_again(files, caplog):
    caplog.set_level(logging.INFO, LOGGER)
    before = files.fingerprint
    whole = files.certificate.read_bytes()
    at = ("aqueduct+tls://127.0.0.1:0", "reactivesocket+wss://127.0.0.1:0")

    def complaints() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]

    def said_often(number: int) -> bool:
        return len(complaints()) >= number

    async with echo().serving(*at, tls=files.tls, drain=0) as running:
        others, other_key = US.issue("another", *NAMES)
        for number, (path, content, why) in enumerate(
            (
                (files.certificate, whole[: len(whole) // 2], f"certificate '{files.certificate}'"),
                (
                    files.certificate,
                    whole + US.pem[:200],
                    "has 2 certificates in PEM form, and 1 of",
                ),
                (files.certificate, others, "ServerTls.key is not the key of"),
                (files.key, b"", f"key '{files.key}' holds no usable private key"),
            ),
            1,
        ):
            put(path, content)
            await until(partial(said_often, number))
            text = complaints()[-1]
            assert why in text and text.endswith("; what was read before stays in use"), text
            for address in running.addresses:
                assert await reaches(address, before)
        files.key.unlink()
        await until(lambda: "cannot be read: No such file" in complaints()[-1])
        put(files.key, other_key)
        after = fingerprint_of(certificates_of(others, "it")[0])
        for address in running.addresses:
            await becomes(address, after)
        assert len(complaints()) == len(set(complaints())), "each is said once"


@pytest.mark.parametrize(
    ("validity", "why"),
    [
        ({"days": -1}, "has expired, on 20"),
        ({"age": -1}, "is not valid before 20"),
    ],
    ids=["expired", "of tomorrow"],
)
async def test_a_certificate_that_is_not_valid_now_replaces_none(files, caplog, validity, why):
    caplog.set_level(logging.INFO, LOGGER)
    before = files.fingerprint
    async with echo().serving("aqueduct+tls://127.0.0.1:0", tls=files.tls, drain=0) as running:
        certificate, key = US.issue("a server", *NAMES, **validity)
        put(files.certificate, certificate)
        put(files.key, key)
        await until(lambda: why in caplog.text)
        assert caplog.text.count("what was read before stays in use") == 1
        assert await reaches(running.addresses[0], before)
        await becomes(running.addresses[0], files.renew())


async def test_a_service_with_a_certificate_that_has_expired_warns(files, caplog):
    certificate, key = US.issue("a server", *NAMES, days=-0.5)
    put(files.certificate, certificate)
    put(files.key, key)
    at = ("aqueduct+tls://127.0.0.1:0", "aqueduct://127.0.0.1:0")
    async with echo().serving(*at, tls=files.tls, drain=0):
        pass
    (warning,) = (each for each in caplog.records if each.name == LOGGER)
    assert warning.levelname == "WARNING"
    text = f"the certificate '{files.certificate}' has expired, on 20"
    assert warning.getMessage().startswith(text)
    assert warning.getMessage().endswith(" UTC: clients will refuse it")


async def test_what_quic_cannot_show_stays_out_of_quic_alone(files, caplog):
    before = files.fingerprint
    at = ("aqueduct+tls://127.0.0.1:0", "aqueduct://127.0.0.1:0")
    async with echo().serving(*at, tls=files.tls, drain=0) as running:
        tls, quic = running.addresses
        key = ec.generate_private_key(ec.SECP521R1())
        made = US._build(US.name, key, ca=False, names=NAMES, days=2, age=1)
        put(files.certificate, made.public_bytes(serialization.Encoding.PEM))
        put(
            files.key,
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )
        await becomes(tls, fingerprint_of(made))
        await until(lambda: "secp521r1 signs no handshake over QUIC" in caplog.text)
        assert await reaches(quic, before)


async def test_the_swap_of_a_link_renews_as_in_a_secret_of_kubernetes(tmp_path):
    """``tls.crt`` leads to ``..data/tls.crt``, and ``..data`` to a directory that is replaced."""
    folder = tmp_path / "secret"
    folder.mkdir()

    def publish(name: str) -> str:
        version = Files(folder / name)
        version.folder.mkdir()
        found = version.renew()
        (folder / "..data_tmp").symlink_to(name)
        (folder / "..data_tmp").replace(folder / "..data")
        return found

    before = publish("..2026_01")
    for name in ("tls.crt", "tls.key"):
        (folder / name).symlink_to(f"..data/{name}")
    at = "aqueduct+tls://127.0.0.1:0"
    tls = ServerTls(folder / "tls.crt", folder / "tls.key")
    async with echo().serving(at, tls=tls, drain=0) as running:
        assert await reaches(running.addresses[0], before)
        after = publish("..2026_02")
        shutil.rmtree(folder / "..2026_01")
        await becomes(running.addresses[0], after)


async def test_the_cas_of_clients_are_renewed(files, tmp_path):
    them = Authority("them")
    ca = tmp_path / "clients.pem"
    ca.write_bytes(US.pem)
    mine, theirs = US.client("mine", ca=US.pem), them.client("theirs", ca=US.pem)

    async def taken(address: str, tls: ClientTls) -> bool:
        try:
            async with await aqueduct.Client.connect(address, tls=tls) as client:
                await client.call("echo", numbers(1))
        except AqueductError:
            return False
        return True

    tls = replace(files.tls, client_ca=ca)
    async with echo().serving("aqueduct+tls://127.0.0.1:0", tls=tls, drain=0) as running:
        (address,) = running.addresses
        assert not await taken(address, theirs)
        async with await aqueduct.Client.connect(address, tls=mine) as old:
            put(ca, them.pem)
            async with asyncio.timeout(20):
                while not await taken(address, theirs):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert not await taken(address, mine)
            assert await old.call("echo", numbers(1)) == numbers(1), "it was let in before"


async def test_no_thread_stays_and_none_looks_after_the_end(files):
    def looking() -> list[str]:
        return [each.name for each in threading.enumerate() if "certificates" in each.name]

    settings = config(timing={"certificate_check": 3600})
    async with echo(settings).serving(*ADDRESSES, tls=files.tls, drain=0):
        assert looking() == []
    async with echo().serving(*ADDRESSES, tls=files.tls, drain=0) as running:
        await becomes(running.addresses[0], files.renew())
    await until(lambda: looking() == [])
    handles: list[Any] = getattr(asyncio.get_running_loop(), "_scheduled")  # noqa: B009
    assert not [each for each in handles if not each.cancelled() and "_due" in repr(each)]


async def test_a_check_of_zero_never_looks(files):
    settings = config(timing={"certificate_check": 0})
    made: list[ServerTls] = []
    shown = Renewed(files.tls, made.append)
    shown.watch(settings.timing.certificate_check)
    assert shown._watcher is None
    with pytest.raises(ConfigError, match=r"Timing.certificate_check is -1"):
        config(timing={"certificate_check": -1})


async def test_files_that_say_the_same_are_not_taken_anew(files, monkeypatch):
    made: list[ServerTls] = []
    shown = Renewed(files.tls, made.append)
    put(files.key, files.key.read_bytes())
    assert shown.look() is None
    assert shown.look() == "" and len(made) == 1
    files.renew()
    assert shown.look() is None and len(made) == 1
    assert "read again" in (shown.look() or "") and len(made) == 2


def test_files_that_are_being_written_are_not_read(files, tmp_path):
    """A bundle that ends behind a whole certificate looks like a bundle."""
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(US.pem)
    them = Authority("them").pem
    tls = replace(files.tls, client_ca=bundle)
    shown = Renewed(tls, lambda tls: Path(str(tls.client_ca)).read_bytes())
    with bundle.open("wb", buffering=0) as file:
        for part in (them, US.pem, Authority("more").pem):
            file.write(part)
            assert shown.look() is None
            assert shown.current == US.pem
    assert "read again" in (shown.look() or "")
    assert shown.current == bundle.read_bytes() and shown.current.startswith(them)


def test_a_complaint_stays_while_files_are_being_written(files, caplog):
    caplog.set_level(logging.INFO, LOGGER)
    shown = Renewed(files.tls, lambda tls: certificates_of(tls.certificate, "certificate"))
    watcher = renewal._Watcher()
    watcher._watched[shown] = 0.01
    whole = files.certificate.read_bytes()

    def said_after(content: bytes, look: Callable[[], Any]) -> list[str]:
        put(files.certificate, content)
        caplog.clear()
        look()
        return [each.levelname for each in caplog.records]

    assert said_after(b"nothing", watcher._look) == ["ERROR"]
    assert said_after(b"nothing else", lambda: watcher._look_at(shown, set())) == []
    assert said_after(b"nothing at all", watcher._look) == []
    assert said_after(whole, watcher._look) == ["INFO"]


def test_files_are_found_after_the_process_has_gone_elsewhere(files, monkeypatch, tmp_path):
    monkeypatch.chdir(files.folder)
    made: list[ServerTls] = []
    shown = Renewed(ServerTls("tls.crt", "tls.key"), made.append)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    after = files.renew()
    assert shown.look() is None
    assert after in (shown.look() or "")


def test_a_pipe_is_read_once(files, tmp_path):
    """As ``--key <(program)`` of a shell makes one: to open it again would never return."""
    pipe = tmp_path / "key.pipe"
    os.mkfifo(pipe)
    key = files.key.read_bytes()
    writer = threading.Thread(target=lambda: pipe.write_bytes(key), daemon=True)
    writer.start()
    shown = Renewed(ServerTls(files.certificate, pipe), lambda tls: Path(str(tls.key)).read_bytes())
    assert shown.current == key
    writer.join(10)
    files.renew()
    assert shown.look() == ""


WORKERS = """
from aqueduct.config import Config, Timing
from aqueduct.service.service import Service

service = Service("crew", config=Config(timing=Timing(certificate_check=0.05)))


@service.handler("echo")
async def echo(batches):
    async for batch in batches:
        yield batch
"""


async def test_workers_renew_too(files, tmp_path):
    (tmp_path / "crew.py").write_text(WORKERS)
    listen = ("--listen", "aqueduct://127.0.0.1:0", "--listen", "aqueduct+tls://127.0.0.1:0")
    shown = ("--certificate", str(files.certificate), "--key", str(files.key))
    with crew(tmp_path, *listen, *shown, "--log-format", "json") as running:
        assert running.process.stdout is not None
        other = running.process.stdout.readline().removeprefix("listening on ").strip()
        olds = [
            await aqueduct.Client.connect(address, tls=OURS, config=BRIEF)
            for address in (running.address, other)
        ]
        after = files.renew()
        for address in (running.address, other):
            for _ in range(2):
                await becomes(address, after)
            for _ in range(4):  # of both workers by now, whichever takes it
                await becomes(address, after)
        for old in olds:
            assert await old.call("echo", numbers(1)) == numbers(1)
            await old.close()
        told = [json.loads(await running.told("read again")) for _ in range(2)]
        assert {each["logger"] for each in told} == {LOGGER}
        pids = {each["process"] for each in told}
        assert len(pids) == 2 and running.process.pid not in pids, "each worker says so"
        running.process.terminate()
        assert await running.ended() == 0
        last = json.loads(await running.told("draining"))
        assert last["logger"] == "aqueduct.service.supervisor" and "process" not in last
