"""The list of ``make sabotage`` is in step with the core, and its runner can tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.requirements import ledger
from tests.sabotage.changes import CORE, Change, ChangeError, read_lists
from tests.sabotage.runner import Outcome, RunError, check, files_with, prepare, try_changes
from tests.sabotage.tree import ROOT, Tree
from tests.support.selection import mostly_long

pytestmark = pytest.mark.checkout

CHANGES, EXEMPT = read_lists()


# The lists


def fault(change: Change) -> str:
    """What is wrong with a change: nothing, if it changes its line alone."""
    assert change.file.startswith(CORE), change.name
    source = (ROOT / change.file).read_text()
    try:
        changed = change.changed(source)
    except ChangeError as error:
        return str(error)
    lines = zip(source.split("\n"), changed.split("\n"), strict=True)
    different = [(old.strip(), new.strip()) for old, new in lines if old != new]
    return "" if different == [(change.old, change.new)] else f"it changes {different}"


def test_a_change_fits_the_core() -> None:
    """A stale one proves nothing: bring it in step with the line that it was made for."""
    faults = {change.name: fault(change) for change in CHANGES}
    assert {name: wrong for name, wrong in faults.items() if wrong} == {}


def test_every_number_has_a_change_or_a_reason_to_have_none() -> None:
    numbers = {
        number for number in ledger() if number.startswith(("AQ-", "AQ0-", "BP-", "RL-", "RS-"))
    }
    tried = {number for change in CHANGES for number in change.requirements}
    of_calls = {number for number in tried if number.startswith("AC-")}  # what the core knows of
    assert of_calls <= set(ledger())
    assert (tried - of_calls) | set(EXEMPT) == numbers
    assert not tried & set(EXEMPT)
    assert all(len(reason.split()) > 5 for reason in EXEMPT.values())


def test_what_is_changed_and_how_often() -> None:
    assert len(CHANGES) >= 120
    assert all(change.breaks for change in CHANGES)
    lines = [(each.requirements, each.file, each.within, each.old, each.new) for each in CHANGES]
    assert len(set(lines)) == len(lines)


# One change


SOURCE = """
class First:
    def take(
        self,
        number,
    ):
        self.next += 1

        return number

    def put(self): pass

cdef class Second(Base):
    cdef int take(self) except -1:
        self.next += 1
        self.other = 1

async def take_all():
    self.next += 1
"""


def change(old: str, within: str = "", new: str = "pass") -> Change:
    return Change("a name", ("AQ-1",), "some.py", within, old, new, "something")


@pytest.mark.parametrize(
    ("within", "line"), [("First", 6), ("First.take", 6), ("Second.take", 14), ("take_all", 18)]
)
def test_a_line_that_repeats_is_found_by_its_function(within: str, line: int) -> None:
    lines = change("self.next += 1", within, "self.next += 2").changed(SOURCE).split("\n")
    assert [at for at, text in enumerate(lines) if "+= 2" in text] == [line]
    assert lines[line].startswith("    " * (line // 18 or 2))
    lines[line] = lines[line].replace("2", "1")
    assert "\n".join(lines) == SOURCE


@pytest.mark.parametrize(
    ("old", "within", "says"),
    [
        ("self.next += 1", "", "3 lines"),
        ("self.next", "", "0 lines"),
        ("self.other = 1", "First", "0 lines"),
        ("self.next += 1", "take", "2 functions"),
        ("self.next += 1", "First.drop", "0 functions"),
        ("self.next += 1", "Base", "0 functions"),
    ],
)
def test_a_line_that_is_not_there_once_is_an_error(old: str, within: str, says: str) -> None:
    with pytest.raises(ChangeError, match=says):
        change(old, within).changed(SOURCE)


ENTRY = """
[[change]]
name = "{name}"
requirement = "AQ-35"
file = "aqueduct/protocol/common/sender.py"
within = "SenderHalf.cancel"
old = 'self._reset_messages(RESET_CANCELLED)'
new = '{new}'
breaks = "what was abandoned goes on"
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ENTRY.replace("breaks", "brakes"), "the fields are"),
        (ENTRY + ENTRY, "names that repeat: {name}"),
        ("[[changes]]\n[excempt]", "changes, excempt"),
    ],
)
def test_a_list_that_cannot_be_read_is_an_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "list.toml"
    path.write_text(text)
    with pytest.raises(ChangeError, match=says):
        read_lists([path])


# The runner


