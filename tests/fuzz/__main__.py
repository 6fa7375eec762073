"""Fuzzing, as ci/fuzz.sh starts it once everything is built.

    python -m tests.fuzz run SECONDS [TARGET ...]
    python -m tests.fuzz merge [TARGET ...]
    python -m tests.fuzz replay TARGET FILE
    python -m tests.fuzz self-test

``run`` shares the seconds among the targets. It fails on a finding, and when the compiled edges
seen are too few for its target to have been fuzzed at all. New inputs stay in build/fuzz; ``merge``
brings the corpus in the repository up to date with them, with few more files than it needs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from tests.fuzz.seeds import SEEDS

__all__ = ["main"]

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
BUILD: Final = ROOT / "build" / "fuzz"

TARGETS: Final = (
    *("codec", "control-streams", "wire", "operations"),
    *("bpmux", "relink", "reactivesocket", "arrow"),
)
FLOORS: Final = {
    "codec": 1000,
    "control-streams": 1100,
    "wire": 1200,
    "operations": 800,
    "bpmux": 450,
    "relink": 415,
    "reactivesocket": 415,
    "arrow": 250,
}
"""Compiled edges: two thirds of what the corpus alone takes. Fewer, and it was not the target."""

MODULES: Final = {
    "arrow": ("columns", "reader", "writer"),
    "codec": ("decoder", "encoder", "frames", "receive_buffer"),
    "control-streams": ("control_encoder", "control_frames", "frames", "receive_buffer"),
    "wire": ("decoder", "frames", "ranges", "receive_buffer", "receiver", "tracker"),
    "operations": (
        *("decoder", "encoder", "frames", "ranges"),
        *("receive_buffer", "receiver", "tracker"),
    ),
    "bpmux": ("buffers", "chunks", "entities"),
    "relink": ("buffers", "packets"),
    "reactivesocket": ("buffers", "reactive_frames"),
}
"""The compiled modules that a target must get into."""

LENGTHS: Final = {
    "codec": 600,
    "control-streams": 400,
    "wire": 400,
    "operations": 160,
    "bpmux": 400,
    "relink": 400,
    "reactivesocket": 400,
    "arrow": 600,
}
"""The longest input, bytes: longer ones are slower and say no more."""

SANITIZER: Final = {
    # CPython ends without freeing most of what it holds.
    "detect_leaks": "0",
    # As without a sanitizer: MemoryError, which is tested elsewhere.
    "allocator_may_return_null": "1",
    # Three times as fast: `replay` says where memory came from.
    "malloc_context_size": "0",
    "quarantine_size_mb": "32",
}
SLOW: Final = 60
"""Seconds of the clock for one input; each takes well below one on a machine of its own."""
GRACE: Final = 900
"""Seconds that a run may take beyond its time, to start and to read its corpus."""


class Failure(Exception):
    """A finding, or a run that was none."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run")
    run_parser.add_argument("seconds", type=int)
    merge_parser = commands.add_parser("merge")
    for each in (run_parser, merge_parser):
        each.add_argument("targets", nargs="*", choices=[[], *TARGETS])
    replay_parser = commands.add_parser("replay")
    replay_parser.add_argument("target", choices=TARGETS)
    replay_parser.add_argument("file", type=Path)
    commands.add_parser("self-test")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "self-test":
            self_test()
        elif chosen.command == "replay":
            print(replay(chosen.target, chosen.file.resolve()))
        else:
            targets = chosen.targets or TARGETS
            for target in targets:
                if chosen.command == "run":
                    run(target, max(chosen.seconds // len(targets), 1))
                else:
                    merge(target)
    except Failure as failure:
        print(f"tests.fuzz: {failure}", file=sys.stderr)
        return 1
    return 0


def run(target: str, seconds: int) -> None:
    """Fuzzes one target for some seconds. Raises Failure."""
    begin = time.monotonic()
    fresh = folder("corpus", target)
    findings = folder("findings")
    status, log = engine(
        target,
        f"-max_total_time={seconds}",
        f"-max_len={LENGTHS[target]}",
        f"-timeout={SLOW}",
        "-rss_limit_mb=3000",
        f"-artifact_prefix={findings}/{target}-",
        *dictionary(target),
        str(fresh),
        *corpus(target),
        time_limit=seconds + GRACE,
    )
    if status:
        artifacts = sorted(findings.glob(f"{target}-*"), key=lambda path: path.stat().st_mtime)
        print(log[-6000:], file=sys.stderr)
        raise Failure(
            f"{target}: a finding (status {status}). Its input: "
            f"{artifacts[-1] if artifacts else 'none was written'}; once it is mended, keep it in "
            f"tests/fuzz/regressions/{target}/. Again: ci/fuzz.sh replay {target} FILE"
        )
    runs = [line for line in log.splitlines() if line.startswith("Done ")]
    seen = check_edges(target)
    taken = time.monotonic() - begin
    print(f"{target}: {runs[-1] if runs else 'no runs'}; {seen} compiled edges, {taken:.0f} s")
    if not runs:
        raise Failure(f"{target}: libFuzzer did not say that it was done:\n{log[-2000:]}")


def check_edges(target: str) -> int:
    """The compiled edges that the run took. Raises Failure if it cannot have been one."""
    path = report_path(target)
    counts = json.loads(path.read_text()) if path.exists() else {}
    seen: int = sum(taken for taken, _ in counts.values())
    missed = [name for name in MODULES[target] if not counts.get(name, (0, 0))[0]]
    if missed or seen < FLOORS[target]:
        raise Failure(
            f"{target}: {seen} compiled edges seen, at least {FLOORS[target]} expected, and some "
            f"in each of {', '.join(MODULES[target])}; by module: {counts}"
        )
    return seen


def merge(target: str) -> None:
    """The fewest and shortest inputs with all the coverage of the old and the new ones."""
    merged = folder("merged", target, empty=True)
    seeds = folder("seeds", target, empty=True)
    for index, seed in enumerate(SEEDS[target]()):
        (seeds / f"seed-{index}").write_bytes(seed)
    sources = [str(seeds), str(folder("corpus", target)), *corpus(target)]
    status, log = engine(
        target,
        "-set_cover_merge=1",
        f"-max_len={LENGTHS[target]}",
        str(merged),
        *sources,
        time_limit=3600,
    )
    if status:
        raise Failure(f"{target}: merging ended with status {status}\n{log[-2000:]}")
    kept = HERE / "corpus" / target
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(merged, kept)
    sizes = [path.stat().st_size for path in kept.iterdir()]
    print(f"{target}: {len(sizes)} inputs, {sum(sizes)} bytes")


def replay(target: str, file: Path) -> str:
    """One input under the sanitizer. Raises Failure."""
    status, log = engine(target, str(file), time_limit=GRACE, single=True)
    if status:
        raise Failure(f"{target}: status {status}\n{log}")
    return log


def self_test() -> None:
    """Faults on purpose must be found, and modules that count no edges refused. Raises Failure."""
    fresh, findings = folder("corpus", "canary", empty=True), folder("findings", "canary")
    arguments = ("-seed=1", "-max_len=8", f"-artifact_prefix={findings}/", str(fresh))
    status, log = engine("canary", "-runs=2000000", *arguments, time_limit=GRACE)
    if not status or "AddressSanitizer: heap-buffer-overflow" not in log or "look" not in log:
        raise Failure(f"the overflow of canary.c was not found (status {status}):\n{log[-4000:]}")
    unlisted = findings / "unlisted"
    unlisted.write_bytes(b"raise it!")
    status, log = engine("canary", str(unlisted), time_limit=GRACE)
    if not status or "this one is not on any list" not in log:
        raise Failure(f"an exception on no list passed (status {status}):\n{log[-4000:]}")
    status, log = engine("codec", "-runs=1", time_limit=GRACE, tree=ROOT)
    if not status or "count no edges" not in log:
        raise Failure(f"ordinary modules were fuzzed (status {status}):\n{log[-4000:]}")
    print("self-test: the overflow and the exception were found, ordinary modules refused")


def engine(
    target: str,
    *arguments: str,
    time_limit: float,
    tree: Path = BUILD / "tree",
    single: bool = False,
) -> tuple[int, str]:
    """Runs ``tests.fuzz.engine`` over the modules of ``tree``: its status, and what it said."""
    report_path(target).unlink(missing_ok=True)
    site = BUILD / "site"
    options = {**SANITIZER, **({"malloc_context_size": "30"} if single else {})}
    environment = {
        **os.environ,
        "LD_PRELOAD": str(site / "asan_with_fuzzer.so"),
        "ASAN_OPTIONS": ":".join(f"{name}={value}" for name, value in options.items()),
        "PYTHONMALLOC": "malloc",  # or the sanitizer would not see where Python's objects end
        "PYTHONPATH": os.pathsep.join(map(str, (tree, site, ROOT))),
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": "0",
    }
    command = [sys.executable, "-m", "tests.fuzz.engine", target, str(report_path(target))]
    log = folder("log") / f"{target}.txt"
    try:
        with log.open("w") as sink:
            done = subprocess.run(
                [*command, *arguments],
                cwd=BUILD,
                env=environment,
                stdout=sink,
                stderr=subprocess.STDOUT,
                timeout=time_limit,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        raise Failure(f"{target}: no end after {error.timeout:.0f} s; see {log}") from error
    return done.returncode, log.read_text(errors="replace")


def dictionary(target: str) -> list[str]:
    """What libFuzzer may insert whole: only the codec's inputs hold frames as they are."""
    return [f"-dict={HERE / 'frames.dict'}"] if target == "codec" else []


def corpus(target: str) -> list[str]:
    """The folders of known inputs."""
    places = (HERE / "corpus" / target, HERE / "regressions" / target)
    return [str(place) for place in places if place.exists()]


def report_path(target: str) -> Path:
    return folder("log") / f"{target}-edges.json"


def folder(*names: str, empty: bool = False) -> Path:
    """One of build/fuzz, made."""
    path = BUILD.joinpath(*names)
    if empty:
        shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True, exist_ok=True)
    return path


if __name__ == "__main__":
    sys.exit(main())
