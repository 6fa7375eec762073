"""The service of a writer, or its program, is killed at each step: each row is there once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from signal import SIGKILL

import pytest

from tests.sinks.killing import ATTEMPT_STEPS, CLAIM_STEPS, COMMIT_STEPS, Deathbed
from tests.sinks.program import Programs, ids_of, write
from tests.sinks.readers import parquet_rows

pytestmark = pytest.mark.checkout

Rows = Callable[[], Counter[int]]
KEYS = itertools.count(1)

SERVICE = [
    *itertools.product(ATTEMPT_STEPS, range(4)),
    *itertools.product(COMMIT_STEPS, range(3)),
    *itertools.product(CLAIM_STEPS, range(1)),
]
"""Steps, and how often each comes before without a death: 50 of them."""
PROGRAM = [
    *itertools.product((*ATTEMPT_STEPS, *COMMIT_STEPS, *CLAIM_STEPS), range(1)),
    ("receipt leaves", 2),
    ("write 1", 3),
    ("commit done", 1),
    ("answer leaves", 2),
]
"""The same for the program: 20 of them."""
USUAL = {
    "service": {
        ("prepare middle", 0),
        ("receipt leaves", 1),
        ("commit begins", 0),
        ("commit done", 1),
        ("answer leaves", 0),
        ("claim ends", 0),
    },
    "program": {("prepare ends", 0), ("commit done", 0), ("answer leaves", 0)},
}


def points(victim: str, steps: list[tuple[str, int]]) -> list[object]:
    return [
        pytest.param(*point, marks=() if point in USUAL[victim] else pytest.mark.long)
        for point in steps
    ]


@pytest.fixture(
    scope="module", params=["parquet", pytest.param("postgres", marks=pytest.mark.long)]
)
def bed_and_rows(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Deathbed, Rows]]:
    folder = tmp_path_factory.mktemp("sink")
    if request.param == "parquet":
        place, rows = str(folder / "out"), lambda: parquet_rows(folder / "out")
    else:
        server = request.getfixturevalue("postgres")
        server.sql("CREATE TABLE written (id bigint)")
        place, rows = f"{server.uri} written", lambda: server.ids("written")
    bed = Deathbed(folder, request.param, place)
    try:
        yield bed, rows
    finally:
        bed.end()


@pytest.fixture(scope="module")
def programs(bed_and_rows: tuple[Deathbed, Rows]) -> Iterator[Programs]:
    made = Programs(bed_and_rows[0].address)
    yield made
    made.end()


@pytest.fixture(autouse=True)
def cleared(bed_and_rows: tuple[Deathbed, Rows]) -> Iterator[None]:
    yield
    bed_and_rows[0].plans.clear()


def test_all_points_are_there() -> None:
    assert (len(SERVICE), len(PROGRAM)) == (50, 20)
    assert USUAL["service"] <= set(SERVICE) and USUAL["program"] <= set(PROGRAM)


def plan(bed: Deathbed, step: str, later: int, victim: str) -> None:
    if step == "commit done" and bed.kind == "postgres":
        step = "commit ends"  # done is done with the transaction, within ``commit``
    bed.plans.set(step, victim, later=later)


def seen(rows: Counter[int], first: int) -> Counter[int]:
    return Counter({i: n for i, n in rows.items() if i // 1000 == first // 1000})


@pytest.mark.parametrize(("step", "later"), points("service", SERVICE))
def test_each_row_is_there_once_when_the_service_dies(
    bed_and_rows: tuple[Deathbed, Rows], step: str, later: int
) -> None:
    bed, rows = bed_and_rows
    number = next(KEYS)
    before = len(bed.plans.killed())
    with bed.connect() as client:
        plan(bed, step, later, "service")
        write(client, f"key-{number}", 1000 * number)
    assert len(bed.plans.killed()) == before + 1
    assert seen(rows(), 1000 * number) == ids_of(1000 * number)


@pytest.mark.parametrize(("step", "later"), points("program", PROGRAM))
def test_each_row_is_there_once_when_the_program_dies(
    bed_and_rows: tuple[Deathbed, Rows], programs: Programs, step: str, later: int
) -> None:
    bed, rows = bed_and_rows
    number = next(KEYS)
    key, first = f"key-{number}", 1000 * number
    before = len(bed.plans.killed())
    plan(bed, step, later, "client")
    assert programs.run(key, first) == -SIGKILL
    assert len(bed.plans.killed()) == before + 1
    assert programs.run(key, first) == 0
    assert seen(rows(), first) == ids_of(first)
    assert programs.run(key, first) == 0  # there is nothing to do
    assert seen(rows(), first) == ids_of(first)
