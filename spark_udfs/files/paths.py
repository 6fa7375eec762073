"""Files by path or URI: what pyarrow.fs opens, and how their neighbours are called."""

from __future__ import annotations

import os
import posixpath
from typing import Final
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.fs as fs

from aqueduct.errors import AqueductError

__all__ = ["FileFailed", "base_name", "named", "resolve"]

_PLAIN: Final = "=:@!$&'()*+,;~"
"""What a name in a URI may have without an escape, beside letters, digits, ``_``, ``.``, ``-``."""
_KEPT: Final = 16
_reached: dict[tuple[str, str, str], tuple[fs.FileSystem, int]] = {}
"""By scheme, authority and query: the file system, and which of ``_inners`` is a path in it."""


class FileFailed(AqueductError):
    """A file that cannot be read or written; the text names it, and the row group."""


def resolve(path: str) -> tuple[fs.FileSystem, str]:
    """The file system of a path or URI, and the path in it. Raises FileFailed."""
    try:
        if not _is_uri(path):
            return fs.LocalFileSystem(), path
        uri = path
        if uri.startswith("file:/") and not uri.startswith("file://"):
            uri = f"file://{uri[5:]}"  # as Spark and Java write it
        scheme, _, rest = uri.partition("://")
        if scheme in ("s3a", "s3n"):  # as Hadoop calls it
            uri = f"s3://{rest}"
        return _reach(uri)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FileFailed(f"{path}: not a path that pyarrow.fs can open: {error}") from error


def _reach(uri: str) -> tuple[fs.FileSystem, str]:
    """The same for a URI; a store is reached once, not again for each of its files.

    A file system of its own would be connections of its own, and of a bucket without a region in
    its URI a question where it is. Threads may share one. A child of a fork makes its own.
    """
    if "#" in uri:  # a fragment, which is for pyarrow to understand
        filesystem, inner = fs.FileSystem.from_uri(uri)
        return filesystem, inner
    head, _, query = uri.partition("?")
    scheme, _, rest = head.partition("://")
    authority, _, names = rest.partition("/")
    key = scheme, authority, query
    inners = _inners(authority, unquote(names, errors="strict").rstrip("/"))
    found = _reached.get(key)
    if found is not None:
        filesystem, way = found
        return filesystem, inners[way]
    filesystem, inner = fs.FileSystem.from_uri(uri)
    if authority and inner.rstrip("/") in inners:
        if len(_reached) >= _KEPT:
            _reached.clear()
        _reached[key] = filesystem, inners.index(inner.rstrip("/"))
    return filesystem, inner


def _inners(authority: str, path: str) -> tuple[str, ...]:
    """What a path in a file system can be: behind a bucket, a container, or a host."""
    container, _, host = authority.rpartition("@")
    return tuple(way.rstrip("/") for way in (f"{host}/{path}", f"{container}/{path}", f"/{path}"))


os.register_at_fork(after_in_child=_reached.clear)


def named(path: str, inner: str, other: str) -> str:
    """What ``other``, a path in the file system of ``path``, is called in the way of ``path``.

    ``inner`` is what ``resolve`` gave for ``path``. Of a URI its query stays, which says how to
    reach the file system.
    """
    if not _is_uri(path):
        return other
    head, sign, query = path.partition("?")
    its, mine = other.split("/"), inner.rstrip("/").split("/")
    same = 0
    while same < min(len(its), len(mine)) and its[same] == mine[same]:
        same += 1
    # Where a URI's path begins in it depends on the scheme; its last names are always the path's.
    names = head.rstrip("/").split("/")
    kept = names[: len(names) - (len(mine) - same)]
    return "/".join([*kept, *(quote(name, safe=_PLAIN) for name in its[same:])]) + sign + query


def base_name(path: str) -> str:
    """The last name of a path or URI, without what leads there and what says how."""
    if _is_uri(path):
        path = unquote(path.partition("?")[0])
    return posixpath.basename(path.rstrip("/"))


def _is_uri(path: str) -> bool:
    return "://" in path or path.startswith("file:")
