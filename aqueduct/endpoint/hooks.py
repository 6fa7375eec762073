"""The answers of hooks that decide yes or no, such as ``authorize``: one rule for all."""

from __future__ import annotations

from aqueduct.escaping import shown

__all__ = ["allows"]


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
