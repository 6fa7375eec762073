"""What every command has: exit statuses, errors in one line, guesses, the token, plain output."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.cli import COMMANDS, main
from aqueduct.cli.common import CALL_FAILED, FAILED, WRONG_USAGE
from aqueduct.cli.output import console, of_bytes, plain_table
from aqueduct.config import Config
from aqueduct.errors import AqueductError, ConfigError, Refused
from aqueduct.service.loader import load_service
from aqueduct.settings.places import read_settings
from tests.support.calls import served
from tests.support.installed_programs import installed
from tests.support.programs import program

TOKEN = "aq_token-of-a-test"


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """The address of a service that asks for a token."""

    def allowed(call):
        if call.token != TOKEN:
            raise Refused("the token is not known")

    service = aqueduct.Service("guarded", authorize=allowed)

    @service.handler("echo")
    def echo(batch):
        """Has [red]no markup[/red]."""
        return batch

    with served(service, "unix") as address:
        yield address


def status_of(*arguments: str) -> int:
    """The exit status, also where argparse ends the process."""
    try:
        return main(list(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("serv", "app:service"), "did you mean serve?"),
        (("serve", "app:service", "--lisen", "aqueduct+tcp://:0"), "did you mean --listen?"),
        (("ping", "aqueduct+tcp://h", "--cuont=3"), "did you mean --count?"),
        (("describe", "aqueduct+tcp://h", "--jsno"), "did you mean --json?"),
        (("completion", "pash"), "bash"),
    ],
)
def test_a_name_that_is_none_leads_to_the_near_one(capsys, arguments, meant):
    assert status_of(*arguments) == WRONG_USAGE
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and meant in told
    assert "(usage: aqueduct" in told


def test_a_name_that_is_like_none_leads_nowhere(capsys):
    assert status_of("ping", "aqueduct+tcp://h", "--zzzz") == WRONG_USAGE
    assert "did you mean" not in capsys.readouterr().err


def test_options_are_not_abbreviated(capsys):
    assert status_of("ping", "aqueduct+tcp://h", "--coun", "3") == WRONG_USAGE
    assert "did you mean --count?" in capsys.readouterr().err


def statuses_of_the_guide() -> tuple[dict[str, str], dict[str, str]]:
    """Of all commands, and of a service that was ended; each status and what it means."""
    guide = Path("docs/guides/command-line.md").read_text()
    section = guide.partition("\n## Exit statuses\n")[2].partition("\n## ")[0]
    rows = re.compile(r"^\| (\d[\d, ]*) \| (.+?) \|$", re.MULTILINE)
    every, _, served = section.partition("\n| `serve` ")
    return dict(rows.findall(every)), dict(rows.findall(served))


def test_the_statuses_are_those_of_the_guide():
    rows, _ = statuses_of_the_guide()
    assert set(rows) == {"0", str(FAILED), str(WRONG_USAGE), str(CALL_FAILED), "130", "141", "143"}


HELD = """
import asyncio
import aqueduct

service = aqueduct.Service("held")

@service.handler("held")
async def held(batches):
    async for batch in batches:
        print("taken", flush=True)
        await asyncio.Event().wait()
        yield batch
"""


@pytest.mark.parametrize("workers", ["serve", "workers"])
def test_a_service_that_is_ended_has_the_statuses_of_the_guide(tmp_path, workers):
    _, rows = statuses_of_the_guide()
    assert list(rows) == ["0", "1", "129", "130, 143"]
    assert "SIGINT or SIGTERM" in rows["0"] and "second signal" in rows["1"]
    with program(tmp_path, HELD, workers, "aqueduct+tcp://127.0.0.1:0") as running:
        running.signal(signal.SIGTERM)
        assert running.ended() == 0
    with (
        program(tmp_path, HELD, workers, "aqueduct+tcp://127.0.0.1:0") as running,
        aqueduct.SyncClient(running.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        call = pool.submit(client.call, "held", pa.record_batch({"n": [1]}))
        assert running.line() == "taken"
        running.signal(signal.SIGTERM)
        running.error("draining")
        running.signal(signal.SIGTERM)
        assert running.ended() == 1
        assert isinstance(call.exception(), AqueductError)


@pytest.fixture
def hangup():
    """What is started has the system's SIGHUP, also where tests are run by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("workers", ["serve", "workers"])
