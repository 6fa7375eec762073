"""Findings: what each check of ``aqueduct doctor`` says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aqueduct.escaping import one_line

__all__ = ["Finding", "Severity", "failed", "note", "ok", "warning", "within"]


class Severity(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    """Nothing is wrong: something is not known, or not offered."""
    WARNING = "warning"
    """It works, and may soon not, or is slower than it could be."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    status: Severity
    text: str
    remedy: str = ""
    """What mends it: a command, or what to ask for."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The values behind the text, for programs."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "check": self.check,
            "status": self.status.value,
            "text": self.text,
            "remedy": self.remedy,
            "facts": self.facts,
        }


def ok(check: str, text: str, **facts: Any) -> Finding:
    """A check that found nothing wrong."""
    return Finding(check, Severity.OK, text, "", facts)


def note(check: str, text: str, remedy: str = "", **facts: Any) -> Finding:
    """A check that cannot know."""
    return Finding(check, Severity.NOTE, text, remedy, facts)


def warning(check: str, text: str, remedy: str = "", **facts: Any) -> Finding:
    """A check that found what may become worse."""
    return Finding(check, Severity.WARNING, text, remedy, facts)


def failed(check: str, text: str, remedy: str = "", **facts: Any) -> Finding:
    """A check that found what is wrong."""
    return Finding(check, Severity.FAILED, text, remedy, facts)


async def within(
    seconds: float, check: str, work: Callable[[], Awaitable[list[Finding]]]
) -> list[Finding]:
    """What a check finds within ``seconds``; whatever goes wrong in it is a finding, too."""
    try:
        async with asyncio.timeout(seconds):
            return await work()
    except TimeoutError:
        return [failed(check, f"no answer within {seconds:g} s")]
    except Exception as error:  # noqa: BLE001  the other checks go on
        return [failed(check, one_line(error) or type(error).__name__)]
