"""The benchmarks say what they measured, and the check of their floors can fail."""

from __future__ import annotations

import itertools
import json
import mmap
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from benchmarks import cases as bench_cases
from benchmarks import certificate, check, compare, core, loopback, processes, relayed, results
from benchmarks.peers import common, core_peer
from benchmarks.spark import cases as spark_plan
from tests.support.selection import mostly_long

pytestmark = pytest.mark.checkout

BENCHMARKS = Path(results.__file__).parent
FLOORS = check.load(check.FLOORS)


def rival_of(floor: check.Floor) -> str:
    return floor.against.replace("*", "best")


def passing_run() -> dict[str, Any]:
    """A made-up run in which every floor of floors.toml just holds."""
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}

    def put(case: str, contestant: str, metric: str, value: float, spread: float) -> None:
        for repeat in range(3):
            key = case, contestant, repeat
            rows.setdefault(key, dict(zip(("case", "contestant", "repeat"), key, strict=True)))
            rows[key][metric] = value * (1 + repeat * spread)

    for floor in FLOORS:
        bound = floor.min if floor.min is not None else floor.max
        assert bound is not None
        spread = 0.001 if floor.min is not None else -0.001
        if floor.against:
            rounding = 1 - 1e-9 if floor.min is not None else 1 + 1e-9
            put(floor.case, rival_of(floor), floor.metric, 100.0 / bound * rounding, spread)
            put(floor.case, floor.contestant, floor.metric, 100.0, spread)
        else:
            put(floor.case, floor.contestant, floor.metric, bound, spread)
    return {"format": results.FORMAT, "environment": {}, "settings": {}, "rows": [*rows.values()]}


def worsened(floor: check.Floor, contestant: str, factor: float) -> results.Run:
    document = passing_run()
    for row in document["rows"]:
        if row["case"] == floor.case and row["contestant"] == contestant:
            row[floor.metric] *= factor
    return results.Run(document)


def run_check(folder: Path, document: object, *options: str) -> subprocess.CompletedProcess[str]:
    path = folder / "run.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    command = [sys.executable, str(BENCHMARKS / "check.py"), str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# ----------------------------------------------------------------- the check


def test_a_run_at_the_floors_passes(tmp_path: Path):
    done = run_check(tmp_path, passing_run())
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == f"{len(FLOORS)} of {len(FLOORS)} floors hold"


@pytest.mark.parametrize("floor", FLOORS, ids=str)
def test_each_floor_is_missed_by_a_bad_run_and_named(floor: check.Floor):
    run = worsened(floor, floor.contestant, 0.98 if floor.min is not None else 1.02)
    assert check.miss(floor, run)
    about = floor.case, floor.contestant, floor.metric
    for other in FLOORS:
        missed = about == (other.case, other.contestant, other.metric)
        assert bool(check.miss(other, run)) == missed, other


@pytest.mark.parametrize("floor", [floor for floor in FLOORS if floor.against], ids=str)
def test_each_floor_is_missed_if_its_rival_is_better(floor: check.Floor):
    run = worsened(floor, rival_of(floor), 1.02 if floor.min is not None else 0.98)
    assert [other for other in FLOORS if check.miss(other, run)] == [floor]


@pytest.mark.parametrize("floor", FLOORS, ids=str)
@pytest.mark.parametrize("side", ["contestant", "against"])
def test_a_floor_without_its_measurement_is_missed(floor: check.Floor, side: str):
    name = getattr(floor, side) or floor.contestant
    gone = floor.case, rival_of(floor) if name == floor.against else name
    document = passing_run()
    document["rows"] = [row for row in document["rows"] if (row["case"], row["contestant"]) != gone]
    assert name in check.miss(floor, results.Run(document))


def test_one_failed_measurement_of_three_is_a_miss(tmp_path: Path):
    document = passing_run()
    row = next(row for row in document["rows"] if row["case"] == "sink-1m")
    row.pop("mib_s")
    row["error"] = "connection lost in the middle"
    done = run_check(tmp_path, document)
    assert done.returncode == 1
    (missed,) = [line for line in done.stdout.splitlines() if line.startswith("MISSED")]
    assert "sink-1m" in missed
    assert "connection lost in the middle" in missed


