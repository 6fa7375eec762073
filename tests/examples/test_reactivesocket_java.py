"""The Java program of the examples asks the service of the examples."""

from __future__ import annotations

import json
import socket
import subprocess
import threading

import pytest

from tests.examples.conftest import PATIENCE, ROOT, Running

ASK = ROOT / "examples" / "reactivesocket" / "Ask.java"

pytestmark = [pytest.mark.spark, pytest.mark.checkout]  # it has a Java


def java(*arguments: str, rows: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["java", "-XX:TieredStopAtLevel=1", *arguments],
        input=rows,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program compiled, as it is run more often here. A runtime has the compiler, too."""
    folder = str(tmp_path_factory.mktemp("classes"))
    made = java(
        "-m", "jdk.compiler/com.sun.tools.javac.Main", "-Xlint:all,-serial", "-d", folder, str(ASK)
    )
    assert (made.returncode, made.stderr) == (0, ""), made.stdout
    return folder


def test_a_function_of_one_batch_answers(running: Running) -> None:
    rows = '[{"id": 1, "word": "one"}, {"id": "9007199254740993", "word": "dr\u00e9\\"]"}]'
    said = java(str(ASK), running.host, running.port, "lengths", "-", rows=rows)
    assert (said.returncode, said.stderr) == (0, "")
    assert [json.loads(line) for line in said.stdout.splitlines()] == [
        {"id": "1", "length": 3},
        {"id": "9007199254740993", "length": 5},
    ]


def test_a_source_is_asked_for_as_many_items_as_are_wanted(classes: str, running: Running) -> None:
    def made() -> int:
        rows = '[{"of": "ticks"}]'
        said = java("-cp", classes, "Ask", running.host, running.port, "made_so_far", rows)
        assert said.returncode == 0, said.stderr
        return int(json.loads(said.stdout)["made"])

    before = made()
    more = ("--most", "7", "--ask", "2")
    said = java("-cp", classes, "Ask", *more, running.host, running.port, "ticks")
    assert (said.returncode, said.stderr) == (0, "")
    ticks = [int(json.loads(line)["tick"]) for line in said.stdout.splitlines()]
    assert ticks == list(range(1, 8))
    # Its generator has no end, and made no more than what was drawn and what was on its way.
    assert 7 <= made() - before <= 7 + 2


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("lenghts", "[]"), 1, "unknown-handler"),
        (("lengths", '[{"id": 1'), 1, "JSON"),
        (("lengths", '[{"id": 1, "word": "one", "more": 2}]'), 1, "more"),
        (("--deadline", "0", "lengths", "[]"), 2, "--deadline is 0; say a number from 1"),
        (("--patience", "5", "lengths", "[]"), 2, "unknown option --patience"),
        ((), 2, "say HOST, PORT, HANDLER"),
    ],
    ids=["unknown handler", "no rows", "other columns", "deadline", "option", "nothing"],
)
def test_an_error_says_what_was_wrong(
    classes: str, running: Running, arguments: tuple[str, ...], code: int, text: str
) -> None:
    options = [word for word in arguments[:2] if arguments[0].startswith("--")]
    places = arguments[len(options) :]
    where = (running.host, running.port) if places else ()
    said = java("-cp", classes, "Ask", *options, *where, *places)
    assert (said.returncode, said.stdout) == (code, "")
    assert text in said.stderr and "Exception" not in said.stderr


def test_what_else_may_be_on_the_port(classes: str) -> None:
    """A port without a listener, and one where a program speaks HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        said = java("-cp", classes, "Ask", "127.0.0.1", port, "ticks")
        thread.join(PATIENCE)
    assert (said.returncode, said.stdout) == (1, "")
    assert "no ReactiveSocket on this port" in said.stderr
    said = java("-cp", classes, "Ask", "127.0.0.1", port, "ticks")
    assert (said.returncode, said.stdout) == (1, "")
    assert "no service there" in said.stderr
