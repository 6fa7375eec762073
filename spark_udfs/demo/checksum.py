"""A checksum of a table that does not depend on the order of its rows, and what differs if it does.

Every value counts, exactly: a float by its 64 bits, a null as a null. A row's hash mixes its
columns in order; the table's is the sum of its rows' modulo 2^64, so a row that is lost, comes
twice or got another row's answer changes it.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["checksum", "differences"]

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]

_NULL: Final = np.uint64(0x6E75_6C6C_6E75_6C6C)


def checksum(table: pa.Table) -> str:
    """16 hexadecimal digits. Columns: integers, floats, timestamps and strings."""
    table = table.combine_chunks()
    rows = np.zeros(table.num_rows, dtype=np.uint64)
    for name in table.column_names:
        rows = _mix(rows ^ _words(table[name]))
    return f"{int(rows.sum(dtype=np.uint64)):016x}"


def differences(got: pa.Table, wanted: pa.Table, *, key: str, limit: int = 5) -> list[str]:
    """The first differences for people: columns, then rows by key, then values."""
    if got.schema.names != wanted.schema.names:
        return [f"columns {got.schema.names}, wanted {wanted.schema.names}"]
    missing = pc.is_in(wanted[key], value_set=got[key])
    lines = [f"no row {k}" for k in wanted.filter(pc.invert(missing))[key].to_pylist()[:limit]]
    counts = pc.value_counts(got[key])
    twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist()
    lines += [f"row {k} comes more than once" for k in twice[:limit]]
    if lines:
        return lines[:limit]
    got, wanted = got.sort_by(key), wanted.sort_by(key)
    for name in wanted.column_names:
        left, right = got[name].to_pylist(), wanted[name].to_pylist()
        for index, (value, expected) in enumerate(zip(left, right, strict=False)):
            if value != expected:
                row = wanted[key][index].as_py()
                lines.append(f"row {row}, column {name}: {value!r}, wanted {expected!r}")
                if len(lines) == limit:
                    return lines
    return lines


def _words(column: pa.ChunkedArray) -> Words:
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    nulls = array.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        encoded = array.dictionary_encode()
        hashes = np.array(
            [_text(value) for value in encoded.dictionary.to_pylist()] or [0], dtype=np.uint64
        )
        words = hashes[encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)]
    elif pa.types.is_floating(array.type):
        words = array.cast(pa.float64()).fill_null(0).to_numpy(zero_copy_only=False)
        words = words.view(np.uint64)
    else:
        words = array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        words = words.view(np.uint64)
    result: Words = np.where(nulls, _NULL, words)
    return result


def _text(value: str) -> int:
    return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little")


def _mix(words: Words) -> Words:
    """The finaliser of splitmix64: every bit of the input changes half of the output's."""
    words = words + np.uint64(0x9E37_79B9_7F4A_7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return words ^ (words >> np.uint64(31))
