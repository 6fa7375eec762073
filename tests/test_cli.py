"""The command as users run it: real processes, real sockets, real signals."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pyarrow as pa
import pytest
from cryptography.hazmat.primitives import serialization

import aqueduct
from aqueduct.carriers.certificates import dev_certificate
from aqueduct.client.client import Client
from aqueduct.errors import AqueductError, CallError, Refused
from tests.carriers.certificates import Authority

WORDS = pa.schema([pa.field("word", pa.string())])
APP = '''
"""A service as users write it, beside their shell."""
import asyncio

import pyarrow as pa

from aqueduct.service.service import Service

WORDS = pa.schema([pa.field("word", pa.string())])
LENGTHS = pa.schema([pa.field("length", pa.int32(), nullable=False)])
service = Service("words")
nothing = 7


@service.handler("echo", input=WORDS)
async def echo(batches):
    """Gives every batch back."""
    async for batch in batches:
        yield batch


@service.handler("lengths", input=WORDS, output=LENGTHS, concurrency=4, idempotent=True)
def lengths(batch):
    return pa.record_batch([pa.compute.utf8_length(batch.column(0))], schema=LENGTHS)


@service.handler("stuck", input=WORDS)
async def stuck(batches):
    async for batch in batches:
        yield batch
        await asyncio.Event().wait()


@service.handler("drop", kind="sink")
async def drop(batches):
    async for batch in batches:
        pass
'''

COMMAND = [sys.executable, "-m", "aqueduct.cli"]

# Each in a process forked from one that has imported everything, which is most of their time.
EACH = """
import json, os, sys
import aqueduct.cli

for place, (arguments, variables) in enumerate(json.loads(sys.argv[1])):
    if not (child := os.fork()):
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{place}.{name}", os.O_WRONLY | os.O_CREAT), number)
        os.environ.update(variables)
        sys.argv = ["aqueduct", *arguments]
        sys.exit(aqueduct.cli.main())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def environment(**more: str) -> dict[str, str]:
    """The package under test, whatever directory the command runs in."""
    inherited = {name: value for name, value in os.environ.items() if name != "AQUEDUCT_DEBUG"}
    return {**inherited, "PYTHONPATH": str(Path(aqueduct.__file__).parents[1]), **more}


def run(*arguments: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(**more),
        timeout=50,
        check=False,
    )


