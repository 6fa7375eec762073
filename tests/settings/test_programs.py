"""Settings of an operator in real processes: ``aqueduct serve``, its workers, and ``run``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

import aqueduct
from tests.carriers.certificates import Authority

APP = """
import os, signal, sys
import aqueduct
from aqueduct.config import Calls, Config, Timing

print("imported\\n", end="", flush=True)
config = Config(timing=Timing(idle_timeout=77, ping_interval=7), calls=Calls(queue=7))
service = aqueduct.Service("settings", config=config)

@service.on_start
def show():
    found = service.config
    print(found.timing.idle_timeout, found.timing.ping_interval, found.calls.queue, flush=True)
    if "aqueduct.benchmark" in service.handlers:
        print("with a benchmark", flush=True)
    if "hush" in os.environ.values():
        print("inherited a password", flush=True)
    if "END" in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)

@service.table
def numbers(call):
    yield

if __name__ == "__main__":
    service.run("http://nowhere", **eval(sys.argv[1]))
    print(service._tables["numbers"].limits.splits)
""".replace("@service.table\n", "@service.table(schema=__import__('pyarrow').schema([]))\n")
FILE = """
[serve]
listen = ["aqueduct+unix:x.sock"]
workers = 2
[timing]
idle_timeout = "99s"
ping_interval = "9s"
[tables]
splits = 5
"""
VARIABLES = {"AQUEDUCT_TIMING_PING_INTERVAL": "11s", "AQUEDUCT_CONFIG": "prod.toml"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    sock = f"aqueduct+unix://{tmp_path}/x.sock"
    (tmp_path / "prod.toml").write_text(FILE.replace("aqueduct+unix:x.sock", sock))
    return tmp_path


def started(folder: Path, *command: str, **variables: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AQUEDUCT_")}
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**kept, "PYTHONPATH": str(Path(aqueduct.__file__).parents[1]), **variables},
    )


def ended(folder: Path, *command: str, **variables: str) -> tuple[int, str, str]:
    with started(folder, *command, **variables) as process:
        out, err = process.communicate(timeout=100)
        return process.returncode, out, err


def test_workers_serve_with_the_settings_of_the_first_process(folder: Path) -> None:
    command = ("-m", "aqueduct.cli", "serve", "app:service", "--benchmark")
    with started(folder, *command, **VARIABLES) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(7)]
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=100)
    assert "".join(lines).count("99.0 11.0 7") == 2, err
    assert "".join(lines).count("imported") == 2
    assert "".join(lines).count("with a benchmark") == 2
    assert lines[-1].startswith("listening on aqueduct+unix://")
    assert process.returncode == 0


@pytest.mark.parametrize("workers", [(), ("--workers", "1")])
def test_a_password_is_not_left_to_workers_and_what_handlers_start(
    folder: Path, workers: tuple[str, ...]
) -> None:
    certificate, key = Authority("us").issue("us", "localhost", days=2)
    (folder / "us.pem").write_bytes(certificate)
    encrypted = serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"hush"),
    )
    (folder / "us.key").write_bytes(encrypted)
    command = ("-m", "aqueduct.cli", "serve", "app:service", "--certificate", "us.pem", *workers)
    listen = ("--key", "us.key", "--listen", "aqueduct+tls://localhost:0")
    with started(folder, *command, *listen, AQUEDUCT_SERVE_KEY_PASSWORD="hush") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=100)
    assert lines[-1].startswith("listening on aqueduct+tls://"), (lines, err)
    assert lines[:-1] == ["imported\n", "77 7 7\n"]


def test_what_is_in_force_is_printed_as_toml_and_nothing_is_served(folder: Path) -> None:
    command = ("-m", "aqueduct.cli", "serve", "app:service", "--print-config", "--drain", "3s")
    hush = {"AQUEDUCT_SERVE_KEY_PASSWORD": "hush"}
    status, out, err = ended(folder, *command, **VARIABLES, **hush)
    assert (status, err) == (0, "imported\n")
    assert "hush" not in out
    found = tomllib.loads(out)
    assert found["timing"]["ping_interval"] == "11s"
    for line in (
        "workers = 2  # from prod.toml",
        "# key_password is set, and not shown, from AQUEDUCT_SERVE_KEY_PASSWORD",
        'ping_interval = "11s"  # from AQUEDUCT_TIMING_PING_INTERVAL',
        "queue = 7  # from the code of app:service",
        'drain_timeout = "3s"  # from --drain',
    ):
        assert line in out.splitlines()


def test_one_process_serves_with_them_and_run_takes_them_too(folder: Path) -> None:
    listen = f"aqueduct+unix://{folder}/y.sock"
    variables = {"AQUEDUCT_SERVE_LISTEN": listen, "AQUEDUCT_TIMING_IDLE_TIMEOUT": "5min", "END": ""}
    status, out, err = ended(folder, "-m", "aqueduct.cli", "serve", "app:service", **variables)
    assert (status, out.splitlines()[:2]) == (0, ["imported", "300.0 7 7"]), err
    variables |= VARIABLES | {"AQUEDUCT_SERVE_WORKERS": "1", "AQUEDUCT_TIMING_IDLE_TIMEOUT": ""}
    variables["AQUEDUCT_SERVE_BENCHMARK"] = "1"
    status, out, err = ended(folder, "app.py", "{}", **variables)
    assert (status, err) == (0, "")
    assert out.splitlines()[:3] == ["imported", "99.0 11.0 7", "with a benchmark"]
    assert out.splitlines()[-1] == "5"
    status, out, err = ended(folder, "app.py", "{}", **VARIABLES)
    assert status == 1
    assert "ConfigError: prod.toml: serve.workers is 2, but Service.run serves by one pro" in err
    given = f"dict(environment=False, settings={str(folder / 'none.toml')!r})"
    status, out, err = ended(folder, "app.py", given, **VARIABLES)
    assert status == 1
    assert "none.toml" in err
    status, out, err = ended(folder, "app.py", "dict(environment=False)", **VARIABLES)
    assert status == 1
    assert "unknown scheme 'http'" in err


def test_a_wrong_setting_is_one_line_whatever_the_place(folder: Path) -> None:
    command = ("-m", "aqueduct.cli", "serve", "app:service", "--workers", "2")
    wrong = {"AQUEDUCT_TIMING_PING_INTERVAL": "5min", "AQUEDUCT_CONFIG": "prod.toml"}
    status, _, err = ended(folder, *command, **wrong)
    assert status == 1
    # A worker says it, for what the code gave is known there alone.
    assert err.count("\n") == 1
    assert "prod.toml: timing.idle_timeout, AQUEDUCT_TIMING_PING_INTERVAL: Timing.ping" in err
