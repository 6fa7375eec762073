"""The text of an ERROR frame: a word, a colon, and words for people (RS-R13)."""

from __future__ import annotations

from typing import Final

from aqueduct.errors import LocalProtocolError

__all__ = [
    "APPLICATION_ERROR",
    "CANCELED",
    "INVALID",
    "INVALID_SETUP",
    "REJECTED",
    "REJECTED_SETUP",
    "WORDS",
    "decode_reason",
    "encode_reason",
    "rejects_setup",
]

REJECTED_SETUP: Final = "REJECTED_SETUP"
INVALID_SETUP: Final = "INVALID_SETUP"
APPLICATION_ERROR: Final = "APPLICATION_ERROR"
REJECTED: Final = "REJECTED"
CANCELED: Final = "CANCELED"
INVALID: Final = "INVALID"
WORDS: Final = (REJECTED_SETUP, INVALID_SETUP, APPLICATION_ERROR, REJECTED, CANCELED, INVALID)
_OF_SETUP: Final = ("", REJECTED_SETUP, INVALID_SETUP)


def rejects_setup(data: bytes) -> bool:
    """Whether an ERROR of the connection may mean its SETUP: other words are of what followed."""
    return decode_reason(data[:32])[0] in _OF_SETUP


def encode_reason(word: str, text: str, most: int) -> bytes:
    """The data of an ERROR frame, of at most so many bytes: what is longer is cut."""
    if word not in WORDS:
        raise LocalProtocolError(f"an error begins with {word!r}; known: {', '.join(WORDS)}")
    data = f"{word}: {text}".encode(errors="replace")
    # A character that is cut is left out as a whole.
    return data if len(data) <= most else data[:most].decode(errors="ignore").encode()


def decode_reason(data: bytes) -> tuple[str, str]:
    """The word and the text of any ERROR frame; the word is empty if it is none of ours."""
    text = data.decode(errors="replace")
    word, colon, rest = text.partition(":")
    return (word, rest.strip()) if colon and word in WORDS else ("", text)
