"""What a connection says of the Spark executor that made it."""

from __future__ import annotations

import json

import pytest

from aqueduct.rpc.executor_name import EXECUTOR_HEADER, ExecutorName, executor_value

NAME = ExecutorName("app-1", "nightly", "node7", "3")


def test_a_name_comes_out_as_it_went_in():
    assert ExecutorName.decode(NAME.encode()) == NAME
    odd = ExecutorName("", "é\ud800\n<b>", "", "")
    assert ExecutorName.decode(odd.encode()) == odd


def test_long_texts_are_cut_off_on_both_sides():
    long = ExecutorName("a" * 1000, "\U0001f600" * 1000, "\n" * 1000, "\x00" * 1000)
    value = long.encode()
    assert len(value) <= 2048
    found = ExecutorName.decode(value)
    assert found is not None and {len(found.application), len(found.host)} == {60}
    said = json.dumps({"version": 1, "name": "x" * 200, "more": 1})
    assert ExecutorName.decode(said.encode()) == ExecutorName("", "x" * 60, "", "")


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[1]",
        b"1" * 5000,
        b"[" * 2000,
        b'{"version": 2, "host": "a"}',
        b'{"version": 1, "host": 7}',
        b'{"host": "a"}',
        b'{"version": 1, "name": "' + b"x" * 2048 + b'"}',
    ],
)
def test_what_cannot_be_read_is_no_name(value):
    assert ExecutorName.decode(value) is None


def test_a_header_is_found_among_others():
    assert executor_value(((b"a", b"b"), (EXECUTOR_HEADER, b"c"))) == b"c"
    assert executor_value(((b"a", b"b"),)) is None
