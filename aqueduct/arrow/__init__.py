"""Arrow record batches over channels: payloads, schemas, and the call convention.

The only room that knows pyarrow's IPC. Nothing here does I/O: everything is a function, or a small
class, from buffers to buffers.
"""

from __future__ import annotations

from aqueduct.arrow.call import (
    KINDS,
    PLACES,
    CallHead,
    Hello,
    Kind,
    Partition,
    Places,
    check_attachments,
)
from aqueduct.arrow.cut import Assembler, Payload, batch_headers, pieces
from aqueduct.arrow.decode import Checks, Decoder
from aqueduct.arrow.describe import (
    DESCRIBE,
    DESCRIBE_SCHEMA,
    RESERVED_PREFIX,
    Description,
    HandlerDescription,
)
from aqueduct.arrow.encode import Encoded, Encoder
from aqueduct.arrow.ipc import deserialize_schema, serialize_schema
from aqueduct.arrow.schema import Difference, check, difference
from aqueduct.arrow.status import CANCELLED, OK, Status
from aqueduct.arrow.wire import Headers

__all__ = [
    "CANCELLED",
    "DESCRIBE",
    "DESCRIBE_SCHEMA",
    "KINDS",
    "OK",
    "PLACES",
    "RESERVED_PREFIX",
    "Assembler",
    "CallHead",
    "Checks",
    "Decoder",
    "Description",
    "Difference",
    "Encoded",
    "Encoder",
    "HandlerDescription",
    "Headers",
    "Hello",
    "Kind",
    "Partition",
    "Payload",
    "Places",
    "Status",
    "batch_headers",
    "check",
    "check_attachments",
    "deserialize_schema",
    "difference",
    "pieces",
    "serialize_schema",
]
