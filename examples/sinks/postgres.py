"""A sink that writes into a table of PostgreSQL, exactly once.

Each attempt copies its rows (COPY, by ADBC) into a staging table of its own, on a connection and in
a transaction of its own, which ``prepare`` commits: an attempt that is cut short leaves nothing.
The commit of a write is one transaction: a row in the ledger with its key, the rows of all
staging tables into the target, the staging tables away. A repeated commit finds the ledger's row
and does nothing; two at once wait for each other on that row.

Staging tables, ledger and the list of what is prepared are in the schema ``aqueduct``; the target
is made as the first attempt's rows are, unless it is there. Needs ``adbc-driver-postgresql``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from adbc_driver_postgresql import dbapi

from aqueduct.service.context import Call
from aqueduct.service.sinks import Attempt, PreparedAttempt, WriteKey

__all__ = ["PostgresAttempt", "PostgresSink"]

ROWS = 128 << 10
BYTES = 64 << 20

SETUP = """
CREATE SCHEMA IF NOT EXISTS aqueduct;
CREATE TABLE IF NOT EXISTS aqueduct.ledger (
    sink text, write_key text, rows bigint NOT NULL, at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (sink, write_key));
ALTER TABLE aqueduct.ledger ADD COLUMN IF NOT EXISTS note text NOT NULL DEFAULT 'null';
CREATE TABLE IF NOT EXISTS aqueduct.prepared (
    sink text, id text, attempt text NOT NULL, receipt text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (sink, id));
"""


class PostgresSink:
    """One table. ``uri`` is PostgreSQL's, for example ``postgresql:///stock?host=/run/postgresql``.

    The role needs the right to create tables in the schema ``aqueduct`` and, for the first write,
    the target.
    """

    def __init__(self, uri: str, table: str) -> None:
        if not 1 <= len(table.encode()) <= 63:
            raise ValueError(f"the table {table!r} must have a name of 1 to 63 bytes")
        self.uri = uri
        self.table = table
        with self.transaction() as cursor:
            # Two processes that make a schema at once disturb each other.
            cursor.execute("SELECT pg_advisory_xact_lock(hashtext('aqueduct'))")
            for statement in filter(str.strip, SETUP.split(";")):
                cursor.execute(statement)

    def open(self, attempt: Attempt, call: Call) -> PostgresAttempt:
        """A staging table of the attempt's own, in a transaction that is not committed yet."""
        return PostgresAttempt(self, attempt, call.schema)

    def commit(
        self, write_key: WriteKey, prepared: Sequence[PreparedAttempt], note: Any = None
    ) -> dict[str, Any]:
        """Moves the rows of all of ``prepared`` into the table, and ``note`` into the ledger."""
        with self.transaction() as cursor:
            cursor.execute(
                "INSERT INTO aqueduct.ledger (sink, write_key, rows, note) VALUES ($1, $2, 0, $3) "
                "ON CONFLICT DO NOTHING RETURNING write_key",
                (self.table, write_key.key, json.dumps(note)),
            )
            if cursor.fetchone() is None:
                return {"repeated": True, "rows": self.rows_of(cursor, write_key)}
            # From here on no other commit to this table is at work.
            cursor.execute("SELECT pg_advisory_xact_lock(hashtext($1))", (self.table,))
            if write_key.overwrite and self.exists(cursor, self.table):
                cursor.execute(f"DELETE FROM {quoted(self.table)}")
            rows = sum(self.move(cursor, each) for each in prepared)
            cursor.execute(
                "UPDATE aqueduct.ledger SET rows = $3 WHERE sink = $1 AND write_key = $2",
                (self.table, write_key.key, rows),
            )
            return {"repeated": False, "rows": rows}

    def committed(self, write_key: WriteKey) -> dict[str, Any] | None:
        """What was given with a commit; None: it is not there."""
        with self.transaction() as cursor:
            cursor.execute(
                "SELECT note FROM aqueduct.ledger WHERE sink = $1 AND write_key = $2",
                (self.table, write_key.key),
            )
            found = cursor.fetchone()
            return None if found is None else {"note": json.loads(found[0])}

    def move(self, cursor: Any, each: PreparedAttempt) -> int:
        """The rows of one attempt; how many there were. Raises if anything of it is missing."""
        cursor.execute(
            "DELETE FROM aqueduct.prepared WHERE sink = $1 AND id = $2 RETURNING receipt",
            (self.table, each.attempt.id),
        )
        found = cursor.fetchone()
        if found is None or json.loads(found[0]) != each.receipt:
            raise RuntimeError(
                f"{each.attempt} is not there as it was prepared (it was aborted, or nobody "
                "committed it in time), so nothing of the write is committed"
            )
        name = self.staging(each.attempt)
        staged = f"aqueduct.{name}"
        target = quoted(self.table)
        if not self.exists(cursor, self.table):
            cursor.execute(f"CREATE TABLE {target} (LIKE {staged} INCLUDING ALL)")
        columns = ", ".join(quoted(name) for name in self.columns(cursor, name))
        cursor.execute(f"INSERT INTO {target} ({columns}) SELECT {columns} FROM {staged}")
        cursor.execute(f"DROP TABLE {staged}")
        return int(each.receipt["rows"])

    def abort(self, write_key: WriteKey, prepared: Sequence[PreparedAttempt]) -> None:
        """Drops the staging tables of these attempts; one that was committed has none."""
        with self.transaction() as cursor:
            for each in prepared:
                cursor.execute(
                    "DELETE FROM aqueduct.prepared WHERE sink = $1 AND id = $2",
                    (self.table, each.attempt.id),
                )
                cursor.execute(f"DROP TABLE IF EXISTS aqueduct.{self.staging(each.attempt)}")

    def leftovers(self) -> Iterator[tuple[PreparedAttempt, float]]:
        """What is prepared and neither committed nor aborted."""
        with self.transaction() as cursor:
            cursor.execute(
                "SELECT attempt, receipt, extract(epoch FROM now() - at)::float8 "
                "FROM aqueduct.prepared WHERE sink = $1",
                (self.table,),
            )
            found = cursor.fetchall()
        for attempt, receipt, seconds in found:
            yield (
                PreparedAttempt(Attempt.from_json(attempt), json.loads(receipt)),
                max(0.0, seconds),
            )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        """A cursor; what it did is committed at the end, or if that was an error not at all."""
        with dbapi.connect(self.uri) as connection, connection.cursor() as cursor:
            try:
                yield cursor
            except BaseException:
                connection.rollback()
                raise
            connection.commit()

    def staging(self, attempt: Attempt) -> str:
        """The name of its table. Made of ids alone: nothing that a client says is SQL."""
        return f"staged_{attempt.id}_{hashlib.sha256(self.table.encode()).hexdigest()[:8]}"

    def rows_of(self, cursor: Any, write_key: WriteKey) -> int:
        """What the ledger says of a write that is committed."""
        cursor.execute(
            "SELECT rows FROM aqueduct.ledger WHERE sink = $1 AND write_key = $2",
            (self.table, write_key.key),
        )
        return int(cursor.fetchone()[0])

    def exists(self, cursor: Any, table: str) -> bool:
        """Whether there is such a table."""
        cursor.execute("SELECT to_regclass($1) IS NOT NULL", (quoted(table),))
        return bool(cursor.fetchone()[0])

    def columns(self, cursor: Any, table: str) -> list[str]:
        """The columns of a staging table."""
        cursor.execute(
            "SELECT column_name FROM information_schema.columns "
            "WHERE table_schema = 'aqueduct' AND table_name = $1 ORDER BY ordinal_position",
            (table,),
        )
        return [name for (name,) in cursor.fetchall()]


