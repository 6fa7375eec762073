"""A pytest plugin for runs on a sabotaged tree: writes down the first failure, and never shrinks.

``AQUEDUCT_SABOTAGE_REPORT`` names the file it writes as JSON.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

__all__ = ["pytest_configure", "pytest_exception_interact"]

_first: dict[str, str] = {}


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """A failure is enough: a smaller example of it would take minutes to find."""
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("sabotage", settings(), phases=phases, database=None)
    settings.load_profile("sabotage")


def pytest_exception_interact(
    node: pytest.Item | pytest.Collector, call: pytest.CallInfo[Any], report: Any
) -> None:
    """Keeps where the first exception came from."""
    if _first or call.excinfo is None:
        return
    _first.update(test=node.nodeid, when=call.when, kind=call.excinfo.typename)
    _first["text"] = str(call.excinfo.value)[:500]
    Path(os.environ["AQUEDUCT_SABOTAGE_REPORT"]).write_text(json.dumps(_first))