def with_apps(folder: Path) -> Path:
    (folder / "app.py").write_text(APP)
    (folder / "broken.py").write_text("raise RuntimeError('no such\\nlicence')\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_apps(tmp_path)


def run_each(
    folder: Path, commands: Sequence[tuple[Sequence[str], dict[str, str]]]
) -> list[subprocess.CompletedProcess[str]]:
    """What commands come to, each with its arguments and environment, in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(commands)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(),
        timeout=170,
        check=True,
    )
    return [
        subprocess.CompletedProcess(
            arguments,
            int(status),
            *((folder / f"{place}.{name}").read_text() for name in ("out", "err")),
        )
        for place, ((arguments, _), status) in enumerate(
            zip(commands, ended.stdout.split(), strict=True)
        )
    ]


class Served:
    """``aqueduct serve``, running."""

    def __init__(self, process: subprocess.Popen[str], listeners: int) -> None:
        self.process = process
        assert process.stdout is not None
        self.lines = [process.stdout.readline() for _ in range(listeners)]
        self.addresses = [line.removeprefix("listening on ").strip() for line in self.lines]
        self.address = self.addresses[0]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_draining(self) -> None:
        assert self.process.stderr is not None
        assert " draining; a second signal" in self.process.stderr.readline()

    def ended(self) -> int:
        return self.process.wait(30)


@contextmanager
def serving(
    folder: Path, *options: str, service: str = "app:service", listeners: int = 1
) -> Iterator[Served]:
    options = options or ("--listen", "aqueduct://127.0.0.1:0", "--dev-certificate")
    process = subprocess.Popen(
        [*COMMAND, "serve", service, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(),
    )
    with process:
        try:
            yield Served(process, listeners)
        finally:
            process.kill()


def words(*some: str) -> pa.RecordBatch:
    return pa.record_batch([pa.array(some)], schema=WORDS)


# ----------------------------------------------------------------- serving


async def test_a_service_is_served_with_a_certificate_that_its_address_pins(folder: Path):
    with serving(folder) as served:
        assert re.fullmatch(
            r"listening on aqueduct://127\.0\.0\.1:\d+\?fingerprint=sha256:[0-9a-f]{64}\n",
            served.lines[0],
        )
        async with await Client.connect(served.address) as client:
            stream = client.exchange("echo", [words("a"), words("b", "c")], schema=WORDS)
            assert [batch async for batch in stream] == [words("a"), words("b", "c")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_status_zero(folder: Path, number: signal.Signals):
    with serving(folder) as served:
        served.signal(number)
        assert served.ended() == 0


async def test_a_signal_makes_it_tell_its_state(folder: Path):
    with serving(folder) as served:
        async with await Client.connect(served.address) as client:
            stream = client.exchange("echo", [words("a")], schema=WORDS)
            assert [batch async for batch in stream] == [words("a")]
            for _ in range(2):
                served.signal(signal.SIGUSR1)
                assert served.process.stderr is not None
                line = await asyncio.to_thread(served.process.stderr.readline)
                state = json.loads(line)
                assert state["counters"]["calls"] == 1
                (connection,) = state["connections"]
                assert connection["side"] == "server"
                assert connection["channel_count"] == len(connection["channels"]) >= 1
                assert connection["congestion_window"] > 0
        served.signal(signal.SIGTERM)
        assert served.ended() == 0


async def test_a_drain_lets_calls_end_and_takes_no_more(folder: Path):
    with serving(folder) as served:
        async with await Client.connect(served.address) as client:
            reading = iter([words("before"), words("after")])

            async def batches():
                yield next(reading)
                await signalled.wait()
                yield next(reading)

            signalled = asyncio.Event()
            stream = client.exchange("echo", batches(), schema=WORDS)
            assert await anext(stream) == words("before")
            served.signal(signal.SIGTERM)
            served.wait_draining()
            with pytest.raises((Refused, AqueductError)):
                [batch async for batch in client.exchange("echo", [words("x")], schema=WORDS)]
            signalled.set()
            assert [batch async for batch in stream] == [words("after")]
        assert served.ended() == 0


async def test_a_second_signal_ends_at_once_and_tells_the_client(folder: Path):
    with serving(folder) as served:
        async with await Client.connect(served.address) as client:
            stream = client.exchange("stuck", [words("a"), words("b")], schema=WORDS)
            assert await anext(stream) == words("a")
            served.signal(signal.SIGINT)
            served.wait_draining()
            served.signal(signal.SIGINT)
            with pytest.raises((CallError, ConnectionError)):
                await anext(stream)
            assert served.ended() != 0


def test_it_listens_on_several_addresses(folder: Path):
    options = ["--listen", "aqueduct://127.0.0.1:0"] * 2 + ["--dev-certificate"]
    with serving(folder, *options, listeners=2) as served:
        assert len(set(served.addresses)) == 2
        for address in served.addresses:
            assert run("ping", address, "--count", "1").returncode == 0


def test_it_is_served_with_a_certificate_of_ones_own(folder: Path):
    tls = dev_certificate()
    assert isinstance(tls.certificate, bytes)
    assert isinstance(tls.key, bytes)
    (folder / "cert.pem").write_bytes(tls.certificate)
    (folder / "key.pem").write_bytes(tls.key)
    options = [
        "--listen",
        "aqueduct://127.0.0.1:0",
        "--certificate",
        "cert.pem",
        "--key",
        "key.pem",
    ]
    with serving(folder, *options) as served:
        assert "fingerprint" not in served.address
        trusted = f"{served.address}?ca={folder / 'cert.pem'}&server_name=localhost"
        assert run("ping", trusted, "--count", "1").returncode == 0
        refused = run("ping", served.address)
        assert refused.returncode == 1
        assert "certificate" in refused.stderr


@pytest.mark.parametrize("workers", [(), ("--workers", "1")])
def test_clients_may_have_to_show_a_certificate(folder: Path, workers: tuple[str, ...]):
    for name in ("mine", "theirs"):
        tls = dev_certificate()
        assert isinstance(tls.certificate, bytes)
        assert isinstance(tls.key, bytes)
        (folder / f"{name}.pem").write_bytes(tls.certificate)
        (folder / f"{name}.key").write_bytes(tls.key)
    options = [
        "--listen",
        "aqueduct+tls://localhost:0",
        "--certificate",
        "mine.pem",
        "--key",
        "mine.key",
    ]
    with serving(folder, *options, "--client-ca", "theirs.pem", *workers) as served:
        address = f"{served.address}?ca={folder / 'mine.pem'}"
        shown = ["--certificate", str(folder / "theirs.pem"), "--key", str(folder / "theirs.key")]
        assert run("ping", address, *shown, "--count", "1").returncode == 0
        done = run("describe", address, *shown)
        assert done.returncode == 0
        assert done.stdout.startswith("words  ")
        for refused in (run("ping", address), run("describe", address)):
            assert refused.returncode == 1
            assert len(refused.stderr.splitlines()) == 1
            assert "certificate" in refused.stderr


def test_a_key_may_be_encrypted_and_the_ca_be_named(folder: Path):
    tls = dev_certificate()
    assert isinstance(tls.certificate, bytes) and isinstance(tls.key, bytes)
    key = serialization.load_pem_private_key(tls.key, None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (folder / "cert.pem").write_bytes(tls.certificate)
    (folder / "key.pem").write_bytes(encrypted)
    shown = ["--certificate", "cert.pem", "--key", "key.pem", "--key-password"]
    with serving(folder, "--listen", "aqueduct+tls://localhost:0", *shown, "secret") as served:
        pinged = run("ping", served.address, "--ca", str(folder / "cert.pem"), "--count", "1")
        assert pinged.returncode == 0 and "round trip 1" in pinged.stdout
        assert run("ping", served.address, "--count", "1").returncode == 1
    refused = run("serve", "app:service", *LISTEN, *shown, "wrong", cwd=folder)
    assert refused.returncode == 1 and "key.pem" in refused.stderr


def test_the_password_of_a_key_comes_from_a_file(folder: Path):
    theirs, ours = Authority("services"), Authority("clients")
    password = "two w\udcf6rds"  # in Latin-1
    for name, authority in (("service", theirs), ("client", ours)):
        pem, key = authority.issue(name, "localhost", "127.0.0.1", days=2)
        (folder / f"{name}.pem").write_bytes(pem)
        loaded = serialization.load_pem_private_key(key, None)
        encryption = serialization.BestAvailableEncryption(os.fsencode(password))
        if name == "client":
            key = loaded.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
            )
        (folder / f"{name}.key").write_bytes(key)
        (folder / f"{name}-ca.pem").write_bytes(authority.pem)
    (folder / "password").write_bytes(os.fsencode(f"{password}\n"))
    (folder / "lines").write_text("two\nlines\n")
    served = ["--certificate", "service.pem", "--key", "service.key", "--client-ca"]
    client = ["--ca", "service-ca.pem", "--certificate", "client.pem", "--key", "client.key"]
    listen = ("--listen", "aqueduct+tls://localhost:0")
    with serving(folder, *listen, *served, "client-ca.pem") as at:

        def ping(*more: str) -> subprocess.CompletedProcess[str]:
            return run("ping", at.address, "--count", "1", *client, *more, cwd=folder)

        assert ping("--key-password-file", "password").returncode == 0
        assert ping("--key-password", password).returncode == 0
        assert ping("--key-password", "wrong").returncode == 1
        told = ping("--key-password-file", "lines")
        assert told.returncode == 1 and "lines must hold one line, the password" in told.stderr
        assert "two" not in told.stderr
        assert ping("--key-password-file", "service.key", "--key-password", "x").returncode == 2
        alone = run("ping", at.address, "--key-password", "x")
        assert alone.returncode == 2 and "--key-password belongs to --cert" in alone.stderr
        alone = run("ping", at.address, "--key-password-file", "password", cwd=folder)
        assert alone.returncode == 2 and "--key-password-file belongs to --cert" in alone.stderr
    own = ("--certificate", "client.pem", "--key", "client.key", "--key-password-file", "password")
    for workers in ((), ("--workers", "1")):
        with serving(folder, *listen, *own, *workers) as at:
            told = run("ping", at.address, "--ca", "client-ca.pem", "--count", "1", cwd=folder)
            assert told.returncode == 0, told.stderr
    plain = ("--listen", "aqueduct+tcp://127.0.0.1:0")
    alone = run("serve", "app:service", *plain, *own[4:], cwd=folder)
    assert alone.returncode == 2 and "--key-password-file belongs to --cert" in alone.stderr


def test_without_certificates_it_is_served_where_none_is_needed(folder: Path):
    options = ["--listen", f"aqueduct+unix://{folder}/app.sock", "--listen"]
    with serving(folder, *options, "aqueduct+tcp://127.0.0.1:0", listeners=2) as served:
        for address in served.addresses:
            assert run("describe", address).returncode == 0


# ------------------------------------------------------- describe and ping


def test_describe_tells_the_version_the_handlers_and_their_schemas(folder: Path):
    with serving(folder) as served:
        done = run("describe", served.address)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[0].startswith("words  (aqueduct-arrow ")
        told = done.stdout.split("\n\n")
        assert told[1].splitlines() == [
            "echo  (exchange)",
            "  Gives every batch back.",
            "  input:",
            "    word  string",
            "  output: depends on the call",
        ]
        assert told[2].splitlines() == [
            "lengths  (exchange, concurrency 4, idempotent)",
            "  input:",
            "    word  string",
            "  output:",
            "    length  int32 not null",
        ]
        assert "drop  (sink)\n  input: any" in done.stdout
        assert '"name": "lengths"' in run("describe", served.address, "--json").stdout


def test_ping_measures_the_handshake_and_round_trips(folder: Path):
    with serving(folder) as served:
        done = run("ping", served.address, "--count", "3")
        assert done.returncode == 0, done.stderr
        assert re.match(r"handshake with .*: \d+\.\d+ ms\n", done.stdout)
        assert len(re.findall(r"^round trip \d: \d+\.\d+ ms$", done.stdout, re.MULTILINE)) == 3
        assert re.search(r"^min .* ms, median .* ms, max .* ms$", done.stdout, re.MULTILINE)


def test_another_fingerprint_is_refused_and_named(folder: Path):
    with serving(folder) as served:
        wrong = re.sub(r"[0-9a-f]{64}", "0" * 64, served.address)
        for command in ("ping", "describe"):
            done = run(command, wrong)
            assert done.returncode == 1
            assert len(done.stderr.splitlines()) == 1
            assert "fingerprint" in done.stderr


# ------------------------------------------------------------------ errors

LISTEN = ["--listen", "aqueduct://127.0.0.1:0"]


FAILURES: list[tuple[list[str], str]] = [
    (["serve", "app", *LISTEN, "--dev-certificate"], "MODULE:SERVICE"),
    (["serve", "missing:service", *LISTEN, "--dev-certificate"], "No module named 'missing'"),
    (
        ["serve", "broken:service", *LISTEN, "--dev-certificate"],
        "RuntimeError: no such licence",
    ),
    (["serve", "app:absent", *LISTEN, "--dev-certificate"], "its services: service"),
    (["serve", "app:nothing", *LISTEN, "--dev-certificate"], "type int"),
    (["serve", "app:service", "--listen", "http://x", "--dev-certificate"], "unknown scheme"),
    (["serve", "app:service", *LISTEN, "--certificate", "no.pem", "--key", "no.pem"], "no.pem"),
    (["describe", "nowhere"], "aqueduct://"),
    (["ping", "aqueduct://127.0.0.1:9"], "127.0.0.1:9"),
    (["ping", "aqueduct://no-such-host.invalid"], "no-such-host.invalid"),
]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[subprocess.CompletedProcess[str]]:
    """Each of ``FAILURES``, and then each with a traceback."""
    commands = [
        (arguments, variables)
        for variables in ({}, {"AQUEDUCT_DEBUG": "1"})
        for arguments, _ in FAILURES
    ]
    return run_each(with_apps(tmp_path_factory.mktemp("failures")), commands)


@pytest.mark.parametrize("number", range(len(FAILURES)))
def test_a_failure_is_one_line_and_status_one(
    failed: list[subprocess.CompletedProcess[str]], number: int
):
    arguments, named = FAILURES[number]
    done, debug = failed[number], failed[len(FAILURES) + number]
    assert done.args == debug.args == arguments
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"aqueduct {arguments[0]}: ")
    assert named in done.stderr
    assert debug.returncode == 1
    assert "Traceback (most recent call last)" in debug.stderr


def test_a_failure_of_the_program_is_one_line_and_status_one(folder: Path):
    done = run("serve", "broken:service", *LISTEN, "--dev-certificate", cwd=folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("aqueduct serve: cannot import 'broken'")
    assert done.stderr.endswith("RuntimeError: no such licence\n") and done.stderr.count("\n") == 1


def test_an_address_that_is_taken_is_named(folder: Path):
    with serving(folder) as served:
        taken = served.address.partition("?")[0]
        done = run("serve", "app:service", "--listen", taken, "--dev-certificate", cwd=folder)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert taken.rpartition(":")[2] in done.stderr


WRONG_USAGE: list[list[str]] = [
    [],
    ["dance"],
    ["serve", "app:service"],
    ["serve", "app:service", "--dev-certificate"],
    ["serve", "app:service", *LISTEN],
    ["serve", "app:service", *LISTEN, "--certificate", "a"],
    ["serve", "app:service", *LISTEN, "--key", "a", "--dev-certificate"],
    ["serve", "app:service", *LISTEN, "--certificate", "a", "--key", "b", "--dev-certificate"],
    ["describe"],
    ["ping", "aqueduct://127.0.0.1:9", "--count", "0"],
    ["ping", "aqueduct://127.0.0.1:9", "--certificate", "a"],
    ["describe", "aqueduct://127.0.0.1:9", "--key", "a"],
    ["serve", "app:service", "--listen", "aqueduct+unix:///x.sock", "--client-ca", "a"],
    ["serve", "app:service", "--listen", "aqueduct+unix:///x.sock", "--key-password", "a"],
    ["serve", "app:service", *LISTEN, "--dev-certificate", "--workers", "0"],
    ["serve", "app:service", *LISTEN, "--dev-certificate", "--origin", "https://a.example/"],
    [
        "serve",
        "app:service",
        *LISTEN,
        "--dev-certificate",
        "--workers",
        "2",
        "--restarts",
        "-1",
    ],
]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[subprocess.CompletedProcess[str]]:
    """Each of ``WRONG_USAGE``, then those of ``WRONG_NUMBERS``."""
    listen = ["--listen", "aqueduct+tcp://127.0.0.1:0"]
    numbers = [[*given, *(listen if given[0] == "serve" else ())] for given, _ in WRONG_NUMBERS]
    commands: list[tuple[list[str], dict[str, str]]]
    commands = [(arguments, {}) for arguments in (*WRONG_USAGE, *numbers)]
    return run_each(with_apps(tmp_path_factory.mktemp("refused")), commands)


@pytest.mark.parametrize("number", range(len(WRONG_USAGE)))
def test_wrong_usage_is_status_two(refused: list[subprocess.CompletedProcess[str]], number: int):
    done = refused[number]
    assert done.args == WRONG_USAGE[number]
    assert done.returncode == 2
    assert "usage: aqueduct" in done.stderr


def test_wrong_usage_of_the_program_is_status_two():
    done = run("dance")
    assert done.returncode == 2
    assert "usage: aqueduct" in done.stderr


def test_the_version_is_that_of_the_distribution():
    try:
        known = version("aqueduct-arrow")
    except PackageNotFoundError:
        known = "(not installed)"
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"aqueduct {known}\n")


WRONG_NUMBERS: list[tuple[tuple[str, ...], str]] = [
    (("serve", "app:service", "--start-timeout", "5m"), "m is no unit of time; write 5min for"),
    (("serve", "app:service", "--start-timeout", "soon"), "is 'soon'; it must be above zero"),
    (("serve", "app:service", "--workers", "0"), "is '0'; it must be above zero"),
    (("serve", "app:service", "--restarts", "-1"), "--restarts"),
    (("ping", "aqueduct+tcp://h", "--count", "many"), "is 'many'; it must be above zero"),
]


@pytest.mark.parametrize("number", range(len(WRONG_NUMBERS)))
def test_numbers_and_durations_of_the_command_line(
    refused: list[subprocess.CompletedProcess[str]], number: int
):
    done = refused[len(WRONG_USAGE) + number]
    arguments, text = WRONG_NUMBERS[number]
    assert tuple(done.args[: len(arguments)]) == arguments
    assert done.returncode == 2
    assert text in done.stderr


def test_an_address_that_is_none_is_one_line():
    command = [sys.executable, "-m", "aqueduct.cli", "ping", "aqueduct+tcp://127.0.0.1:80:90"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "a port is a number from 0 to 65535" in done.stderr


def test_token_makes_a_token_and_its_line(tmp_path: Path) -> None:
    shown = run("token", "admin")
    found = re.fullmatch(r"token: (aq_\S+)\nline:  (admin sha256:\S+)\n", shown.stdout)
    assert found is not None, shown.stderr
    path = tmp_path / "tokens.txt"
    path.write_text(f"{found[2]}\n")
    limits = ("--handlers", "echo, lengths", "--tables", "trips", "--expires", "2999-01-31")
    kept = run("token", "etl", *limits, "--file", str(path))
    assert re.fullmatch(r"aq_\S+\n", kept.stdout), kept.stderr
    entries = {entry.name: entry for entry in aqueduct.TokenFile(path).entries}
    for name, token in (("admin", found[1]), ("etl", kept.stdout.strip())):
        assert entries[name].digest == hashlib.sha256(token.encode()).digest()
    assert entries["etl"].handlers == frozenset({"echo", "lengths"})
    assert entries["etl"].tables == frozenset({"trips"})
    assert entries["etl"].sinks == frozenset()
    wrong = run("token", "etl", "--expires", "soon", "--file", str(path))
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith("aqueduct token: expires=soon is no time; write it like")
    assert len(aqueduct.TokenFile(path).entries) == 2
