"""Arrow record batches as payloads: encoding, decoding, schemas, casts.

The only room that knows pyarrow's IPC. Nothing here does I/O: everything is a function, or a small
class, from buffers to buffers.
"""

from __future__ import annotations

from aqueduct.arrow.decode import Checks, Decoder
from aqueduct.arrow.encode import Encoded, Encoder
from aqueduct.arrow.ipc import deserialize_schema, serialize_schema
from aqueduct.arrow.schema import Difference, check, difference

__all__ = [
    "Checks",
    "Decoder",
    "Difference",
    "Encoded",
    "Encoder",
    "check",
    "deserialize_schema",
    "difference",
    "serialize_schema",
]