def test_the_median_of_the_ratios_counts():
    floor = check.Floor("case", "ours/a", "mib_s", against="theirs/b", min=0.85)
    ours, theirs = [90.0, 10.0, 200.0], [100.0, 100.0, 200.0]
    rows = [
        {"case": "case", "contestant": name, "repeat": k, "mib_s": value}
        for name, values in (("ours/a", ours), ("theirs/b", theirs))
        for k, value in enumerate(values)
    ]
    run = results.Run({"format": results.FORMAT, "rows": rows})
    assert check.miss(floor, run) == ""
    rows[0]["mib_s"] = 84.0
    assert "below" in check.miss(floor, run)


@pytest.mark.parametrize(
    ("metric", "bound", "values", "best"),
    [
        ("mib_s", {"min": 0.85}, {"raw/a": [100, 100, 900], "raw/b": [110, 110, 110]}, "raw/b"),
        ("p50_us", {"max": 2.0}, {"raw/a": [40, 60, 60], "raw/b": [70, 10, 70]}, "raw/a"),
    ],
)
def test_against_the_best_of_several(
    metric: str, bound: dict[str, float], values: dict[str, list[float]], best: str
):
    floor = check.Floor("case", "ours/a", metric, against="raw/*", **bound)
    ours = {"ours/a": [100.0] * 3, "rawhide/c": [1e-6 if "min" in bound else 1e6] * 3}
    rows = [
        {"case": "case", "contestant": name, "repeat": k, metric: value}
        for name, row in (ours | values).items()
        for k, value in enumerate(row)
    ]
    run = results.Run({"format": results.FORMAT, "rows": rows})
    assert check.rival(floor, run) == best
    ratios = [100.0 / value for value in values[best]]
    assert check.measured(floor, run) == results.Spread.of(ratios)
    assert not check.miss(floor, run)
    rows.append({"case": "case", "contestant": "raw/c", "repeat": 0, "error": "lost"})
    assert "raw/c failed: lost" in check.miss(floor, run)


def test_a_number_that_is_no_number_is_a_miss():
    floor = check.Floor("case", "ours/a", "mib_s", min=1)
    row = {"case": "case", "contestant": "ours/a", "repeat": 0, "mib_s": float("nan")}
    assert check.miss(floor, results.Run({"format": results.FORMAT, "rows": [row]}))


def test_floors_may_name_tests_of_pytest_benchmark(tmp_path: Path):
    document = {
        "machine_info": {},
        "benchmarks": [{"name": "test_encode", "stats": {"median": 0.5}}],
    }
    floors = tmp_path / "floors.toml"
    demand = '[[floor]]\ncase = "test_encode"\ncontestant = "pytest"\nmetric = "ops_s"\n'
    floors.write_text(demand + "min = 2\n")
    assert run_check(tmp_path, document, "--floors", str(floors)).returncode == 0
    floors.write_text(demand + "min = 2.1\n")
    assert run_check(tmp_path, document, "--floors", str(floors)).returncode == 1


@pytest.mark.parametrize(
    "document", ["", "{", "[]", "{}", '{"format": "other"}', '{"machine_info": {}}']
)
def test_a_file_that_is_no_run_is_status_two(tmp_path: Path, document: str):
    done = run_check(tmp_path, document)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[[floor]]\n",
        'floor = "no"\n',
        '[[floor]]\ncase = "a"\ncontestant = "b"\nmetric = "mib_s"\n',  # demands nothing
        '[[floor]]\ncase = "a"\ncontestant = "b"\nmetric = "mib_s"\nmin = "1"\n',
        '[[floor]]\ncase = "a"\ncontestant = "b"\nmetric = "mib_s"\nmin = true\n',
        '[[floor]]\ncase = "a"\ncontestant = "b"\nmetric = "speed"\nmin = 1\n',
        '[[floor]]\ncase = "a"\ncontestant = "b"\nmetric = "mib_s"\nmin = 1\nmim = 2\n',
    ],
)
def test_floors_that_demand_nothing_are_refused(tmp_path: Path, text: str):
    floors = tmp_path / "floors.toml"
    floors.write_text(text)
    assert run_check(tmp_path, passing_run(), "--floors", str(floors)).returncode == 2


