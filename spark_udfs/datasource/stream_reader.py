"""``spark.readStream.format("aqueduct")``: offsets and splits from the table, rows in the tasks.

Spark writes each offset to the query's checkpoint before it reads up to it, and asks for the same
splits again after a restart. So a query has each row once if the table gives the same rows between
the same two offsets whenever it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from aqueduct.errors import AqueductError, BadCall, ConfigError
from aqueduct.escaping import logger_of
from aqueduct.rpc.table_scan import Limit, Offset, ScanPlan, ScanRequest
from spark_udfs.calls.pool import process_pool
from spark_udfs.datasource.options import Settings
from spark_udfs.datasource.query import ask
from spark_udfs.datasource.reader import (
    Split,
    Wanted,
    check_same,
    given_schema,
    read_split,
    splits_of,
    wanted_columns,
    where,
)
from spark_udfs.datasource.types import arrow_of

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["TableStreamReader"]

log = logger_of(__name__)


class TableStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a table as a stream. Lives on the driver as long as the query; ``read`` in tasks."""

    def __init__(self, settings: Settings, schema: StructType) -> None:
        self.settings = settings
        self.columns = wanted_columns(settings, schema)
        self.made = arrow_of(schema)
        self.limit = _limit(settings)
        self.until: Offset | None = None
        self.newest: Offset | None = None
        """The table's newest offset where the last answer was not cut short by a limit."""
        self.start: Offset | None = None
        """Where the last batch began: what the table is asked from, for the query's progress."""
        answer = self._ask(ScanRequest("schema", columns=self.columns))
        if not answer.streams:
            raise ConfigError(
                f"{where(settings)} has no offsets: it can be read, but not as a stream"
            )
        # Tasks have this reader as it is now, so they read by the schema of now.
        self.given = given_schema(settings, answer, schema)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's names, here and below
        """Where a new query begins."""
        return self._offset(self._ask(ScanRequest("initial")))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """That of the options ``max_rows``, ``max_bytes`` or ``max_files``."""
        return self.limit

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """The query is to end at what is the newest row now."""
        question = ScanRequest("latest", start=self.initialOffset())
        self.until = self._offset(self._ask(question))

    def latestOffset(  # noqa: N802
        self, start: dict[str, Any], limit: ReadLimit
    ) -> dict[str, Any]:
        """How far the next batch goes."""
        self.start, self.newest = start, None
        if start == self.until:
            return start
        most = Limit(
            rows=getattr(limit, "max_rows", None),
            bytes=getattr(limit, "max_bytes", None),
            files=getattr(limit, "max_files", None),
            until=self.until,
        )
        found = self._offset(self._ask(ScanRequest("latest", start=start, limit=most)))
        if most == Limit():
            self.newest = found
        return found

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """The table's newest offset, for ``latestOffset`` in the progress of the query.

        It is only told to people. So where the table cannot be asked it is None, with a line in
        the log, and the query goes on.
        """
        if self.start is None or self.newest is not None:
            return self.newest
        try:
            question = ScanRequest("latest", start=self.start)
            return self._offset(ask(replace(self.settings, retries=0), question, keep=True))
        except AqueductError as error:
            log.warning("%s does not say its newest offset: %s", where(self.settings), error)
            return None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The splits of a batch."""
        if start == end:
            return []
        question = ScanRequest(
            "between",
            columns=self.columns,
            partitions=self.settings.more.get("partitions"),
            start=start,
            end=end,
        )
        answer = self._ask(question)
        check_same(self.settings, answer, self.given)
        return splits_of(answer)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The batches of a split."""
        assert isinstance(partition, Split)
        return read_split(Wanted(self.settings, self.given, self.made), partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Tells the table that nothing before ``end`` will be asked for again."""
        self._ask(ScanRequest("commit", end=end))

    def stop(self) -> None:
        """Closes the connection: the process that asks is this query's own."""
        process_pool().close()

    def _ask(self, question: ScanRequest) -> ScanPlan:
        return ask(self.settings, question, keep=True)

    def _offset(self, answer: ScanPlan) -> Offset:
        if answer.offset is None:
            raise BadCall(f"{where(self.settings)} was asked for an offset and gave none")
        return answer.offset


def _limit(settings: Settings) -> ReadLimit:
    """Spark knows one limit at a time. Raises ConfigError if there are more."""
    made = {"max_rows": ReadMaxRows, "max_bytes": ReadMaxBytes, "max_files": ReadMaxFiles}
    given = [name for name in made if name in settings.more]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are given: a query has one limit")
    if not given:
        return ReadAllAvailable()
    return made[given[0]](settings.more[given[0]])
