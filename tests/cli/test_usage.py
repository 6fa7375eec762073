"""What every command has: exit statuses, errors in one line, guesses, the token, plain output."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import aqueduct
from aqueduct.cli import COMMANDS, main
from aqueduct.cli.common import CALL_FAILED, FAILED, WRONG_USAGE
from aqueduct.cli.output import console, of_bytes, plain_table
from aqueduct.errors import Refused
from tests.support.calls import served
from tests.support.installed_programs import installed

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
        (("completion", "pash"), "'bash'"),
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


def test_the_statuses_are_those_of_the_guide():
    guide = Path("docs/guides/command-line.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| (.+?) \|$", guide, re.MULTILINE))
    assert set(rows) == {"0", str(FAILED), str(WRONG_USAGE), str(CALL_FAILED), "130", "141", "143"}


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


@pytest.mark.checkout
@pytest.mark.parametrize(
    ("shell", "sign"), [("zsh", "#compdef aqueduct"), ("fish", "complete -c aqueduct")]
)
def test_other_shells_have_a_script_that_they_can_read(capsys, tmp_path, shell, sign):
    assert status_of("completion", shell) == 0
    text = capsys.readouterr().out
    assert sign in text
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
