"""What a hook of the user says that decides yes or no: one rule for all of them."""

from __future__ import annotations

from typing import Final

__all__ = ["allows", "shown"]

_SHOWN: Final = 200  # characters of an answer in an error


def allows(answer: object, hook: str) -> bool:
    """Whether the answer of a hook lets the peer in: None and True do, False does not.

    Nothing else is an answer: a dict, a string or a number may mean anything. Raises TypeError,
    which names the ``hook`` and what it returned; the caller then refuses.
    """
    if answer is None or answer is True:
        return True
    if answer is False:
        return False
    kind = type(answer)
    advice = "; return bool(...) of it" if kind.__name__ in ("bool", "bool_") else ""
    raise TypeError(
        f"{hook} returned {shown(answer)} (a {kind.__module__}.{kind.__qualname__}); "
        f"only None and True allow, and False refuses{advice}"
    )


def shown(answer: object) -> str:
    """``answer`` in an error: its repr, cut short."""
    try:
        text = repr(answer)
    except Exception as error:  # noqa: BLE001  an object's own __repr__ may fail
        text = f"an object whose repr raised {type(error).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