def test_a_service_whose_terminal_closes_drains_nothing(tmp_path, workers):
    _, rows = statuses_of_the_guide()
    assert "SIGHUP" in rows["129"]
    place = tmp_path / "held.sock"
    with (
        program(tmp_path, HELD, workers, f"aqueduct+unix://{place}") as running,
        aqueduct.SyncClient(running.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        call = pool.submit(client.call, "held", pa.record_batch({"n": [1]}))
        assert running.line() == "taken"
        running.signal(signal.SIGHUP)
        assert running.ended() == -signal.SIGHUP  # which a shell tells as 129
        assert isinstance(call.exception(), AqueductError)
        assert place.is_socket()  # the next service replaces it


def test_every_command_is_in_the_guide():
    guide = Path("docs/guides/command-line.md").read_text()
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        assert f"\naqueduct {name} " in guide, name
        assert re.search(rf"^## .*\b{name}\b", guide, re.MULTILINE), name


def test_a_service_that_cannot_be_reached_is_another_status_than_a_call_that_failed(
    capsys, guarded, tmp_path
):
    assert status_of("describe", f"aqueduct+unix://{tmp_path}/none.sock") == FAILED
    capsys.readouterr()
    assert status_of("describe", guarded) == CALL_FAILED
    assert "the token is not known" in capsys.readouterr().err


def test_debug_shows_the_traceback_and_keeps_the_status(capsys, guarded):
    assert status_of("describe", guarded, "--debug") == CALL_FAILED
    told = capsys.readouterr().err
    assert told.startswith("Traceback (most recent call last)")
    assert told.splitlines()[-1].startswith("aqueduct describe: ")


@pytest.mark.parametrize("text", ["1", "true", "ON", "0", "off", "", "perhaps"])
def test_the_variable_shows_the_traceback_as_the_setting_reads_it(capsys, monkeypatch, text):
    """Values that are no flag are an error of serve, and nothing to other commands."""
    monkeypatch.setenv("AQUEDUCT_DEBUG", text)
    wanted = False
    with contextlib.suppress(ConfigError):
        wanted = bool(read_settings(environment=os.environ).value("debug"))
    assert wanted == (text in ("1", "true", "ON"))
    assert Config().debug == wanted
    assert status_of("describe", "nowhere") == FAILED
    assert capsys.readouterr().err.startswith("Traceback") == wanted
    if wanted:
        with pytest.raises(ModuleNotFoundError):
            load_service("no_such_module_of_ours:service")
    else:
        with pytest.raises(ConfigError, match="cannot import"):
            load_service("no_such_module_of_ours:service")


def test_a_token_comes_from_a_file_or_the_environment(capsys, guarded, tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert status_of("describe", guarded, "--token-file", str(file)) == 0
    monkeypatch.setenv("AQUEDUCT_TOKEN", TOKEN)
    assert status_of("describe", guarded) == 0
    assert status_of("describe", guarded, "--token", "another") == CALL_FAILED
    both = ("--token", TOKEN, "--token-file", str(file))
    assert status_of("describe", guarded, *both) == WRONG_USAGE
    told = capsys.readouterr()
    assert TOKEN not in told.out + told.err


@pytest.mark.parametrize("content", ["", "\n", "one two\n", "x" * 70_000])
def test_a_file_without_one_token_is_refused(capsys, guarded, tmp_path, content):
    file = tmp_path / "token"
    file.write_text(content)
    assert status_of("describe", guarded, "--token-file", str(file)) == FAILED
    assert str(file) in capsys.readouterr().err


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_output_is_plain_where_nobody_asked_for_more(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert console(Terminal()) is not None
    assert console(io.StringIO()) is None
    monkeypatch.setenv("NO_COLOR", "1")
    assert console(Terminal()) is None
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert console(Terminal()) is None
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert console(Terminal()) is None


def test_text_of_a_service_is_no_markup(capsys, guarded, monkeypatch):
    monkeypatch.setenv("AQUEDUCT_TOKEN", TOKEN)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output = Terminal()
    monkeypatch.setattr(sys, "stdout", output)
    assert status_of("describe", guarded) == 0
    assert "\x1b[1m" in output.getvalue() and "[red]no markup[/red]" in output.getvalue()


def test_a_plain_table_has_aligned_columns():
    lines = plain_table(("name", "rows"), (("a", "1,000"), ("long name", "2")), right=1)
    assert lines == ["name        rows", "a          1,000", "long name      2"]


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB")]
)
def test_sizes_are_readable(size, text):
    assert of_bytes(size) == text


# ------------------------------------------------------------------ completion

COMPLETE = """
eval "$(cat script)"
COMP_WORDS=({words} "{word}")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_aqueduct aqueduct "{word}" "" 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the script for bash, and a file."""
    folder = tmp_path_factory.mktemp("completion")
    code = "import sys; from aqueduct.cli import main; sys.exit(main(['completion', 'bash']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (folder / "script").write_text(done.stdout)
    (folder / "server.pem").touch()
    return folder


@pytest.mark.parametrize(
    ("words", "word", "wanted"),
    [
        ("aqueduct", "", {"serve", "describe", "completion"}),
        ("aqueduct", "com", {"completion"}),
        ("aqueduct serve app:service", "--li", {"--listen"}),
        ("aqueduct ping aqueduct://h", "--key", {"--key", "--key-password", "--key-password-file"}),
        ("aqueduct completion", "z", {"zsh"}),
        ("aqueduct serve app:service --certificate", "ser", {"server.pem"}),
    ],
)
def test_bash_completes(folder, words, word, wanted):
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE.format(words=words, word=word)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PATH": os.environ["PATH"]},
        timeout=60,
        check=True,
    )
    found = set(done.stdout.split())
    assert wanted <= found if not word else wanted == found


def syntax_errors(shell: str, script: Path) -> str:
    """What a shell says of a script that it reads and does not run; nothing: it is well-formed."""
    command = [
        installed(shell),
        *(["-f"] if shell == "zsh" else ["--no-config"]),
        "-n",
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert bool(done.returncode) is bool(done.stderr)
    return done.stderr


@pytest.mark.parametrize(
    ("shell", "sign"), [("zsh", "#compdef aqueduct"), ("fish", "complete -c aqueduct")]
)
def test_other_shells_have_a_script(capsys, shell, sign):
    assert status_of("completion", shell) == 0
    assert sign in capsys.readouterr().out


@pytest.mark.checkout
@pytest.mark.long  # both shells would have to be installed for each change
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_their_script(capsys, tmp_path, shell):
    assert status_of("completion", shell) == 0
    text = capsys.readouterr().out
    script = tmp_path / "script"
    script.write_text(text)
    assert syntax_errors(shell, script) == ""
    script.write_text(f"{text}\nfor (\n")
    assert syntax_errors(shell, script), "it would have told"


def test_completion_names_the_extra_that_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert status_of("completion", "bash") == FAILED
    assert "aqueduct-arrow[cli]" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--json",), ("aqueduct", "-")])
def test_wire_tells_that_standard_input_is_closed(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert status_of("wire", *arguments) == FAILED
    assert "standard input is closed" in capsys.readouterr().err
