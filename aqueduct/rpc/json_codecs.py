"""JSON rows in place of Arrow payloads: what encodes and decodes the batches of a call in JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from aqueduct.arrow.encode import Encoded
from aqueduct.arrow.json_rows import decode_rows, encode_rows, most_values
from aqueduct.arrow.schema import check, equal_schemas
from aqueduct.arrow.sizes import batch_bytes
from aqueduct.config import DEFAULT
from aqueduct.errors import LocalProtocolError

__all__ = ["JsonDecoder", "JsonEncoder"]

_LONG: Final = 32 << 10
"""Bytes that take about a millisecond."""
_MANY: Final = 1024
"""Values that do."""


class JsonEncoder:
    """Makes a JSON array of each batch of a schema; an Encoder for the call that it is of."""

    independent = True
    broken: str | None = None

    def __init__(self, schema: pa.Schema, *, where: str, fault: str = "", **names: str) -> None:
        """The arguments are those of an Encoder."""
        self.schema = schema
        self._where = where
        self._fault = fault
        self._names = names

    def slow(self, batch: Any, compression: str = "") -> bool:
        """Whether ``encode`` belongs in a thread."""
        if not isinstance(batch, pa.RecordBatch):
            return False
        values = batch.num_rows * max(1, batch.num_columns)  # a run of many has few bytes
        return bool(values >= _MANY or batch_bytes(batch) >= _LONG)

    def encode(self, batch: pa.RecordBatch) -> Encoded:
        """The rows. Raises SchemaMismatch, and LocalProtocolError for what has no form in JSON."""
        if not equal_schemas(batch.schema, self.schema):
            check(self.schema, batch.schema, where=self._where, fault=self._fault, **self._names)
        try:
            text = encode_rows(batch)
        except LocalProtocolError as error:
            raise LocalProtocolError(f"{self._where}: {error}") from None
        return Encoded([text], len(text))


class JsonDecoder:
    """Reads the rows of a request; a Decoder for the call that it is of."""

    unpacks = False
    reader = None

    def __init__(
        self,
        schema: pa.Schema,
        *,
        values: int,
        where: str,
        batch_limit: int = DEFAULT.calls.batch_limit,
        charge: Callable[[int], object] | None = None,
        **names: str,
    ) -> None:
        """``values``, ``batch_limit`` and ``charge``: see ``decode_rows``."""
        self.schema = schema
        self._values = values
        self._batch_limit = batch_limit
        self._charge = charge
        self._where = where
        self._names = names

    def slow(self, payload: Any) -> bool:
        """Whether ``decode`` belongs in a thread."""
        return len(payload) >= _LONG or most_values(payload, self.schema) >= _MANY

    def decode(self, payload: Any, *, number: int | None = None) -> pa.RecordBatch:
        """The batch. Raises BadCall and BatchTooLarge."""
        return decode_rows(
            payload,
            self.schema,
            values=self._values,
            batch_limit=self._batch_limit,
            charge=self._charge,
            where=self._where,
            **self._names,
        )
