"""The header keys of the Arrow call convention, and their values read with suspicion.

Keys follow the advice of Aqueduct's header data: a short name, a dash and six random hexadecimal
digits, fixed for ever; a change of meaning gets a new key. ``docs/protocols/arrow-calls.md`` has
the whole convention byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from aqueduct.errors import BadCall, LocalProtocolError

__all__ = [
    "ACCEPTED",
    "ALIVE",
    "ANSWERS",
    "ASKED",
    "ATTEMPT",
    "BATCH",
    "BODY",
    "CALL",
    "CAPABILITIES",
    "COMPRESSION",
    "DEADLINE",
    "EXPECTED",
    "FRAGMENT",
    "HANDLER",
    "KIND",
    "METADATA",
    "NUMBER_LIMIT",
    "PARTITION",
    "STATUS",
    "TOKEN",
    "UNARY",
    "VERSION",
    "WRITE_KEY",
    "Headers",
    "number_of",
    "one_each",
    "text_of",
    "text_value",
]

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""The headers of a message, in order."""

VERSION: Final = 1
"""The version of the convention."""

CALL: Final = b"arrow-call-405c16"
"""On the message of a call: the version, decimal. All other keys of a call depend on it."""
HANDLER: Final = b"arrow-handler-3c8e32"
"""The handler's name, UTF-8."""
KIND: Final = b"arrow-kind-b4c4e5"
"""``exchange``, ``source``, ``sink`` or ``unary``."""
UNARY: Final = "unary"
"""The kind of a call whose one batch comes with it."""
BODY: Final = b"arrow-body-7f0c2e"
"""Where in the payload of a unary call its batch begins, decimal."""
ANSWERS: Final = b"arrow-answers-91d3b6"
"""With the status of a unary call: where in the payload the schema ends, and each batch: decimal
numbers with commas between them."""
DEADLINE: Final = b"arrow-deadline-84b09e"
"""Milliseconds that the caller will wait for the end, decimal, from the message's arrival."""
WRITE_KEY: Final = b"arrow-run-abde1f"
"""What is the same for every attempt at the same work, UTF-8."""
ATTEMPT: Final = b"arrow-attempt-4d8599"
"""What tells attempts apart, UTF-8."""
TOKEN: Final = b"arrow-token-9132e0"
"""What the service may ask for, any bytes."""
PARTITION: Final = b"arrow-partition-cf36d2"
"""``INDEX`` or ``INDEX/COUNT``, decimal: the share of the work that this call is."""
METADATA: Final = b"arrow-metadata-9772af"
"""The user's own headers: a JSON object of strings, UTF-8."""
COMPRESSION: Final = b"arrow-compression-4e9d17"
"""On a call: the compressions that the client reads and asks for, the dearest first, with commas
between them. On the accept message: the one that both sides may use from now on."""
ASKED: Final = b"arrow-wishes-58c0d3"
"""On an exchange: words with commas between them, for what the client would like to have."""
CAPABILITIES: Final = b"arrow-traits-e61b07"
"""On the accept message: words with commas between them, for what the handler is and which of the
capabilities that the call asks for are granted."""
EXPECTED: Final = b"arrow-expected-bc4eec"
"""Where in the payload the schema begins that the caller expects back, decimal."""

ALIVE: Final = b"arrow-alive-5e07d9"
"""On a message of the entrypoint without attachments: the client's application is at work, so its
calls that wait for it are not stuck. On a message among the answers, without a payload: the call
waits for its turn in the service. The value does not matter."""
ACCEPTED: Final = b"arrow-hello-e42c4c"
"""On the first message to the client: the version, decimal."""
STATUS: Final = b"arrow-status-8b3ba8"
"""On the final message: how the call ended, in one word."""
BATCH: Final = b"arrow-batch-2179bf"
"""The number of the batch, decimal."""
FRAGMENT: Final = b"arrow-piece-99faef"
"""``OFFSET/TOTAL``, decimal: which bytes of the payload these are."""

NUMBER_LIMIT: Final = (1 << 63) - 1


def one_each(headers: Iterable[tuple[bytes, bytes]], keys: frozenset[bytes]) -> dict[bytes, bytes]:
    """The values of those of ``keys`` that are there. Raises BadCall if one is there twice.

    Keys of others are nobody's business. The empty key is that of a message whose header block was
    malformed, and says so.
    """
    found: dict[bytes, bytes] = {}
    for key, value in headers:
        if key in keys:
            if key in found:
                raise BadCall(f"the header {key.decode()} is there twice")
            found[key] = value
        elif not key:
            raise BadCall(value.decode())
    return found


def number_of(value: bytes, key: bytes, *, least: int = 0, most: int = NUMBER_LIMIT) -> int:
    """A decimal number without sign, blanks or leading zeros. Raises BadCall for anything else."""
    # At most 19 digits, so that int() never has more to do than it should.
    if not value.isdigit() or len(value) > 19 or (value[0] == 0x30 and len(value) > 1):
        raise BadCall(f"the header {key.decode()} is {_shown(value)}, which is not a number")
    number = int(value)
    if not least <= number <= most:
        raise BadCall(
            f"the header {key.decode()} is {number}, which is not between {least} and {most}"
        )
    return number


def text_of(value: bytes, key: bytes, *, limit: int) -> str:
    """UTF-8 text of at most ``limit`` bytes. Raises BadCall for anything else."""
    if len(value) > limit:
        raise BadCall(
            f"the header {key.decode()} has {len(value)} bytes, above the limit of {limit}"
        )
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise BadCall(f"the header {key.decode()} is not UTF-8: {_shown(value)}") from error


def text_value(text: str, name: str, *, limit: int) -> bytes:
    """``text`` as a header value. Raises LocalProtocolError above ``limit`` bytes of UTF-8."""
    try:
        value = text.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"the {name} of a call cannot be sent: {error}") from error
    if len(value) > limit:
        raise LocalProtocolError(
            f"the {name} of a call has {len(value)} bytes of UTF-8, above the limit of {limit}"
        )
    return value


def _shown(value: bytes) -> str:
    return repr(value if len(value) <= 40 else value[:40] + b"...")
