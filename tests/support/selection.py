"""Which cases of a test are in every run. What is exhaustive is for the long run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
from hypothesis import settings

EXAMPLES = int(os.environ.get("AQUEDUCT_EXAMPLES", "40"))
"""Examples of what hypothesis makes, for tests that are one of many of their kind."""

some_examples = settings(max_examples=EXAMPLES)


def needs_pyspark(*least: int) -> pytest.MarkDecorator:
    """Skips a test where PySpark is older: `ci/lower_bounds.sh` runs it with the lowest version."""
    try:
        found = tuple(map(int, version("pyspark").split(".")[:2]))
    except PackageNotFoundError:
        found = least
    return pytest.mark.skipif(found < least, reason=f"here is PySpark {found}")


def mostly_long(cases: Iterable[Any], *usual: Any) -> list[Any]:
    """Cases for ``parametrize``: every run has those of ``usual``, the long run has the others."""
    every = list(cases)
    assert all(case in every for case in usual)
    return [
        case
        if case in usual
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in every
    ]