def entry(name: str, new: str) -> Change:
    return Change(
        name,
        ("AQ-35",),
        "aqueduct/protocol/common/sender.py",
        "SenderHalf.cancel",
        "self._reset_messages(RESET_CANCELLED)",
        new,
        "what was abandoned goes on",
    )


CAUGHT = entry("caught", "pass")
HARMLESS = entry("harmless", "self._reset_messages(RESET_CANCELLED)  # nothing is different")
BROKEN = entry("broken", "self._reset_messages(RESET_CANSELLED)")
COMPILED = Change(
    "compiled",
    ("AQ-R16",),
    "aqueduct/_speedups/channels/tracker.pyx",
    "ReceivedNumbers.take_ack",
    "pending.clear()",
    "pass",
    "numbers are acked again",
)
UNPROVEN = Change("unproven", ("XY-1",), CAUGHT.file, CAUGHT.within, CAUGHT.old, "pass", "that")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return prepare(tmp_path_factory.mktemp("sabotage") / "tree", ["AQ-35", "AQ-R16"], 1)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_runner_tells_what_became_of_a_change(pristine: Tree, tmp_path: Path) -> None:
    changes = [CAUGHT, HARMLESS, BROKEN, COMPILED, UNPROVEN]
    results = {each.change.name: each for each in try_changes(pristine, changes, tmp_path, 2)}
    assert {name: result.outcome for name, result in results.items()} == {
        "caught": Outcome.CAUGHT,
        "harmless": Outcome.SURVIVED,
        "broken": Outcome.PROBLEM,
        "compiled": Outcome.CAUGHT,
        "unproven": Outcome.SURVIVED,
    }
    assert "::test_" in results["caught"].text
    assert "NameError" in results["broken"].text
    assert results["unproven"].text == "no test carries the number"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(600)
def test_a_tree_whose_tests_fail_is_not_taken_for_success(pristine: Tree, tmp_path: Path) -> None:
    tree = pristine.copy(tmp_path / "tree")
    check(tree, ["AQ-35"], 1)
    CAUGHT.apply(tree.root)
    with pytest.raises(RunError, match="1 failed"):
        check(tree, ["AQ-35"], 1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("new", "code", "says"),
    mostly_long(
        [
            ("pass", 0, "1 caught, 0 SURVIVED, 0 PROBLEM"),
            (HARMLESS.new, 1, "0 caught, 1 SURVIVED"),
        ],
        (HARMLESS.new, 1, "0 caught, 1 SURVIVED"),
    ),
    ids=["caught", "survived"],
)
def test_the_command(tmp_path: Path, new: str, code: int, says: str) -> None:
    path = tmp_path / "list.toml"
    path.write_text(ENTRY.format(name="one", new=new) + ENTRY.format(name="two", new="pass"))
    options = ["--changes", str(path), "--only", "one", "-n", "1"]
    command = [sys.executable, "-m", "tests.sabotage", *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert (run.returncode, run.stderr) == (code, "")
    assert says in run.stdout.splitlines()[-1]


def test_the_command_refuses_what_is_stale_or_unknown(tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    path.write_text(ENTRY.format(name="one", new="pass").replace("RESET_CANCELLED", "RESET_LOST"))
    for options, says in (([], "0 lines"), (["--only", "AQ-3"], "no change has")):
        command = [sys.executable, "-m", "tests.sabotage", "--changes", str(path), *options]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert run.returncode == 2
        assert says in run.stderr


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    """A child that lived on would hold the output, and the call would wait for its end."""
    program = (
        "import subprocess, sys\n"
        "print('so far', flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    )
    assert Tree(tmp_path).python("-c", program, timeout=5) == (None, "so far\n")


def test_files_are_chosen_by_the_whole_number(tmp_path: Path) -> None:
    """And of the core alone: what has a clock or a seed could fail without the change."""
    folder = tmp_path / "tests" / "protocol" / "channels"
    folder.mkdir(parents=True)
    (tmp_path / "tests" / "carriers").mkdir()
    for path, number in (
        (folder / "test_one.py", "AQ-R2"),
        (folder / "test_two.py", "AQ-R24"),
        (folder / "test_machines.py", "AQ-R2"),
        (tmp_path / "tests" / "carriers" / "test_one.py", "AQ-R2"),
    ):
        path.write_text(f'requirement("{number}")')
    one, two = ("tests/protocol/channels/test_one.py", "tests/protocol/channels/test_two.py")
    assert files_with(tmp_path, ["AQ-R2"]) == [one]
    assert files_with(tmp_path, ["AQ-R24", "AQ-R2"]) == [one, two]
    assert files_with(tmp_path, ["AQ-R"]) == []
