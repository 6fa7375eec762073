"""The rule for hooks that say yes or no."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from aqueduct.endpoint.hooks import allows


def test_none_and_true_allow_and_false_refuses() -> None:
    assert allows(None, "a hook") and allows(True, "a hook")
    assert not allows(False, "a hook")


@pytest.mark.parametrize("answer", [0, 1, "", "yes", b"", [], {}, pa.scalar(True), object()])
def test_nothing_else_is_an_answer(answer: Any) -> None:
    with pytest.raises(TypeError, match=r"a hook returned .*; only None and True allow"):
        allows(answer, "a hook")


def test_an_answer_of_numpy_is_none_and_the_error_says_what_to_do() -> None:
    numpy_true = pa.array([True]).to_numpy(zero_copy_only=False)[0]
    with pytest.raises(TypeError, match=r"a numpy\.bool.*return bool\(\.\.\.\) of it"):
        allows(numpy_true, "a hook")
