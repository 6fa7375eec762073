"""The end of a call: every error there and back, whatever an exception may hold."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct import errors
from aqueduct.errors import (
    BadCall,
    BatchTooLarge,
    Busy,
    CallError,
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    HandlerFailed,
    ReceiverClosed,
    Refused,
    SchemaMismatch,
    UnknownHandler,
)
from aqueduct.rpc import keys
from aqueduct.rpc.status import CANCELLED, OK, Status

CALL_ERRORS = [
    CallError,
    UnknownHandler,
    SchemaMismatch,
    HandlerFailed,
    Busy,
    Refused,
    BatchTooLarge,
    BadCall,
    DeadlineExceeded,
]


def sent(status):
    """A status as the peer reads it."""
    headers, payload = status.encode()
    return Status.decode(headers, b"".join(payload))


def raised(error):
    try:
        raise error
    except Exception as caught:  # noqa: BLE001  any of them
        return caught


@pytest.mark.requirement("AC-52")
def test_the_list_of_errors_is_whole():
    tree = [getattr(errors, name) for name in errors.__all__]
    assert {kind for kind in tree if issubclass(kind, CallError)} == set(CALL_ERRORS)


@pytest.mark.requirement("AC-54")
def test_the_bytes():
    status = Status("ok", counters={"rows_in": 3})
    assert status.encode() == (
        ((b"arrow-status-8b3ba8", b"ok"),),
        [b'{"counters":{"rows_in":3}}'],
    )
    assert Status("busy", message="é", batch=0).encode() == (
        ((b"arrow-status-8b3ba8", b"busy"),),
        ['{"message":"é","batch":0}'.encode()],
    )


texts = st.text(max_size=30)


@given(
    st.builds(
        Status,
        st.sampled_from([OK, CANCELLED, *(kind.status for kind in CALL_ERRORS)]),
        message=texts,
        kind=texts,
        detail=texts,
        traceback=texts,
        batch=st.none() | st.integers(0, 1 << 62),
        column=texts,
        wanted=texts,
        got=texts,
        counters=st.dictionaries(texts, st.integers(0, 1 << 62), max_size=3),
    )
)
def test_statuses_survive(status):
    assert sent(status) == status


@pytest.mark.requirement("AC-52")
@pytest.mark.parametrize("kind", CALL_ERRORS)
def test_errors_of_a_call_come_back_as_themselves(kind):
    status = sent(Status.from_exception(kind("it is so")))
    assert status.code == kind.status
    error = status.to_exception(peer="aqueduct://a:1", handler="score")
    assert type(error) is kind
    assert str(error) == "handler 'score' at aqueduct://a:1: it is so"
    assert (error.peer, error.handler) == ("aqueduct://a:1", "score")


def test_a_schema_mismatch_keeps_its_column():
    error = SchemaMismatch("text", column="a.b", wanted="int8", got="int16")
    back = sent(Status.from_exception(error, batch=4)).to_exception(peer="p")
    assert isinstance(back, SchemaMismatch)
    assert (back.column, back.wanted, back.got) == ("a.b", "int8", "int16")
    assert str(back) == "p, batch 4: text"


def test_a_handlers_exception():
    status = sent(Status.from_exception(raised(ValueError("no such flight: é")), batch=17))
    assert (status.code, status.kind) == ("handler-failed", "ValueError")
    assert status.detail == "no such flight: é"
    error = status.to_exception(peer="aqueduct://a:1", handler="score")
    assert isinstance(error, HandlerFailed)
    assert str(error) == (
        "handler 'score' at aqueduct://a:1, batch 17: ValueError: no such flight: é"
    )
    assert (error.kind, error.detail) == ("ValueError", "no such flight: é")
    assert "in raised\n    raise error\n" in error.remote_traceback
    assert error.__notes__ == [f"The handler's own traceback:\n{error.remote_traceback.rstrip()}"]


def test_kinds_are_named_with_their_module():
    status = Status.from_exception(json.JSONDecodeError("bad", "x", 0))
    assert status.kind == "json.decoder.JSONDecodeError"
    assert Status.from_exception(KeyError()).message == "KeyError"


def test_causes_are_in_the_traceback():
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error
    except ValueError as error:
        status = Status.from_exception(error)
    assert "KeyError: 'first'" in status.traceback
    assert "direct cause" in status.traceback


def test_a_failure_of_a_failure_is_passed_on():
    inner = HandlerFailed("text", kind="ValueError", detail="d", remote_traceback="lines")
    back = sent(Status.from_exception(inner)).to_exception()
    assert isinstance(back, HandlerFailed)
    assert (str(back), back.kind, back.detail) == ("text", "ValueError", "d")
    assert back.remote_traceback == "lines"


def test_other_errors_of_the_library_are_a_handlers():
    status = Status.from_exception(ConnectionLost("the database is gone"))
    assert status.code == "handler-failed"
    assert status.kind == "aqueduct.errors.ConnectionLost"


@pytest.mark.parametrize(
    "error",
    [
        asyncio.CancelledError(),
        GeneratorExit(),
        Cancelled("the client gave up"),
        ReceiverClosed("the client gave up"),
    ],
)
def test_what_was_given_up_is_cancelled(error):
    status = sent(Status.from_exception(error))
    assert status.code == CANCELLED
    back = status.to_exception(handler="h")
    assert type(back) is Cancelled
    assert str(back) == f"handler 'h': {str(error) or 'the call was cancelled'}"


def test_all_is_well():
    assert Status(OK).to_exception() is None


@pytest.mark.requirement("AC-53")
def test_codes_of_later_versions():
    back = Status("tired", message="zzz").to_exception(peer="p")
    assert type(back) is CallError
    assert str(back) == "p: zzz (status 'tired')"
    silent = Status("busy").to_exception()
    assert str(silent) == "the call ended with the status 'busy'"


@pytest.mark.requirement("AC-54")
def test_texts_are_bounded():
    error = raised(ValueError("é" * 100_000))
    error.add_note("n" * 100_000)
    status = Status.from_exception(error)
    assert len(status.detail.encode()) <= 8 << 10
    assert len(status.message.encode()) <= (8 << 10) + 12
    assert len(status.traceback.encode()) <= 32 << 10
    assert "bytes left out" in status.traceback
    assert status.traceback.startswith("Traceback (most recent call last)")
    assert status.traceback.endswith("nnn\n") or status.traceback.endswith("nnn")
    assert sent(status) == status
    column = SchemaMismatch("m", column="c" * 99_999, wanted="w" * 99_999, got="g" * 99_999)
    assert sum(map(len, Status.from_exception(column).encode()[1])) < 32 << 10
    passed = HandlerFailed(
        "m", kind="k" * 99_999, detail="d" * 99_999, remote_traceback="t" * 99_999
    )
    assert sum(map(len, Status.from_exception(passed).encode()[1])) < 64 << 10


def test_texts_that_are_no_text():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no")

    status = sent(Status.from_exception(raised(Mute())))
    assert status.detail == "(its text cannot be had: RuntimeError)"
    status = sent(Status.from_exception(raised(ValueError("half \ud83d"))))
    assert status.detail == "half \\ud83d"
    assert sent(Status("busy", message="half \ud83d")).message == "half ?"


@pytest.mark.requirement("AC-52")
@pytest.mark.requirement("AC-54")
@pytest.mark.parametrize(
    ("headers", "payload", "text"),
    [
        ((), b"{}", "not a status: it has no header arrow-status-8b3ba8"),
        (((keys.STATUS, b"ok"),) * 2, b"{}", "the header arrow-status-8b3ba8 is there twice"),
        (((keys.STATUS, b"\xff"),), b"{}", "the header arrow-status-8b3ba8 is not UTF-8"),
        (((keys.STATUS, b"o" * 65),), b"{}", "has 65 bytes, above the limit of 64"),
        (((keys.STATUS, b"ok"),), b"", "the status is not JSON: "),
        (((keys.STATUS, b"ok"),), b"\xff", "the status is not JSON: "),
        (((keys.STATUS, b"ok"),), b"[" * 100_000, "the status is not JSON: "),
        (((keys.STATUS, b"ok"),), b"[]", "the status is a JSON list, not an object"),
        (((keys.STATUS, b"ok"),), b'{"message":1}', "the status has 1 for 'message'"),
        (((keys.STATUS, b"ok"),), b'{"batch":true}', "the status has True for 'batch'"),
        (((keys.STATUS, b"ok"),), b'{"counters":[]}', "the status has [] for 'counters'"),
        (((keys.STATUS, b"ok"),), b'{"counters":{"a":"b"}}', "has {'a': 'b'} for 'counters'"),
        (((keys.STATUS, b"ok"),), bytes(524_289), "the status has 524289 bytes, above the limit"),
    ],
)
def test_statuses_that_are_wrong(headers, payload, text):
    with pytest.raises(BadCall) as caught:
        Status.decode(headers, payload, peer="p", handler="h")
    assert text in str(caught.value)
    assert (caught.value.peer, caught.value.handler) == ("p", "h")


@pytest.mark.requirement("AC-94")
@pytest.mark.requirement("AC-54")
def test_what_a_later_version_adds_is_ignored():
    status = Status.decode(((keys.STATUS, b"ok"), (b"x-000000", b"")), b'{"later":[1]}')
    assert status == Status(OK)


def test_a_refusal_says_whether_the_call_is_untouched():
    for untouched in (True, False):
        error = Refused("it ends", draining=True, untouched=untouched)
        found = sent(Status.from_exception(error)).to_exception()
        assert isinstance(found, Refused)
        assert (found.draining, found.untouched) == (True, untouched)
