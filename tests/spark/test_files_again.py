"""Parts of files that are sent to a sink again because their call broke."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import aqueduct
from aqueduct.errors import ConfigError, ConnectFailed, ConnectionLost, HandlerFailed
from aqueduct.testing.stream_relay import End, Fate
from spark_udfs import send_files
from spark_udfs.calls.pool import process_pool
from spark_udfs.files.paths import FileFailed
from tests.spark.callees import free_port
from tests.spark.test_engine_retries import TCP, cut

ROWS = 20_000
QUICK: dict[str, Any] = {"backoff": 0.01, "backoff_limit": 0.05, "batch_bytes": 16_384}


class Kept:
    """A sink that knows a part by its run, as one has to that may be told of it twice."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        """Run and attempt of each call that began."""
        self.rows: dict[str, list[int]] = {}
        """What was there at the end of a call, by run."""
        self.ended: list[str] = []
        """Attempts that were told to the end."""
        self.service = aqueduct.Service("kept")

        @self.service.handler("keep", kind="sink")
        def keep(batches, call):
            self.calls.append((call.write_key, call.attempt))
            rows: list[int] = []
            for batch in batches:
                rows += batch["id"].to_pylist()
            self.rows[call.write_key] = rows
            self.ended.append(call.attempt)

        @self.service.handler("refuse", kind="sink")
        def refuse(batches, call):
            self.calls.append((call.write_key, call.attempt))
            raise ValueError("not to my taste")


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def paths(tmp_path):
    """Three files, one row group each."""
    found = [tmp_path / f"{k}.parquet" for k in range(3)]
    for k, path in enumerate(found):
        pq.write_table(pa.table({"id": range(k * ROWS, (k + 1) * ROWS)}), path)
    return [str(path) for path in found]


@pytest.fixture(autouse=True)
def fresh_pool():
    yield
    process_pool().close()


def receipts(function, paths):
    found = function(iter([pa.record_batch({"path": pa.array(paths, pa.string())})]))
    return [row for batch in found for row in batch.to_pylist()]


def check(kept, rows):
    """Every row is there once, and the receipts say what was sent by the call that counts."""
    assert [row["error"] for row in rows] == [None] * len(rows)
    assert [row["rows_in"] for row in rows] == [ROWS] * len(rows)
    assert sorted(itertools.chain(*kept.rows.values())) == list(range(len(rows) * ROWS))
    assert len(kept.rows) == len(rows)


def test_a_part_whose_call_was_cut_is_sent_again_from_its_beginning(kept, paths, running, caplog):
    fates = [(Fate(250_000, End.RESET), Fate()), (Fate(300, End.FIN), Fate())]
    with (
        running(kept.service, TCP, dev_certificate=False) as address,
        cut(address, fates) as (place, proxy),
        caplog.at_level(logging.WARNING, "spark_udfs"),
    ):
        function = send_files(place, "keep", retries=3, **QUICK)
        check(kept, receipts(function, paths))
        assert len(proxy.links) == 3
    assert len({write_key for write_key, _ in kept.calls}) == 3
    assert kept.ended == ["", "0.2", ""], "the first file whole, the second by its third call"
    warned = [record.getMessage() for record in caplog.records if "again" in record.getMessage()]
    assert len(warned) == 2
    assert all(paths[1] in text and "ConnectionLost" in text for text in warned)


def test_a_service_that_is_killed_is_waited_for(paths, running):
    """Nobody is there for a while, then somebody who knows of nothing."""
    port = free_port()
    first, second = Kept(), Kept()
    came = threading.Event()

    @first.service.handler("slow", kind="sink")
    def slow(batches, call):
        next(iter(batches))
        came.set()
        while not call.cancelled:
            time.sleep(0.01)

    @second.service.handler("slow", kind="sink")
    def quick(batches, call):
        second.rows[call.write_key] = [
            value for batch in batches for value in batch["id"].to_pylist()
        ]

    address = f"aqueduct+tcp://127.0.0.1:{port}"
    function = send_files(address, "slow", retries=100, deadline=60, **QUICK)
    found: list[dict] = []
    thread = threading.Thread(target=lambda: found.extend(receipts(function, paths[:1])))
    with running(first.service, address, dev_certificate=False, drain=0):
        thread.start()
        assert came.wait(20)
    time.sleep(0.2)
    with running(second.service, address, dev_certificate=False):
        thread.join(30)
    check(second, found)


def test_the_next_address_is_tried_before_the_same_one_again(kept, paths, running):
    other = Kept()
    with ExitStack() as stack:
        address = stack.enter_context(running(kept.service, TCP, dev_certificate=False))
        there = stack.enter_context(running(other.service, TCP, dev_certificate=False))
        always = [(Fate(20_000, End.RESET), Fate())] * 5
        place, proxy = stack.enter_context(cut(address, always))
        # A long pause at the one that broke holds up nobody.
        function = send_files([place, there], "keep", retries=1, backoff=30, batch_bytes=16_384)
        check(other, receipts(function, paths[:1]))
        assert len(proxy.links) == 1


def test_when_retries_are_used_up_the_error_says_so(kept, paths, running):
    always = [(Fate(50_000, End.RESET), Fate())] * 5
    with (
        running(kept.service, TCP, dev_certificate=False) as address,
        cut(address, always) as (place, proxy),
    ):
        with pytest.raises(ConnectionLost) as caught:
            receipts(send_files(place, "keep", retries=2, **QUICK), paths)
        assert len(proxy.links) == 3
        assert str(caught.value).startswith(paths[0])
        assert f"tried 3 times at {place} (retries=2)" in str(caught.value)
        with pytest.raises(ConnectionLost) as caught:
            receipts(send_files(place, "keep", **QUICK), paths)
        assert len(proxy.links) == 4
        assert "tried" not in str(caught.value)
        reported = send_files(place, "keep", retries=0, on_failure="report", **QUICK)
        (row,) = receipts(reported, paths[:1])
        assert paths[0] in row["error"]
    assert kept.ended == []


def test_what_the_handler_raises_is_not_tried_again(kept, paths, running):
    with running(kept.service, TCP, dev_certificate=False) as address:
        with pytest.raises(HandlerFailed, match="not to my taste"):
            receipts(send_files(address, "refuse", retries=5, **QUICK), paths)
    assert len(kept.calls) == 1


def test_a_deadline_is_for_all_calls_together(kept, paths):
    nowhere = f"aqueduct+tcp://127.0.0.1:{free_port()}"
    function = send_files(nowhere, "keep", retries=10**6, deadline=0.5, backoff=0.01)
    with pytest.raises(ConnectFailed, match=r"0\.parquet.*within the deadline of 0\.5 s"):
        receipts(function, paths)


def test_a_file_that_changed_meanwhile_is_an_error_that_names_it(kept, paths, running, tmp_path):
    fates = [(Fate(50_000, End.RESET), Fate())]
    with (
        running(kept.service, TCP, dev_certificate=False) as address,
        cut(address, fates) as (place, proxy),
    ):
        rows = iter([pa.record_batch({"path": paths[:1]})])
        done = threading.Event()

        def replace():
            while not proxy.links or not proxy.links[0].over:
                if done.wait(0.005):
                    return
            (tmp_path / "0.parquet").write_bytes(b"PAR1 and nothing of the kind")

        thread = threading.Thread(target=replace)
        thread.start()
        with pytest.raises(FileFailed, match=r"0\.parquet"):
            list(send_files(place, "keep", retries=3, backoff=1.0, batch_bytes=16_384)(rows))
        done.set()
        thread.join()
    assert kept.ended == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"retries": -1}, "option retries is -1; it must be a whole number"),
        ({"backoff": 0}, "option backoff is 0; it must be seconds above zero"),
        ({"retrys": 1}, "did you mean retries"),
    ],
)
def test_bad_options_are_refused_at_once(options, text):
    with pytest.raises(ConfigError) as caught:
        send_files("aqueduct+tcp://127.0.0.1:1", "keep", **options)
    assert text in str(caught.value)
