"""A table is asked, on the driver: for its schema, its splits and its offsets."""

from __future__ import annotations

import copy
import difflib
import time
from typing import Final

from aqueduct.client.retry import Backoff, may_pass
from aqueduct.client.sync_client import SyncClient
from aqueduct.errors import (
    AqueductError,
    Busy,
    CallError,
    ConnectFailed,
    UnknownHandler,
)
from aqueduct.rpc.describe import DESCRIBE, DESCRIBE_SCHEMA, Description
from aqueduct.rpc.table_scan import ANSWER, PLAN, Limit, Offset, ScanPlan, ScanRequest
from spark_udfs.calls.pool import process_pool
from spark_udfs.datasource.options import Settings

__all__ = ["Limit", "Offset", "ask", "patience", "rest", "tries"]

_LONGEST: Final = 5.0
"""Seconds of the longest pause."""


def ask(settings: Settings, question: ScanRequest, *, keep: bool = False) -> ScanPlan:
    """What the table ``settings.handler`` answers.

    It is asked again, at the addresses in turn, after errors that may pass: no question changes
    anything at the table, but for a commit, which may be repeated. ``keep``: more will be asked
    soon, so the connection stays open for a while. Raises the errors of ``aqueduct.errors``, which
    name table and address.
    """
    limits = settings.config.tables
    batch = question.encode(limits)
    most, backoff = tries(settings), patience(settings)
    for attempt in range(most):
        peer = settings.peer(attempt)
        try:
            lease = process_pool().lease(peer)
            try:
                answer = lease.client.call(
                    PLAN + settings.handler,
                    batch,
                    output_schema=ANSWER,
                    deadline=settings.deadline,
                    token=settings.fresh_token(),
                    headers=settings.driver_headers,
                )
                return ScanPlan.decode(answer, limits)
            except UnknownHandler as error:
                raise _unknown(lease.client, settings, error) from error
            finally:
                lease.release(close=not keep)
        except AqueductError as error:
            if may_pass(error) and attempt + 1 < most:
                rest(backoff)
                continue
            raise _located(error, settings, peer.address, attempt + 1) from error.__cause__
    raise AssertionError("one try at least")


def tries(settings: Settings) -> int:
    """How often a call is made at most: each address once at least."""
    return max(1 + settings.retries, len(settings.addresses))


def patience(settings: Settings) -> Backoff:
    """The pauses between the tries."""
    return Backoff(settings.backoff, _LONGEST)


def rest(backoff: Backoff) -> None:
    """Waits before the next try."""
    backoff.failed()
    time.sleep(max(0.0, backoff.until - time.monotonic()))


def _unknown(client: SyncClient, settings: Settings, error: UnknownHandler) -> CallError:
    """The error for a table that there is not: it names those that there are."""
    table = settings.handler
    try:
        answer = client.source(
            DESCRIBE,
            output_schema=DESCRIBE_SCHEMA,
            token=settings.fresh_token(),
            headers=settings.driver_headers,
        )
        description = Description.from_batches(list(answer), peer=client.address)
    except CallError:  # not every token may ask
        return error
    names = [each.name for each in description.tables]
    service = f"the service {description.service!r}"
    if table in names:  # it was registered meanwhile, or another process answered
        return Busy(f"{service} has a table {table!r} now: try again")
    if not names:
        return UnknownHandler(f"{service} has no table {table!r}, and no table at all")
    alike = difflib.get_close_matches(table, names, n=1)
    guess = f"did you mean {alike[0]!r}? " if alike else ""
    listed = ", ".join(map(repr, names))
    return UnknownHandler(f"{service} has no table {table!r}; {guess}its tables are {listed}")


def _located(error: AqueductError, settings: Settings, address: str, made: int) -> AqueductError:
    """A copy whose text says where it happened: Spark carries an error to the user as text."""
    error = copy.copy(error)
    place = f"table {settings.handler!r} at {address.partition('?')[0]}"
    if made > 1:
        place += f", asked {made} times"
        if len(settings.addresses) > 1:
            place += f" at {len(settings.addresses)} addresses"
    if isinstance(error, ConnectFailed):
        place += "; the driver must reach it as well as the executors"
    error.args = (f"{error} [{place}]", *error.args[1:])
    return error