def test_every_floor_is_of_a_case_that_the_plan_has():
    planned = {(case.name, c.name) for case in bench_cases.PLAN for c in case.contestants}
    planned |= {(case.name, c.name) for case in core.PLAN for c in case.contestants}
    planned |= {(case.name, c.name) for case in relayed.PLAN for c in case.contestants}
    planned |= {(case.name, c.name) for case in spark_plan.PLAN for c in case.contestants}
    for floor in FLOORS:
        assert (floor.case, floor.contestant) in planned
        if floor.against.endswith("*"):
            prefix = floor.against[:-1]
            assert (
                len([1 for case, c in planned if case == floor.case and c.startswith(prefix)]) > 1
            )
        else:
            assert not floor.against or (floor.case, floor.against) in planned


@pytest.mark.parametrize("carrier", bench_cases.CARRIERS)
def test_every_case_of_a_byte_stream_has_all_its_floors(carrier: str):
    ours, flight = f"aqueduct/{carrier}", f"flight/{carrier}"
    for case in (case for case in bench_cases.PLAN if case.name.startswith(carrier)):
        demanded = {
            (floor.metric, floor.against)
            for floor in FLOORS
            if (floor.case, floor.contestant) == (case.name, ours)
        }
        wanted = {
            "request": {("p50_us", flight)},
            "sync-request": set(),  # these three are reported beside it
            "exchange-request": set(),
            "open-request": set(),
        }.get(
            case.mode,
            {("mib_s", flight), ("mib_s", "sockets/*"), ("cpu_gib", flight), ("growth_mib", "")},
        )
        assert demanded == wanted, case.name


def test_words_and_whole_names_choose_cases():
    assert [case.name for case in bench_cases.select("=sink-1m,tls-echo")] == [
        "sink-1m", "tls-echo-1m", "tls-echo-64k",
    ]  # fmt: skip
    assert {case.name for case in bench_cases.select("sink-1m")} == {
        "sink-1m", "sink-1m-1200", "sink-1m-1452", "sink-1m-8900",
        "tcp-sink-1m", "unix-sink-1m", "tls-sink-1m",
    }  # fmt: skip
    some = bench_cases.select("=sockets/unix-copy")
    assert {c.name for case in some for c in case.contestants} == {"sockets/unix-copy"}
    assert len(some) == len(bench_cases.STREAM_BULK)
    assert bench_cases.select("no-such") == []


# ------------------------------------------------------------------ comparing


def changed(document: dict[str, Any], metric: str, factor: float) -> results.Run:
    document = deepcopy(document)
    for row in document["rows"]:
        if metric in row:
            row[metric] *= factor
    return results.Run(document)


@pytest.mark.parametrize(
    ("metric", "factor", "verdict"),
    [
        ("mib_s", 1.1, "better"),
        ("mib_s", 0.9, "worse"),
        ("mib_s", 1.001, "within spread"),
        ("encoded_s", 1.5, "better"),
    ],
)
def test_a_change_counts_only_outside_the_spread(metric: str, factor: float, verdict: str):
    document = passing_run()
    lines = compare.compare(results.Run(document), changed(document, metric, factor), [metric])
    assert lines
    assert {line[-1] for line in lines} == {verdict}


def test_less_is_better_for_times():
    rows = [{"case": "request", "contestant": "a/b", "repeat": k, "p50_us": 300} for k in range(3)]
    document = {"format": results.FORMAT, "rows": rows}
    ((*_, verdict),) = compare.compare(
        results.Run(document), changed(document, "p50_us", 0.5), ["p50_us"]
    )
    assert verdict == "better"


