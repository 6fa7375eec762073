"""Files straight to a service: reading, receipts, answers as Parquet, failures, Spark's part."""

from __future__ import annotations

import os
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from aqueduct.errors import ConfigError, ConnectFailed, HandlerFailed, UnknownHandler
from spark_udfs import exchange_files, list_files, send_files
from spark_udfs.files import reader
from spark_udfs.files.listing import find_parts, spread
from spark_udfs.files.paths import FileFailed
from spark_udfs.files.reader import Part, Prefetcher, ReadItem, read
from tests.spark.callees import free_port
from tests.spark.services import make

ROWS = 10_000
FOLDER_ROWS = 3 * ROWS


def table(first: int = 0, rows: int = ROWS) -> pa.Table:
    ids = list(range(first, first + rows))
    return pa.table({"id": ids, "half": [k / 2 for k in ids], "word": [f"w{k}" for k in ids]})


def noise(rows: int) -> pa.Table:
    """Two columns of 8 bytes a row that nothing can pack."""
    random = np.random.default_rng(7)
    return pa.table({name: random.random(rows) for name in "ab"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three files of 10,000 rows each, in five row groups, and what is not to be read."""
    path = tmp_path_factory.mktemp("files")
    for k in range(3):
        pq.write_table(table(k * ROWS), path / f"{k}.parquet", row_group_size=2000)
    (path / "_SUCCESS").write_bytes(b"")
    (path / ".hidden.parquet").write_bytes(b"no file")
    return path


@pytest.fixture
def sums():
    return []


@pytest.fixture
def service(sums):
    service = make()

    @service.handler("keep", kind="sink")
    def keep(batches, call):
        rows = 0
        for batch in batches:
            rows += batch.num_rows
            sums.append((call.write_key, sum(batch["id"].to_pylist())))
        return {"rows": rows}

    @service.handler("early", output=pa.schema([("id", pa.int64())]))
    def early(batches, call):
        yield next(iter(batches)).select(["id"])

    return service


def frame(*parts) -> list[pa.RecordBatch]:
    rows = [{"path": str(path), "row_groups": groups} for path, groups in parts]
    schema = pa.schema([("path", pa.string()), ("row_groups", pa.list_(pa.int32()))])
    return [pa.RecordBatch.from_pylist(rows, schema=schema)]


def pieces(*parts: Part, columns=None, batch_bytes=1 << 20) -> list[ReadItem]:
    return list(read(parts, columns, batch_bytes))


def rows_of(found: list[ReadItem]) -> pa.Table:
    return pa.Table.from_batches([piece.batch for piece in found if piece.batch is not None])


# ------------------------------------------------------------------ reading


def arrow_file(path, compression=None):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(path, table().schema, options=options) as writer:
        writer.write_table(table(), max_chunksize=2000)


def arrow_stream(path):
    with pa.ipc.new_stream(path, table().schema) as writer:
        writer.write_table(table(), max_chunksize=2000)


def parquet(path):
    pq.write_table(table(), path, row_group_size=2000)


WRITERS = {
    "parquet": parquet,
    "arrow file": arrow_file,
    "arrow file, zstd": lambda path: arrow_file(path, "zstd"),
    "arrow stream": arrow_stream,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_is_known_by_its_first_bytes(kind, tmp_path):
    path = tmp_path / "data"  # whatever its name
    WRITERS[kind](path)
    assert rows_of(pieces(Part(str(path)))).equals(table())
    some = rows_of(pieces(Part(f"file://{path}"), columns=["word", "id"]))
    assert some.equals(table().select(["word", "id"]))
    as_java_writes_it = rows_of(pieces(Part(f"file:{path}"), columns=["id"]))
    assert as_java_writes_it.equals(table().select(["id"]))


@pytest.mark.parametrize("kind", ["parquet", "arrow file"])
def test_row_groups_are_chosen_and_named(kind, tmp_path):
    path = tmp_path / "data"
    WRITERS[kind](path)
    found = pieces(Part(str(path), (3, 1)))
    assert rows_of(found)["id"].to_pylist() == [*range(6000, 8000), *range(2000, 4000)]
    assert {piece.group for piece in found if piece.batch is not None} == {1, 3}
    errors = [piece.error for piece in pieces(Part(str(path), (5,))) if piece.error]
    assert str(errors[0]) == f"{path}: there is no row group 5; it has 5"


def test_batches_are_about_as_large_as_wanted(tmp_path):
    path = tmp_path / "data.parquet"
    pq.write_table(table(rows=100_000), path)
    sizes = [piece.size for piece in pieces(Part(str(path)), batch_bytes=1 << 16) if piece.batch]
    assert len(sizes) > 20
    assert max(sizes) <= 2 << 16
    path = tmp_path / "repeated.parquet"  # a dictionary of one word: small in the file
    pq.write_table(pa.table({"word": ["x" * 1000] * 20_000}), path)
    sizes = [piece.size for piece in pieces(Part(str(path)), batch_bytes=1 << 16) if piece.batch]
    assert max(sizes) <= 2 << 16


@pytest.mark.parametrize("processors", [1, 2])
def test_columns_are_decoded_by_as_many_threads_as_the_task_has_processors(
    processors, tmp_path, monkeypatch
):
    path = str(tmp_path / "a.parquet")
    table = pa.table({name: range(1000) for name in "abcd"})
    pq.write_table(table, path, row_group_size=300)
    asked = []
    iter_batches = pq.ParquetFile.iter_batches

    def counted(self, *arguments, use_threads, **options):
        asked.append(use_threads)
        return iter_batches(self, *arguments, use_threads=use_threads, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    before = pa.cpu_count()
    pa.set_cpu_count(processors)
    try:
        pieces = list(read([Part(path)], None, 1 << 20))
    finally:
        pa.set_cpu_count(before)
    assert asked == [processors > 1] * 4
    batches = [piece.batch for piece in pieces if piece.batch is not None]
    assert pa.Table.from_batches(batches) == table


@pytest.mark.parametrize("local", [True, False])
def test_the_bytes_of_a_row_group_are_fetched_at_once_from_a_store_alone(
    local, tmp_path, monkeypatch
):
    """Of a local file they are not held: a row group may be as large as an executor's memory."""
    wanted = noise(1 << 20)  # 16 MiB
    pq.write_table(wanted, tmp_path / "noise.parquet", row_group_size=1 << 20)
    path, held = str(tmp_path / "noise.parquet"), pa.total_allocated_bytes()
    if not local:
        store = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
        monkeypatch.setattr(reader, "resolve", lambda path: (store, "noise.parquet"))
    found = read([Part(path)], None, 1 << 20)
    batches = [next(piece.batch for piece in found if piece.batch is not None)]
    held = pa.total_allocated_bytes() - held
    assert held < 8 << 20 if local else held > 16 << 20
    batches += [piece.batch for piece in found if piece.batch is not None]
    assert pa.Table.from_batches(batches).equals(wanted)


def test_an_empty_file_has_a_schema_and_no_batch(tmp_path):
    path = tmp_path / "empty.parquet"
    pq.write_table(table().slice(0, 0), path)
    found = pieces(Part(str(path)))
    assert [piece.batch for piece in found] == [None, None]
    assert found[0].schema is not None
    assert found[0].schema.names == ["id", "half", "word"]


BROKEN: dict[str, tuple[bytes | None, str]] = {
    "absent": (None, "No such file"),
    "text": (b"id,half\n1,0.5\n", "neither Parquet nor Arrow IPC"),
    "cut": (b"PAR1" + b"x" * 100, "Parquet magic bytes not found"),
    "nothing": (b"", "neither Parquet nor Arrow IPC"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_named_and_the_next_one_is_read(kind, tmp_path):
    content, text = BROKEN[kind]
    bad, good = tmp_path / "bad", tmp_path / "good"
    if content is not None:
        bad.write_bytes(content)
    parquet(good)
    found = pieces(Part(str(bad)), Part(str(good)))
    (error,) = [piece.error for piece in found if piece.error is not None]
    assert str(error).startswith(str(bad))
    assert text in str(error)
    assert rows_of(found).equals(table())


def test_a_broken_row_group_is_named(tmp_path):
    path = tmp_path / "data.parquet"
    pq.write_table(table(), path, row_group_size=2000, compression="snappy", use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(3).column(2)
    content = bytearray(path.read_bytes())
    begin = column.data_page_offset
    content[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)
    found = pieces(Part(str(path)))
    (error,) = [piece.error for piece in found if piece.error is not None]
    assert str(error).startswith(f"{path}, row group 3: ")
    assert rows_of(found).num_rows == 6000


def test_a_file_that_is_cut_while_it_is_read_is_named_and_the_next_one_is_read(tmp_path):
    wanted = noise(1 << 18)  # two columns of 2 MiB
    paths = [tmp_path / "cut.parquet", tmp_path / "whole.parquet"]
    for path in paths:
        pq.write_table(wanted, path, row_group_size=1 << 18)
    found = read([Part(str(path)) for path in paths], None, 256 << 10)
    assert next(piece for piece in found if piece.batch is not None).group == 0
    os.truncate(paths[0], 1 << 20)
    rest = list(found)
    [failed] = [piece for piece in rest if piece.error is not None]
    assert failed.part == 0
    assert f"{paths[0]}, row group 0" in str(failed.error)
    assert rows_of([piece for piece in rest if piece.part == 1]).equals(wanted)


def test_a_column_that_is_not_there_is_named(folder):
    found = pieces(Part(str(folder / "0.parquet")), columns=["id", "hlaf"])
    (error,) = [piece.error for piece in found if piece.error is not None]
    assert str(error) == f"{folder / '0.parquet'} has no column 'hlaf'; it has id, half, word"


@pytest.mark.parametrize("kind", ["arrow file", "arrow stream"])
def test_a_column_with_false_offsets_is_an_error(kind, tmp_path):
    """What follows them would read, and send, what is not the column's, or die of it."""
    path = tmp_path / "data"
    WRITERS[kind](path)
    data = path.read_bytes()
    offsets = table()["word"].chunk(0).slice(0, 2000).buffers()[1]
    within = memoryview(offsets)[4 * 900 : 4 * 910]  # of values inside the first batch
    place = data.index(bytes(within))
    path.write_bytes(data[:place] + b"\xff\xff\xff\x3f" + data[place + 4 :])
    found = pieces(Part(str(path)), batch_bytes=1 << 12)
    (error,) = [piece.error for piece in found if piece.error is not None]
    assert "ArrowInvalid" in str(error) and str(error).startswith(str(path))
    assert not [piece for piece in found if piece.batch is not None]
    assert found[-1] == ReadItem(0)


def test_no_more_is_read_ahead_than_the_limit():
    batch = pa.record_batch({"id": list(range(1000))})
    taken, waiting = [], threading.Event()

    def make(skipped):
        for number in range(100):
            taken.append(number)
            if len(taken) == 5:
                waiting.set()
            yield ReadItem(0, batch=batch)

    ahead = Prefetcher(make, limit=4 * batch.nbytes)
    assert waiting.wait(20)
    next(ahead)
    assert len(taken) <= 6 + 1  # the limit, one that was taken, and one in the making
    ahead.close()
    assert not ahead._thread.is_alive()
    assert len(taken) <= 8


def test_an_error_of_the_reader_reaches_who_reads():
    def make(skipped):
        yield ReadItem(0)
        raise MemoryError("no room")

    ahead = Prefetcher(make, limit=1)
    assert next(ahead) == ReadItem(0)
    with pytest.raises(MemoryError, match="no room"):
        next(ahead)
    ahead.close()


# ------------------------------------------------------------------ the functions


def receipts(function, *parts) -> list[dict]:
    return [row for batch in function(iter(frame(*parts))) for row in batch.to_pylist()]


def test_receipts_say_what_went_and_came(address, folder, service):
    function = exchange_files(address, "echo")
    found = receipts(function, (folder / "0.parquet", None), (folder / "1.parquet", [1, 2]))
    assert [row["path"] for row in found] == [str(folder / f"{k}.parquet") for k in (0, 1)]
    assert [row["row_groups"] for row in found] == [None, [1, 2]]
    for row, rows in zip(found, (ROWS, 4000), strict=True):
        assert row["rows_in"] == row["rows_out"] == rows
        assert row["batches_in"] == row["batches_out"] > 0
        assert min(row["bytes_in"], row["bytes_out"]) > 20 * rows  # of 25, as Arrow counts them
        assert row["seconds"] > 0
        assert row["output"] is None and row["error"] is None
    assert service.counters()["connections"] == 1
    assert "2 tasks" in function.summary()


def test_answers_come_in_the_order_of_the_files(address, folder):
    function = exchange_files(address, "double", columns=["id"], returns="answers")
    parts = [(folder / f"{k}.parquet", None) for k in (2, 0)]
    answers = pa.Table.from_batches(list(function(iter(frame(*parts)))))
    expected = [*range(2 * ROWS, 3 * ROWS), *range(ROWS)]
    assert answers["id"].to_pylist() == [2 * k for k in expected]


def test_answers_are_written_whole_and_once(address, folder, tmp_path):
    out = tmp_path / "out"
    function = exchange_files(address, "double", columns=["id"], write=str(out))
    parts = [(folder / "0.parquet", None), (folder / "1.parquet", [0]), (folder / "1.parquet", [1])]
    first = receipts(function, *parts)
    again = receipts(function, *parts)  # as when Spark tries a task again
    assert [row["output"] for row in first] == [row["output"] for row in again]
    assert sorted(str(path) for path in out.iterdir()) == sorted(row["output"] for row in first)
    written = pq.read_table(out)
    assert sorted(written["id"].to_pylist()) == [2 * k for k in range(ROWS + 4000)]
    assert written.num_rows == sum(row["rows_out"] for row in first)


def test_a_call_that_fails_leaves_no_file(address, folder, tmp_path):
    out = tmp_path / "out"
    function = exchange_files(
        address, "fail", columns=["id"], write=str(out), batch_bytes=4096, on_failure="report"
    )
    bad, good = receipts(function, (folder / "0.parquet", None), (folder / "2.parquet", None))
    assert bad["output"] is None
    assert bad["error"].startswith(f"{folder / '0.parquet'}, row group 0: ")
    assert "42 is not to my taste" in bad["error"]
    assert good["error"] is None
    assert [str(path) for path in out.iterdir()] == [good["output"]]


def test_what_cannot_be_written_is_named(address, folder, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    function = exchange_files(address, "echo", write=str(tmp_path / "file"))
    with pytest.raises(FileFailed, match="cannot be written"):
        receipts(function, (folder / "0.parquet", None))


def test_a_handlers_error_names_file_and_row_group(address, folder):
    function = exchange_files(address, "fail", columns=["id"], batch_bytes=4096)
    with pytest.raises(HandlerFailed) as caught:
        receipts(function, (folder / "2.parquet", None), (folder / "0.parquet", None))
    assert str(caught.value).startswith(f"{folder / '0.parquet'}, row group 0: ")
    assert "42 is not to my taste" in str(caught.value)


def test_a_file_that_fails_in_the_middle_ends_its_call(address, folder, service, tmp_path):
    path = tmp_path / "gone.parquet"
    function = exchange_files(address, "echo", on_failure="report")
    gone, fine = receipts(function, (path, None), (folder / "0.parquet", None))
    assert str(path) in gone["error"] and "No such file" in gone["error"]
    assert gone["rows_in"] == 0
    assert fine["rows_out"] == ROWS
    with pytest.raises(FileFailed, match="No such file"):
        receipts(exchange_files(address, "echo"), (path, None))


def test_an_unknown_handler_names_the_file(address, folder):
    with pytest.raises(UnknownHandler, match=r"0\.parquet"):
        receipts(exchange_files(address, "no-such"), (folder / "0.parquet", None))


def test_a_handler_that_reads_no_further_leaves_the_next_file_alone(address, folder):
    function = exchange_files(address, "early", batch_bytes=4096)
    found = receipts(function, *[(folder / f"{k}.parquet", None) for k in range(3)])
    assert all(0 < row["rows_out"] < ROWS for row in found)
    assert [row["error"] for row in found] == [None] * 3


def test_an_empty_file_has_a_receipt(address, tmp_path):
    path = tmp_path / "empty.parquet"
    pq.write_table(table().slice(0, 0), path)
    (row,) = receipts(exchange_files(address, "echo", write=str(tmp_path / "out")), (path, None))
    assert row["rows_in"] == row["rows_out"] == 0
    assert row["output"] is None and row["error"] is None


def test_a_sink_is_sent_each_part_under_a_run_of_its_own(address, folder, sums):
    function = send_files(address, "keep", columns=["id"])
    parts = [(folder / "0.parquet", [0]), (folder / "0.parquet", [1]), (folder / "1.parquet", None)]
    found = receipts(function, *parts)
    assert [row["rows_in"] for row in found] == [2000, 2000, ROWS]
    assert [row["rows_out"] for row in found] == [0, 0, 0]
    assert sum(total for _, total in sums) == sum([*range(4000), *range(ROWS, 2 * ROWS)])
    runs = {write_key for write_key, _ in sums}
    assert len(runs) == 3
    receipts(function, *parts)
    assert {write_key for write_key, _ in sums} == runs  # an attempt later


def test_a_sink_is_sent_to_the_next_address_where_one_is_not_there(address, folder, sums):
    nowhere = [f"aqueduct+tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    function = send_files([*nowhere, address], "keep", columns=["id"])
    (row,) = receipts(function, (folder / "0.parquet", None))
    assert row["rows_in"] == ROWS and row["error"] is None
    assert sum(value for _, value in sums) == sum(range(ROWS))
    with pytest.raises(
        ConnectFailed, match=r"0\.parquet.*no other of 2 addresses answers"
    ) as caught:
        receipts(send_files(nowhere, "keep"), (folder / "0.parquet", None))
    assert all(place in str(caught.value) for place in nowhere)


def test_each_part_that_is_sent_is_a_record_in_the_log(address, folder, caplog):
    function = send_files(address, "keep", columns=["id"])
    with caplog.at_level("INFO", "spark_udfs"):
        receipts(function, (folder / "1.parquet", None))
    (record,) = [record for record in caplog.records if record.name == "spark_udfs"]
    context = vars(record)["context"]
    assert (context["handler"], context["outcome"]) == ("keep", "well")
    assert context["rows_sent"] == str(ROWS)


def test_closing_early_ends_the_call_and_the_reading(address, folder, service):
    before = set(threading.enumerate())
    function = exchange_files(address, "echo", returns="answers", batch_bytes=4096)
    answers = function(iter(frame(*[(folder / f"{k}.parquet", None) for k in range(3)])))
    next(answers)
    answers.close()
    assert not [thread for thread in set(threading.enumerate()) - before if "files" in thread.name]


BAD: dict[str, tuple[dict, str]] = {
    "columns as text": ({"columns": "id"}, "columns='id'; it must be a list"),
    "no columns": ({"columns": []}, "columns=[]; it must be a list of at least one name"),
    "returns": ({"returns": "rows"}, "returns='rows'; it must be 'receipts' or 'answers'"),
    "both": ({"returns": "answers", "write": "/x"}, "returns='answers' leaves no receipt"),
    "on_failure": ({"on_failure": "skip"}, "on_failure='skip'; it must be 'fail' or 'report'"),
    "size": ({"batch_bytes": "2x"}, "batch_bytes='2x'; it must be a size above zero"),
    "ahead": ({"read_ahead": 0}, "read_ahead=0; it must be a size above zero"),
    "near miss": ({"in_flihgt": 2}, "did you mean in_flight"),
    "columns_mode": ({"columns_mode": "append"}, "columns_mode has no place here"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_at_once(name):
    options, text = BAD[name]
    with pytest.raises(ConfigError) as caught:
        exchange_files("aqueduct+tcp://127.0.0.1:1", "echo", **options)
    assert text in str(caught.value)


def test_a_sink_has_no_options_of_answers():
    with pytest.raises(ConfigError, match="unknown option cast"):
        send_files("aqueduct+tcp://127.0.0.1:1", "keep", cast=True)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (pa.record_batch({"file": ["a"]}), "has the columns file; it must have path"),
        (pa.record_batch({"path": [3]}), "a path in the frame of files is 3"),
    ],
)
def test_a_frame_of_something_else_is_refused(batch, text):
    function = exchange_files("aqueduct+tcp://127.0.0.1:1", "echo")
    with pytest.raises(ConfigError, match=text):
        list(function(iter([batch])))


# ------------------------------------------------------------------ listing


def test_directories_patterns_and_files_are_found(folder):
    names = [str(folder / f"{k}.parquet") for k in range(3)]
    limit = 1 << 30
    assert [part.path for part, _ in find_parts([str(folder)], limit)] == names
    assert [part.path for part, _ in find_parts([f"{folder}/[01].parquet"], limit)] == names[:2]
    assert [part.path for part, _ in find_parts([f"{folder.parent}/*/2.parquet"], limit)] != []
    uri = f"file://{folder}"
    assert [part.path for part, _ in find_parts([uri], limit)] == [f"file://{n}" for n in names]
    for missing, text in ((folder / "no", "is not there"), (folder / "*.csv", "there is no file")):
        with pytest.raises(FileFailed, match=text):
            find_parts([str(missing)], limit)


def test_large_files_are_split_by_row_groups(folder):
    size = (folder / "0.parquet").stat().st_size
    found = [part for part, _ in find_parts([str(folder / "0.parquet")], size // 2)]
    assert [part.groups for part in found] in (
        [(0, 1), (2, 3, 4)],
        [(0, 1, 2), (3, 4)],
        [(0, 1), (2, 3), (4,)],  # as PyArrow 21 writes them, in which the last one is as large
    )
    each = [part.groups for part, _ in find_parts([str(folder / "0.parquet")], 1)]
    assert each == [(k,) for k in range(5)]


def test_parts_are_spread_evenly_by_bytes():
    parts = [(Part(str(k)), size) for k, size in enumerate([90, 10, 50, 40, 30, 20, 60])]
    bins = spread(parts, 3)
    assert sorted(part.path for each in bins for part, _ in each) == sorted(map(str, range(7)))
    assert sorted(sum(size for _, size in each) for each in bins) == [90, 100, 110]


@pytest.mark.spark
def test_spark_sends_files_without_reading_them(spark, address, folder, service):
    files = list_files(spark, str(folder), split=20_000)
    assert files.columns == ["path", "row_groups", "bytes"]
    parts = files.collect()
    assert len(parts) > 3
    spreading = files.selectExpr("spark_partition_id() id", "bytes").groupBy("id").sum("bytes")
    loads = [row[1] for row in spreading.collect()]
    assert len(loads) == files.rdd.getNumPartitions() > 2
    assert max(loads) < 2 * min(loads)
    function = exchange_files(address, "double", columns=["id"])
    found = files.mapInArrow(function, function.schema).collect()
    assert sorted((row.path, row.row_groups) for row in found) == sorted(
        (row.path, row.row_groups) for row in parts
    )
    assert sum(row.rows_out for row in found) == FOLDER_ROWS
    assert service.counters()["connections"] <= 2


@pytest.mark.spark
def test_spark_gets_answers_and_errors_from_files(spark, address, folder, tmp_path):
    from pyspark.errors import PythonException

    files = list_files(spark, [str(folder / f"{k}.parquet") for k in range(3)], tasks=2)
    answers = files.mapInArrow(
        exchange_files(address, "double", columns=["id"], returns="answers"), "id long"
    )
    assert answers.groupBy().sum("id").collect()[0][0] == FOLDER_ROWS * (FOLDER_ROWS - 1)
    function = exchange_files(address, "fail", columns=["id"], batch_bytes=4096)
    with pytest.raises(PythonException) as caught:
        files.mapInArrow(function, function.schema).collect()
    assert f"{folder / '0.parquet'}, row group 0: " in str(caught.value)
