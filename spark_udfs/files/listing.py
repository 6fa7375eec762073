"""A frame of files, cut into parts that are about equal and spread evenly over tasks."""

from __future__ import annotations

import fnmatch
import heapq
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq

from spark_udfs.files.paths import FileFailed, named, resolve
from spark_udfs.files.reader import Part
from spark_udfs.options import argument

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["find_parts", "list_files", "spread"]

_FOOTERS: Final = 16
"""Footers of Parquet files that are read at once."""
_WILD: Final = "*?["


def list_files(
    spark: SparkSession,
    paths: str | Iterable[str],
    *,
    split: int | str = "128m",
    tasks: int | None = None,
) -> DataFrame:
    """A frame of ``path``, ``row_groups`` and ``bytes`` for ``exchange_files`` and ``send_files``.

    - ``paths``: files, directories (all that is in them, but not what begins with ``.`` or ``_``),
      or patterns with ``*``; local, ``file:``, or URIs that pyarrow.fs knows. They are looked at
      from here, and must be the same for the executors.
    - ``split``: Parquet files above so many bytes become several parts, by row groups.
    - ``tasks``: of the frame, each with about equally many bytes; None: one for ``split`` bytes.

    Raises FileFailed for what is not there, ConfigError for arguments that cannot work.
    """
    argument("spark", spark)
    limit = argument("split", split)
    if tasks is not None:
        tasks = argument("tasks", tasks)
    found = find_parts(argument("paths", paths), limit)
    if tasks is None:
        tasks = max(1, -(-sum(size for _, size in found) // limit))
    bins = spread(found, min(tasks, max(1, len(found))))
    rows = [(k, [_row(part, size) for part, size in each]) for k, each in enumerate(bins)]
    schema = "task bigint, files array<struct<path: string, row_groups: array<int>, bytes: bigint>>"
    from pyspark.sql import functions as sql

    # A range has one row in each partition, and a broadcast join leaves it there: no shuffle.
    numbers = spark.range(0, len(bins), 1, len(bins)).withColumnRenamed("id", "task")
    dealt = numbers.join(sql.broadcast(spark.createDataFrame(rows, schema)), "task")
    return dealt.selectExpr("inline(files)")


def _row(part: Part, size: int) -> tuple[str, list[int] | None, int]:
    return part.path, None if part.groups is None else list(part.groups), size


def spread(found: Sequence[tuple[Part, int]], tasks: int) -> list[list[tuple[Part, int]]]:
    """``found`` in so many lists of about equal size: the largest first, to the smallest list."""
    bins: list[list[tuple[Part, int]]] = [[] for _ in range(tasks)]
    loads = [(0, number) for number in range(tasks)]
    for part, size in sorted(found, key=lambda entry: (-entry[1], str(entry[0]))):
        load, number = heapq.heappop(loads)
        bins[number].append((part, size))
        heapq.heappush(loads, (load + size, number))
    return bins


def find_parts(paths: Sequence[str], split: int) -> list[tuple[Part, int]]:
    """The parts of all files that ``paths`` mean, with their bytes. Raises FileFailed."""
    files = [entry for path in paths for entry in _files(path)]

    def divided(entry: tuple[str, int]) -> list[tuple[Part, int]]:
        return _divided(*entry, split)

    with ThreadPoolExecutor(_FOOTERS) as pool:
        return [found for parts in pool.map(divided, files) for found in parts]


def _files(path: str) -> Iterator[tuple[str, int]]:
    """Files and their sizes, named as ``path`` is."""
    filesystem, inner = resolve(path)
    wild = [k for k, name in enumerate(inner.split("/")) if any(sign in name for sign in _WILD)]
    try:
        if wild:
            base = "/".join(inner.split("/")[: wild[0]]) or ("/" if inner.startswith("/") else ".")
            selector = fs.FileSelector(base, recursive=len(inner.split("/")) - wild[0] > 1)
            entries = [
                info
                for info in filesystem.get_file_info(selector)
                if info.path.count("/") == posixpath.normpath(inner).count("/")
                and fnmatch.fnmatchcase(info.path.removeprefix("./"), inner)
            ]
        else:
            (info,) = filesystem.get_file_info([inner])
            if info.type == fs.FileType.NotFound:
                raise FileFailed(f"{path} is not there")
            entries = [info]
            if info.type == fs.FileType.Directory:
                selector = fs.FileSelector(inner, recursive=True)
                entries = [
                    entry
                    for entry in filesystem.get_file_info(selector)
                    if not _hidden(entry.path[len(inner) :])
                ]
    except (pa.ArrowException, OSError) as error:
        raise FileFailed(f"{path}: {type(error).__name__}: {error}") from error
    chosen = sorted((info for info in entries if info.is_file), key=lambda info: info.path)
    if not chosen:
        raise FileFailed(f"{path}: there is no file")
    for info in chosen:
        yield named(path, inner, info.path), info.size


def _hidden(inner: str) -> bool:
    return any(name[:1] in (".", "_") for name in inner.split("/") if name)


def _divided(path: str, size: int, split: int) -> list[tuple[Part, int]]:
    """A large Parquet file by its row groups, about ``split`` bytes each; others as they are."""
    if size <= split:
        return [(Part(path), size)]
    filesystem, inner = resolve(path)
    try:
        with filesystem.open_input_file(inner) as source:
            if source.read(4) != b"PAR1":
                return [(Part(path), size)]
            source.seek(0)
            metadata = pq.ParquetFile(source).metadata
            groups = [_stored(metadata.row_group(k)) for k in range(metadata.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        raise FileFailed(f"{path}: {type(error).__name__}: {error}") from error
    pieces = max(1, round(sum(groups) / split))
    target, parts = sum(groups) / pieces, []
    chosen: list[int] = []
    load = 0
    for group, stored in enumerate(groups):
        if chosen and load + stored / 2 > target:
            parts.append((Part(path, tuple(chosen)), load))
            chosen, load = [], 0
        chosen.append(group)
        load += stored
    parts.append((Part(path, tuple(chosen)), load))
    return parts


def _stored(group: pq.RowGroupMetaData) -> int:
    return sum(group.column(k).total_compressed_size for k in range(group.num_columns))