def test_comparing_two_files_shows_what_else_differed(tmp_path: Path):
    before, after = passing_run(), passing_run()
    before["environment"], after["environment"] = {"kernel": "Linux 1"}, {"kernel": "Linux 2"}
    after["rows"] = after["rows"][:-3]
    for name, document in (("before", before), ("after", after)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    command = [sys.executable, str(BENCHMARKS / "compare.py")]
    command += [str(tmp_path / "before.json"), str(tmp_path / "after.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "kernel: Linux 1 -> Linux 2" in done.stdout
    assert "only before" in done.stdout


def test_contestants_run_forwards_and_backwards_each_once_a_turn():
    once, thrice = bench_cases.select("=unix-sink-1m,=tcp-sink-1m")[::-1]
    assert (once.turns, thrice.turns) == (1, 3)
    order = [list(loopback._in_turn([thrice, once], repeat)) for repeat in range(2)]
    assert [turn for case, _, turn in order[1] if case is once] == [1] * 5
    turns = [(turn, c) for each in order for case, c, turn in each if case is thrice]
    names = list(thrice.contestants)
    wanted = [(n, c) for n in range(6) for c in (names[::-1] if n % 2 else names)]
    assert turns == wanted
    assert {case.name for case in bench_cases.PLAN if case.turns > 1} == {
        "tcp-sink-1m", "tcp-source-1m", "tcp-echo-1m",
    }  # fmt: skip


# ------------------------------------------------------------------ measuring


@pytest.mark.parametrize(
    "names",
    mostly_long(
        ["codec sink-64k-1200", "codec sink-64k sink-64k-1200 open-request"], "codec sink-64k-1200"
    ),
)
def test_a_real_run_has_every_contestant_in_its_table_and_its_json(tmp_path: Path, names: str):
    path = tmp_path / "results" / "run.json"
    command = [sys.executable, str(BENCHMARKS / "loopback.py"), "--quick", "--repeat", "1"]
    only = ",".join(f"={name}" for name in names.split())
    command += ["--only", only, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = results.Run.load(path)
    measured = {(row["case"], row["contestant"]) for row in run.rows}
    cases = [case for case in bench_cases.PLAN if case.name in run.cases()]
    assert [case.name for case in cases] == names.split()
    assert measured == {(case.name, c.name) for case in cases for c in case.contestants}
    for row in run.rows:
        assert row["contestant"] in done.stdout
        if row["case"].startswith("sink"):
            assert row["bytes"] > 1 << 20
            for metric in ("mib_s", "client_cpu_gib", "server_cpu_gib"):
                assert row[metric] > 0
            assert row["cpu_gib"] == pytest.approx(row["client_cpu_gib"] + row["server_cpu_gib"])
    known = run.document["environment"].keys()
    assert {"python", "packages", "built", "cores", "kernel", "congestion"} <= known
    assert f"[{len(run.rows)}/{len(run.rows)}, " in done.stderr, "the progress line"


@pytest.mark.parametrize(
    ("carrier", "size"),
    mostly_long(
        itertools.product(bench_cases.CARRIERS, ("1m", "64k")),
        ("tcp", "64k"),
    ),
)
def test_the_rivals_over_byte_streams_move_every_batch(carrier: str, size: str, tmp_path: Path):
    """Their own checks say so: totals of both sides, and the last batch as a whole."""
    paths = certificate.write(tmp_path)
    for case in (
        case for case in bench_cases.PLAN if case.name.startswith(f"{carrier}-echo-{size}")
    ):
        assert len(case.contestants) == (5 if carrier == "unix" else 4)
        for contestant in case.contestants[1:]:
            setup = replace(
                case.setup(contestant, True),
                nbytes=8 * bench_cases.MiB,
                certificate=str(paths[0]),
                key=str(paths[1]),
            )
            result = loopback.measure(contestant.peer, setup)
            row = loopback.row_of(case, contestant, 0, result)
            assert 7 * bench_cases.MiB < row["bytes"] <= 8 * bench_cases.MiB
            assert row["mib_s"] > 0
            assert row["client_growth_mib"] >= 0
            assert row["growth_mib"] == max(row["client_growth_mib"], row["server_growth_mib"])


def test_plain_sockets_see_to_it_that_the_cipher_is_the_one_named(tmp_path: Path):
    paths = certificate.write(tmp_path)
    setup = common.Setup("sink", 1 << 16, 1 << 20, carrier="tls", aes128=True)
    setup = replace(setup, certificate=str(paths[0]), key=str(paths[1]))
    assert loopback.measure("sockets", setup)["bytes"] > 0
    server, client = (
        [sys.executable, str(BENCHMARKS / "peers" / "sockets_peer.py"), role, json.dumps(told)]
        for role, told in (("server", vars(setup)), ("client", vars(setup)))
    )
    with pytest.raises(processes.Failed, match="the cipher is TLS_AES_256_GCM_SHA384"):
        processes.run_pair(server, client, 60)  # without the configuration of OpenSSL


def test_memory_that_a_measurement_took_is_told_from_what_was_there():
    usage = common.Usage()
    with mmap.mmap(-1, 16 << 20) as taken:
        taken.write(b"x" * len(taken))
        report = usage.report()
        assert report["memory"] >= len(taken)
        assert 0 <= report["growth"] < 48 << 20  # the bytes written were there twice
        assert report["cpu"] > 0
        if sys.platform == "linux":
            assert report["growth"] > 15 << 20
            assert common.Usage().report()["growth"] < 8 << 20, "the peak is forgotten"


@pytest.mark.long
def test_a_real_run_of_the_core_has_every_measurement_in_its_tables(tmp_path: Path):
    path = tmp_path / "results" / "run.json"
    command = [sys.executable, str(BENCHMARKS / "core.py"), "--quick", "--repeat", "1"]
    done = subprocess.run(
        [*command, "--json", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    run = results.Run.load(path)
    assert [(row["case"], row["contestant"]) for row in run.rows] == [
        (case.name, c.name) for case in core.PLAN for c in case.contestants
    ]
    shown = {name for _, metrics in core.TABLES for name in metrics}
    assert shown <= results.UNITS.keys()
    if sys.platform != "linux":
        shown -= {"side_bytes", "resident_bytes"}  # what the system does not tell
    for row in run.rows:
        metrics = shown & row.keys()
        assert metrics
        assert all(row[metric] > 0 for metric in metrics - {"left_bytes"})
    for case in core.PLAN:
        assert f"| {case.name} " in done.stdout
    assert {name for row in run.rows for name in row if name in shown} == shown


@pytest.mark.long
def test_a_real_run_by_way_of_another_worker_has_both_ways_and_their_ratio(tmp_path: Path):
    path = tmp_path / "run.json"
    command = [sys.executable, str(BENCHMARKS / "relayed.py"), "--quick", "--repeat", "1"]
    done = subprocess.run(
        [*command, "--json", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    run = results.Run.load(path)
    for case in relayed.PLAN:
        assert len(run.ratios(case.name, *relayed.NAMES, "mib_s")) == 1
        assert f"| {case.name} " in done.stdout
    assert len(run.rows) == 2 * len(relayed.PLAN)


def test_a_measurement_of_the_core_that_goes_wrong_is_an_error():
    with pytest.raises(processes.Failed, match="KeyError"):
        core.measure("no-such", 1)
    with pytest.raises(AssertionError, match="7 messages were taken, not 8"):
        core_peer.expect(7, 8, "messages were taken")


def test_a_measurement_that_fails_is_an_error_with_its_reason(tmp_path: Path):
    paths = certificate.write(tmp_path)
    setup = common.Setup("sink", 1 << 16, 1 << 20, certificate=str(paths[0]), key=str(paths[1]))
    with pytest.raises(processes.Failed, match="No such file or directory"):
        loopback.measure("no-such", setup)
    with pytest.raises(processes.Failed, match="maximum datagram size is 1200"):
        loopback.measure("aioquic", common.Setup(**{**vars(setup), "datagram": 7}))


# ------------------------------------------------------------------ what is checked


def works(mode: str) -> tuple[common.Work, common.Work]:
    setup = common.Setup(mode, 1 << 12, 1 << 16)
    return common.Work(setup), common.Work(setup)


def deliver(batches: list[pa.RecordBatch], mode: str = "sink") -> tuple[common.Work, common.Work]:
    client, server = works(mode)
    list(client)
    for batch in batches:
        server.arrived(batch)
    return client, server


def test_both_sides_compare_their_totals():
    batches = list(works("sink")[0])
    client, server = deliver(batches)
    told = vars(client.mine("sink", True))
    assert server.compare("sink", False, told) == told
    assert client.compare("sink", True, vars(server.mine("sink", False))) == told


@pytest.mark.parametrize("spoil", ["lost", "swapped", "changed"])
def test_a_spoilt_transfer_is_found(spoil: str):
    batches = list(works("sink")[0])
    if spoil == "lost":
        batches.pop()
    elif spoil == "swapped":
        batches[0], batches[1] = batches[1], batches[0]
    else:
        batches[3] = batches[2]
    client, server = deliver(batches)
    with pytest.raises(AssertionError):
        server.compare("sink", False, vars(client.mine("sink", True)))


def test_the_last_batch_is_looked_at_whole():
    batches = list(works("sink")[0])
    last = batches[-1]
    batches[-1] = last.set_column(1, last.schema.field(1), last.column(2))
    client, server = deliver(batches)
    with pytest.raises(AssertionError, match="last batch"):
        server.compare("sink", False, vars(client.mine("sink", True)))
