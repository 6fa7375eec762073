"""The benchmark of Spark jobs runs, says what it measured, and has a floor for what is demanded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import check, results
from benchmarks.spark import cases, functions, publish
from benchmarks.spark.services import Running

pytestmark = pytest.mark.checkout

FLOORS = [floor for floor in check.load(check.FLOORS) if floor.case.startswith("spark-")]


def made_up() -> results.Run:
    rows = [
        {"case": case.name, "contestant": c.name, "repeat": repeat, "job_s": 2.0 + k + repeat}
        for case in cases.PLAN
        for k, c in enumerate(case.contestants)
        for repeat in range(3)
    ]
    return results.Run({"format": results.FORMAT, "rows": rows})


def test_every_case_has_a_floor_and_every_floor_a_case():
    assert {floor.case for floor in FLOORS} == {case.name for case in cases.PLAN}
    pairs = {(case.name, c.name) for case in cases.PLAN for c in case.contestants}
    for floor in FLOORS:
        assert (floor.case, floor.contestant) in pairs
        assert not floor.against or (floor.case, floor.against) in pairs


def test_words_choose_cases():
    assert [case.name for case in cases.select("slow,memory")] == ["spark-slow", "spark-memory"]
    assert cases.select("") == list(cases.PLAN)
    assert cases.select("no-such") == []


def test_differences_are_taken_within_a_repeat():
    rows = [
        {"case": "c", "contestant": name, "repeat": k, "job_s": value}
        for name, values in (("ours/a", [3.0, 5.0, 4.0]), ("theirs/b", [1.0, 9.0]))
        for k, value in enumerate(values)
    ]
    run = results.Run({"format": results.FORMAT, "rows": rows})
    assert run.differences("c", "ours/a", "theirs/b", "job_s") == [2.0, -4.0]


def test_the_report_has_every_pair_with_its_difference_and_what_is_demanded():
    text = publish.tables(made_up())
    for case in cases.PLAN:
        assert f"| {case.name} " in text
    line = next(
        line
        for line in text.splitlines()
        if "spark-plain-tcp" in line and "aqueduct/tcp" in line and "spark/identity" in line
    )
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[4] == "1.33 (1.25-1.50)"
    assert cells[5] == "1.00 (1.00-1.00)"
    assert cells[6] == "≤ 1.05"


def test_the_published_table_has_a_line_for_each_floor():
    text = publish.section(made_up())
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    lines = [line for line in lines if line and line[0].startswith("spark-")]
    assert [line[0] for line in lines] == [floor.case for floor in FLOORS]
    assert lines[0][1:] == ["s, of spark/identity", "1.33 (1.25-1.50)", "≤ 1.05"]
    assert [lines[-1][0], *lines[-1][2:]] == ["spark-memory", "-", "≤ 64"]


def test_a_run_of_something_else_is_refused():
    row = {"case": "sink-1m", "contestant": "a/b", "repeat": 0, "mib_s": 1.0}
    with pytest.raises(results.BadRun, match="no case of Spark"):
        publish.section(results.Run({"format": results.FORMAT, "rows": [row]}, "x.json"))


def test_publishing_replaces_the_section_and_nothing_else(tmp_path: Path):
    readme, run = tmp_path / "README.md", tmp_path / "run.json"
    readme.write_text(f"before\n{publish.BEGIN}\nold\n{publish.END}\nafter\n")
    run.write_text(json.dumps(made_up().document))
    assert publish.main([str(run), "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "old" not in text and "spark-memory" in text
    readme.write_text("no marks\n")
    assert publish.main([str(run), "--readme", str(readme)]) == 2
    assert readme.read_text() == "no marks\n"


def test_the_services_answer_and_count(tmp_path: Path):
    import pyarrow as pa

    batches = [pa.record_batch({"id": [k, k + 1]}) for k in range(3)]
    flight = Running("flight", f"grpc+unix://{tmp_path}/flight.sock")
    try:
        for make in (functions.flight_waiting, functions.flight_pipelined):
            answers = list(make(flight.address, "echo")(iter(batches)))
            assert answers == batches
        assert flight.counters() == {}
        assert flight.resident() > 1 << 20
    finally:
        flight.close()


@pytest.mark.long
@pytest.mark.spark
def test_a_real_run_checks_its_answers_and_writes_its_rows(tmp_path: Path):
    path = tmp_path / "results" / "spark.json"
    command = [sys.executable, "-m", "benchmarks.spark", "--quick", "--repeat", "1"]
    command += ["--only", "slow,workers", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = results.Run.load(path)
    assert run.cases() == ["spark-slow", "spark-workers"]
    for row in run.rows:
        assert row["job_s"] > 0
        assert row["contestant"] in done.stdout
    (workers,) = run.values("spark-workers", "aqueduct/tcp", "handshakes_worker").values()
    assert workers == 1.0
