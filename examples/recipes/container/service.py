"""The service of the recipes: the number of characters of each word."""

import pyarrow as pa
import pyarrow.compute as pc

import aqueduct

service = aqueduct.Service("words")


@service.handler(output=pa.schema([("id", pa.int64()), ("length", pa.int32())]))
def lengths(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The length of each word, beside its id."""
    return pa.record_batch({"id": batch["id"], "length": pc.utf8_length(batch["word"])})
