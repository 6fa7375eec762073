"""The examples of services do what their pages say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.errors import StartFailed

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

pytestmark = pytest.mark.checkout


def load(name: str) -> ModuleType:
    """A program of the examples, as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_a_model_is_loaded_once_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = load("model_service").service
    points = pa.record_batch({"x": [0.0, 1.5]})
    with aqueduct.testing.client(service) as client:
        assert client.call("score", points)["score"].to_pylist() == [1.0, 4.0]
    file = tmp_path / "model.json"
    monkeypatch.setenv("MODEL", str(file))
    with pytest.raises(StartFailed, match="on_start 'load' of the service 'model' raised FileNot"):
        aqueduct.testing.client(service).__enter__()
    file.write_text('{"slope": -1, "offset": 0}')
    with aqueduct.testing.client(service) as client:
        assert client.call("score", points)["score"].to_pylist() == [0.0, -1.5]
    assert "model" not in service.state


def test_the_service_that_has_tests_passes_them() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    done = subprocess.run(
        [*command, "--noconftest", "-c", os.devnull, str(EXAMPLES / "tested_service.py")],
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
