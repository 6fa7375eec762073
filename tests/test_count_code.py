"""``ci/count_code.py`` counts what is code, and nothing else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ci import count_code

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        ("\n\n   \n", 0),
        ("# a comment\n", 0),
        ("x = 1  # a comment behind code\n", 1),
        ('"""The page."""\n\nx = 1\n', 1),
        ('def f():\n    """Docs.\n\n    More.\n    """\n    return 1\n', 2),
        ("def f():\n    r'''Raw docs.'''\n    return 1\n", 2),
        ('def f():\n    "Docs " "in two parts."\n    return 1\n', 2),
        ('LIMIT = 3\n"""What it means."""\n', 1),
        ("x = 1\n'''Not code\neither.'''\ny = 2\n", 2),
        ('text = """one\n\ntwo"""\n', 2),
        ('f(\n    """one\n    two""",\n)\n', 4),
        ("x = [\n    1,\n\n    # a comment\n    2,\n]\n", 4),
        ("x = (\n    'one'\n    # a comment\n    'two'\n)\n", 4),
        ("x = 1 + \\\n    2\n", 2),
        ("x = '#' + \"'\"\ny = '\\''  # '\nz = 3", 3),
        ('x = "a \\\nb"\n', 2),
        ("x = 1; y = 2\n", 1),
    ],
)
def test_lines_of_python(source: str, lines: int) -> None:
    assert count_code.code_lines(source) == lines


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("# cython: language_level=3\n", 0),
        ('cdef class A:\n    """Docs\n    of it."""\n\n    cdef int x\n', 2),
        ('cdef int f(char* p) except -1:\n    """Docs."""\n    return <int>p[0] & 1\n', 2),
        ("cpdef g(object x):\n    '''Docs.'''\n    return <bytes?>x\n", 2),
        ('cdef extern from "sys/mman.h" nogil:\n    int x\n', 2),
        ('cdef extern from *:\n    """\n    int x;\n\n    int y;\n    """\n    int x\n', 4),
        ('cdef extern from *:\n  """\n  /* Says\n  why. */\n  int x; // so\n  """\n  int x\n', 3),
        ("cdef enum:\n    # From here on.\n    LIMIT = 4\n", 2),
    ],
)
def test_lines_of_cython(source: str, lines: int) -> None:
    assert count_code.code_lines(source) == lines


def test_files_count_by_package_and_suffix() -> None:
    files = [
        ("aqueduct/a.py", b"x = 1\n"),
        ("aqueduct/_speedups/a.pyx", b"x = 1\ny = 2\n"),
        ("aqueduct/_speedups/a.pxd", b"cdef int x\n"),
        ("aqueduct/_speedups/a.pyi", b"x: int\n"),
        ("spark_udfs/b.py", b"x = 1\n"),
        ("spark_udfs/demo/c.py", b"x = 1\n"),
        ("tests/test_a.py", b"x = 1\n"),
        ("README.md", "näher\n".encode()),
        ("docs/deep/page.md", b"1234"),
    ]
    counts = count_code.totals(count_code.count(files))
    assert {name: value for name, value in counts.items() if value} == {
        "aqueduct .py": 1,
        "aqueduct .pyx": 2,
        "aqueduct .pxd": 1,
        "aqueduct": 4,
        "spark_udfs .py": 2,
        "spark_udfs": 2,
        "code": 6,
        count_code.PROSE: 7 + 4,
    }


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One commit with two lines of code, and a work tree with three and a file git ignores."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "aqueduct").mkdir()
    (tmp_path / ".gitignore").write_text("made.py\n")
    (tmp_path / "aqueduct" / "old.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "README.md").write_text("12345678")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "First")
    (tmp_path / "aqueduct" / "old.py").unlink()
    (tmp_path / "aqueduct" / "new.py").write_text("x = 1\ny = 2\nz = 3\n")
    (tmp_path / "aqueduct" / "made.py").write_text("x = 1\n")
    (tmp_path / "README.md").write_text("1234")
    for name in ("files_at", "files_here"):
        reader = getattr(count_code, name)
        monkeypatch.setattr(
            count_code, name, lambda *given, reader=reader: reader(*given, root=tmp_path)
        )
    return tmp_path


def counted(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert count_code.main([*arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_the_work_tree_a_commit_and_the_difference(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = counted(capsys)["counts"]
    assert (here["code"], here[count_code.PROSE]) == (3, 4)
    first = counted(capsys, "--at", "HEAD")["counts"]
    assert (first["code"], first[count_code.PROSE]) == (2, 8)
    change = counted(capsys, "--since", "HEAD")["change"]
    assert (change["code"], change[count_code.PROSE]) == (1, -4)
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "Second")
    both = counted(capsys, "--at", "HEAD", "--since", "HEAD~1")
    assert (both["counts"]["code"], both["before"]["code"], both["change"]["code"]) == (3, 2, 1)
    assert count_code.main(["--since", "HEAD~1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "code                       3         2        +1" in lines


def test_a_commit_that_is_not_there_is_named(repository: Path) -> None:
    with pytest.raises(SystemExit, match="nowhere"):
        count_code.main(["--at", "nowhere"])


def test_the_command_counts_this_tree() -> None:
    found = count_code.totals(count_code.count(count_code.files_here()))
    assert found["code"] > 10_000
    assert found["aqueduct .pyx"] > 1_000
    assert found[count_code.PROSE] > 10_000
