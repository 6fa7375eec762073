"""Paths and URIs of files: what is opened, and what their neighbours are called."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq
import pytest

from spark_udfs.files import paths
from spark_udfs.files.listing import find_parts
from spark_udfs.files.paths import FileFailed, base_name, named, resolve
from spark_udfs.files.reader import Part, read
from spark_udfs.files.writer import Written

S3 = "endpoint_override=127.0.0.1:9000&region=us-east-1&scheme=http"
TABLE = pa.table({"id": [1, 2, 3]})


@pytest.mark.parametrize(
    ("path", "inner", "other", "name"),
    [
        ("/data", "/data", "/data/a b.parquet", "/data/a b.parquet"),
        ("data/*.parquet", "data/*.parquet", "data/0.parquet", "data/0.parquet"),
        ("file:///data", "/data", "/data/0.parquet", "file:///data/0.parquet"),
        ("file:/data/", "/data", "/data/0.parquet", "file:/data/0.parquet"),
        ("file:///", "/", "/0.parquet", "file:/0.parquet"),
        ("file:///a%20b", "/a b", "/a b/1%.parquet", "file:///a%20b/1%25.parquet"),
        ("s3://bucket", "bucket", "bucket/k/0", "s3://bucket/k/0"),
        ("s3a://bucket/k", "bucket/k", "bucket/k/day=1/0", "s3a://bucket/k/day=1/0"),
        (f"s3://bucket/k?{S3}", "bucket/k", "bucket/k/0", f"s3://bucket/k/0?{S3}"),
        (f"s3://bucket/k/0?{S3}", "bucket/k/0", "bucket/k/0", f"s3://bucket/k/0?{S3}"),
        (f"s3://bucket/*/0?{S3}", "bucket/*/0", "bucket/k/0", f"s3://bucket/k/0?{S3}"),
        ("s3://id:a%2Fb@bucket/k", "bucket/k", "bucket/k/0", "s3://id:a%2Fb@bucket/k/0"),
        ("hdfs://node:8020/k", "/k", "/k/0", "hdfs://node:8020/k/0"),
        ("abfs://box@who.net/k", "box/k", "box/k/0", "abfs://box@who.net/k/0"),
    ],
)
def test_a_neighbour_is_called_as_the_path_is(path, inner, other, name):
    assert named(path, inner, other) == name
    if path.startswith(("/", "file:")) or (S3 in path and "*" not in path):  # nobody is asked
        filesystem, found = resolve(path)
        assert found.rstrip("/") == inner.rstrip("/")
        assert resolve(name) == (filesystem, other)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/a?b.parquet", "a?b.parquet"),
        ("/data/", "data"),
        (f"s3://bucket/a%20b.parquet?{S3}", "a b.parquet"),
    ],
)
def test_the_last_name(path, name):
    assert base_name(path) == name


def test_hadoop_s_names_for_s3_are_known():
    for scheme in ("s3", "s3a", "s3n"):
        filesystem, inner = resolve(f"{scheme}://bucket/k?{S3}")
        assert isinstance(filesystem, fs.S3FileSystem) and inner == "bucket/k"


@pytest.mark.parametrize(
    "names",
    ["", "/", "/k", "/k/", "/a%20b/c%25.parquet", "/k/day=1/0.parquet", "/*/0", "/%C3%A4"],
)
@pytest.mark.parametrize("bucket", ["s3://bucket", "s3://id:a%2Fb@bucket", "gs://anonymous@box"])
def test_a_store_is_reached_once_whatever_is_in_it(bucket, names, monkeypatch):
    paths._reached.clear()
    query = f"?{S3}" if bucket.startswith("s3") else "?scheme=http"
    uri = f"{bucket}{names}{query}"
    _, wanted = fs.FileSystem.from_uri(uri)
    first, inner = resolve(f"{bucket}/first{query}")
    assert inner.endswith("/first")
    asked = []
    from_uri = fs.FileSystem.from_uri

    class Counted(fs.FileSystem):
        @staticmethod
        def from_uri(uri):
            asked.append(uri)
            return from_uri(uri)

    monkeypatch.setattr(fs, "FileSystem", Counted)
    again, found = resolve(uri)
    assert found == wanted
    assert again is first and not asked
    other, _ = resolve(uri.replace("scheme=http", "scheme=https"))
    assert other is not first and asked


def test_escapes_that_are_no_text_are_an_error_however_often_the_store_was_reached():
    for path in (f"s3://bucket/k?{S3}", f"s3://bucket/again?{S3}"):
        resolve(path)
        with pytest.raises(FileFailed, match="not a path that"):
            resolve(f"s3://bucket/%ff?{S3}")


def test_a_uri_with_a_fragment_is_pyarrow_s_to_understand_each_time(monkeypatch):
    asked = []

    class Asked(fs.FileSystem):
        @staticmethod
        def from_uri(uri):
            asked.append(uri)
            return fs.LocalFileSystem(), "bucket/a"

    monkeypatch.setattr(fs, "FileSystem", Asked)
    for _ in range(2):
        assert resolve("s3://bucket/a#b")[1] == "bucket/a"
    assert len(asked) == 2


def test_the_child_of_a_fork_reaches_its_stores_itself():
    script = (
        "import os\n"
        "from spark_udfs.files import paths\n"
        "paths._reached['s3', 'bucket', ''] = None, 0\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(len(paths._reached))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(paths._reached))\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert told.stdout.split() == ["0", "1"], told.stderr


def test_what_no_file_system_is_known_for():
    with pytest.raises(FileFailed, match=r"what://x: not a path that pyarrow\.fs can open: "):
        resolve("what://x")


def test_a_uri_with_escapes_is_listed_read_and_written(tmp_path):
    folder = tmp_path / "a b%"
    folder.mkdir()
    for number in range(2):
        pq.write_table(TABLE, folder / f"{number} +.parquet")
    uri = folder.as_uri()
    assert "%20" in uri
    for path in (uri, f"{uri}/*.parquet"):
        parts = [part for part, _ in find_parts([path], 1 << 30)]
        assert [part.path for part in parts] == [f"{uri}/{n}%20+.parquet" for n in range(2)]
        rows = [p.batch.num_rows for p in read(parts, None, 1 << 20) if p.batch is not None]
        assert rows == [3, 3]
    written = Written(f"{uri}/out", Part(f"{uri}/0%20+.parquet"), "a")
    written.add(TABLE.to_batches()[0])
    output = written.commit()
    written.close()
    assert output is not None and output.startswith(f"{uri}/out/0%20+-")
    (found,) = (folder / "out").iterdir()
    assert resolve(output)[1] == str(found)
    assert pq.read_table(found) == TABLE