class PostgresAttempt:
    """One staging table that is being written."""

    def __init__(self, sink: PostgresSink, attempt: Attempt, schema: pa.Schema) -> None:
        self.sink = sink
        self.attempt = attempt
        self.rows = 0
        self.waiting: list[pa.RecordBatch] = []
        self.connection = dbapi.connect(sink.uri)
        try:
            self.cursor = self.connection.cursor()
            self.copy(schema.empty_table(), mode="create")
        except BaseException:
            self.connection.close()
            raise

    def copy(self, rows: pa.Table, *, mode: str = "append") -> None:
        """COPY into the staging table."""
        self.cursor.adbc_ingest(
            self.sink.staging(self.attempt), rows, mode=mode, db_schema_name="aqueduct"
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Batches are gathered into fewer COPYs."""
        self.waiting.append(batch)
        self.rows += batch.num_rows
        if (
            sum(each.num_rows for each in self.waiting) >= ROWS
            or sum(each.nbytes for each in self.waiting) >= BYTES
        ):
            self.flush()

    def flush(self) -> None:
        """Copies what was gathered."""
        if self.waiting:
            self.copy(pa.Table.from_batches(self.waiting))
            self.waiting.clear()

    def prepare(self) -> dict[str, int]:
        """The staging table and its line in the list are durable, or neither is."""
        self.flush()
        receipt = {"rows": self.rows}
        self.cursor.execute(
            "INSERT INTO aqueduct.prepared (sink, id, attempt, receipt) VALUES ($1, $2, $3, $4)",
            (self.sink.table, self.attempt.id, self.attempt.to_json(), json.dumps(receipt)),
        )
        self.connection.commit()
        self.close()
        return receipt

    def abort(self) -> None:
        """The transaction is rolled back, or, if it was committed, undone."""
        self.waiting.clear()
        self.close()
        self.sink.abort(self.attempt.write_key, [PreparedAttempt(self.attempt)])

    def close(self) -> None:
        """Ends the connection; what is not committed is gone."""
        self.cursor.close()
        self.connection.close()


def quoted(name: str) -> str:
    """An identifier as SQL has it."""
    return '"' + name.replace('"', '""') + '"'
