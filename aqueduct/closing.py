"""What ``async with`` closes at the end of its block."""

from __future__ import annotations

from typing import Protocol, Self

__all__ = ["AsyncClosing"]


class _Closes(Protocol):
    async def close(self) -> None: ...


class AsyncClosing:
    """``async with`` gives it, and closes it."""

    __slots__ = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self: _Closes, *exc: object) -> None:
        await self.close()
