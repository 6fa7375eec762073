"""Header keys, which must never change, and the numbers in their values."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct.errors import BadCall
from aqueduct.rpc import keys as keys

KEYS = {
    "COMPRESSION": b"arrow-compression-4e9d17",
    "CALL": b"arrow-call-405c16",
    "HANDLER": b"arrow-handler-3c8e32",
    "KIND": b"arrow-kind-b4c4e5",
    "DEADLINE": b"arrow-deadline-84b09e",
    "WRITE_KEY": b"arrow-run-abde1f",
    "ATTEMPT": b"arrow-attempt-4d8599",
    "TOKEN": b"arrow-token-9132e0",
    "PARTITION": b"arrow-partition-cf36d2",
    "METADATA": b"arrow-metadata-9772af",
    "EXPECTED": b"arrow-expected-bc4eec",
    "ALIVE": b"arrow-alive-5e07d9",
    "ACCEPTED": b"arrow-hello-e42c4c",
    "STATUS": b"arrow-status-8b3ba8",
    "BATCH": b"arrow-batch-2179bf",
    "FRAGMENT": b"arrow-piece-99faef",
    "BODY": b"arrow-body-7f0c2e",
    "ANSWERS": b"arrow-answers-91d3b6",
    "ASKED": b"arrow-wishes-58c0d3",
    "CAPABILITIES": b"arrow-traits-e61b07",
}


@pytest.mark.requirement("AC-3")
def test_the_keys_are_fixed():
    found = {name: value for name, value in vars(keys).items() if isinstance(value, bytes)}
    assert found == KEYS
    assert keys.VERSION == 1


def test_keys_follow_the_advice():
    assert all(re.fullmatch(rb"arrow-[a-z]+-[0-9a-f]{6}", key) for key in KEYS.values())
    assert len({key[-6:] for key in KEYS.values()}) == len(KEYS)


@given(st.integers(0, keys.NUMBER_LIMIT))
def test_numbers_survive(number):
    assert keys.number_of(b"%d" % number, keys.BATCH) == number


@pytest.mark.requirement("AC-1")
@given(st.binary(max_size=25))
def test_a_number_has_one_form(value):
    try:
        number = keys.number_of(value, keys.BATCH)
    except BadCall:
        assert not re.fullmatch(rb"0|[1-9][0-9]{0,17}", value)
    else:
        assert b"%d" % number == value


@pytest.mark.requirement("AC-1")
@pytest.mark.parametrize(("number", "fits"), [(4, False), (5, True), (9, True), (10, False)])
def test_numbers_are_bounded(number, fits):
    value = b"%d" % number
    if fits:
        assert keys.number_of(value, keys.BATCH, least=5, most=9) == number
    else:
        with pytest.raises(BadCall, match=f"is {number}, which is not between 5 and 9"):
            keys.number_of(value, keys.BATCH, least=5, most=9)


def test_long_values_are_shortened_in_errors():
    with pytest.raises(BadCall) as caught:
        keys.number_of(b"x" * 10_000, keys.BATCH)
    assert len(str(caught.value)) < 200


@pytest.mark.requirement("AC-97")
def test_the_empty_key_says_what_was_wrong_with_the_headers():
    with pytest.raises(BadCall, match=r"^the header block .* is malformed$"):
        keys.one_each(((b"", b"the header block of a message is malformed"),), frozenset())
