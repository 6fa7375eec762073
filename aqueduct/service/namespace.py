"""``Namespace``: attributes that a service, or a call, keeps for the code of its author."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

__all__ = ["Namespace"]


class Namespace:
    """Attributes of your own choice: ``state.model = load()``.

    ``"model" in state`` says whether there is one, and ``vars(state)`` has them all. Any thread may
    read and set them; what several threads change needs a lock of its own.
    """

    __slots__ = ("__dict__", "_hint", "_whose")

    def __init__(
        self, values: Mapping[str, Any] | None = None, *, whose: str = "this state", hint: str = ""
    ) -> None:
        """``whose`` it is, and a ``hint`` what sets it, for the error of what is not there."""
        object.__setattr__(self, "_whose", whose)
        object.__setattr__(self, "_hint", hint)
        self.__dict__.update(values or {})

    if TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None: ...

        def __delattr__(self, name: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what Python and other libraries look for
            raise AttributeError(name)
        has = ", ".join(map(repr, sorted(vars(self)))) or "nothing yet"
        text = f"{self._whose} has no {name!r}; it has {has}{self._hint}"
        raise AttributeError(text, name=name, obj=self)

    def __contains__(self, name: str) -> bool:
        return name in vars(self)

    def __repr__(self) -> str:
        # Without values, which may be secrets.
        return f"<Namespace with {', '.join(sorted(vars(self))) or 'nothing'}>"
