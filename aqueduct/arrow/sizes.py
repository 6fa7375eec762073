"""How many bytes rows have, also where PyArrow cannot tell."""

from __future__ import annotations

import pyarrow as pa

__all__ = ["batch_bytes"]


def batch_bytes(batch: pa.RecordBatch) -> int:
    """Bytes of the rows of ``batch``; with unions those of all its buffers.

    ``nbytes`` of PyArrow 26 ends the process for a union without rows.
    """
    if any(_has_union(kind) for kind in batch.schema.types):
        return int(batch.get_total_buffer_size())
    return int(batch.nbytes)


def _has_union(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_union(kind.storage_type)
    if pa.types.is_union(kind):
        return True
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _has_union(kind.value_type)
    return any(_has_union(kind.field(place).type) for place in range(kind.num_fields))
