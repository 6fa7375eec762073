"""The message of a call and the accept message, byte for byte, and every way of being wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct.arrow.ipc import serialize_schema
from aqueduct.errors import BadCall, LocalProtocolError
from aqueduct.rpc import keys
from aqueduct.rpc.request import (
    AS_COMPLETED,
    FAILURES,
    IDEMPOTENT,
    ONE_TO_ONE,
    PLACES,
    Accepted,
    CallHead,
    Partition,
    check_attachments,
)
from tests.arrow.strategies import schemas

INPUT = pa.schema([("id", pa.int64())])
OUTPUT = pa.schema([("score", pa.float64())])


def joined(head):
    headers, payload = head.encode()
    return headers, b"".join(payload)


def refusal(headers, payload=b""):
    with pytest.raises(BadCall) as caught:
        CallHead.decode(headers, payload, peer="aqueduct://a:1")
    assert caught.value.peer == "aqueduct://a:1"
    return str(caught.value)


def changed(headers, key, value):
    """``headers`` with another value for ``key``, or without it."""
    rest = [pair for pair in headers if pair[0] != key]
    return rest if value is None else [*rest, (key, value)]


@pytest.mark.requirement("AC-7")
def test_the_bytes_of_a_full_call():
    head = CallHead(
        handler="score",
        kind="exchange",
        schema=INPUT,
        expected=OUTPUT,
        deadline=1.2341,
        write_key="run 7",
        attempt="2",
        token=b"s\xffcret",
        partition=Partition(3, 16),
        metadata={"tenant": "é", "a": "b"},
    )
    head = replace(head, capabilities=frozenset({"failures", "as-completed"}))
    headers, payload = joined(head)
    size = len(serialize_schema(INPUT))
    assert headers == (
        (b"arrow-call-405c16", b"1"),
        (b"arrow-handler-3c8e32", b"score"),
        (b"arrow-kind-b4c4e5", b"exchange"),
        (b"arrow-deadline-84b09e", b"1234"),
        (b"arrow-run-abde1f", b"run 7"),
        (b"arrow-attempt-4d8599", b"2"),
        (b"arrow-token-9132e0", b"s\xffcret"),
        (b"arrow-partition-cf36d2", b"3/16"),
        (b"arrow-metadata-9772af", '{"tenant":"é","a":"b"}'.encode()),
        (b"arrow-wishes-58c0d3", b"as-completed,failures"),
        (b"arrow-expected-bc4eec", b"%d" % size),
    )
    assert payload == serialize_schema(INPUT) + serialize_schema(OUTPUT)
    assert CallHead.decode(headers, payload).deadline == 1.234


@pytest.mark.requirement("AC-7")
def test_the_bytes_of_a_bare_source():
    headers, payload = joined(CallHead("numbers", "source"))
    assert headers == (
        (b"arrow-call-405c16", b"1"),
        (b"arrow-handler-3c8e32", b"numbers"),
        (b"arrow-kind-b4c4e5", b"source"),
    )
    assert payload == b""


def test_no_deadline_is_rounded_to_nothing():
    headers, payload = joined(CallHead("numbers", "source", deadline=1e-9))
    assert headers[-1] == (keys.DEADLINE, b"1")
    assert CallHead.decode(headers, payload).deadline == 0.001


@pytest.mark.requirement("AC-12")
def test_a_source_may_expect_a_schema():
    headers, payload = joined(CallHead("numbers", "source", expected=OUTPUT))
    assert headers[-1] == (keys.EXPECTED, b"0")
    assert payload == serialize_schema(OUTPUT)
    assert CallHead.decode(headers, payload).expected == OUTPUT


names = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20)


@given(
    st.sampled_from(["exchange", "source", "sink"]),
    names,
    schemas(),
    st.none() | schemas(),
    st.none() | st.integers(1, 10**9),
    st.text(max_size=20),
    st.none() | st.binary(max_size=40),
    st.none() | st.builds(Partition, st.integers(0, 9), st.none() | st.integers(10, 1 << 62)),
    st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=4),
    st.frozensets(st.sampled_from([AS_COMPLETED, FAILURES, "of-later-versions"])),
)
def test_calls_survive(
    kind,
    handler,
    schema,
    expected,
    milliseconds,
    write_key,
    token,
    partition,
    metadata,
    capabilities,
):
    head = CallHead(
        handler=handler,
        kind=kind,
        schema=None if kind == "source" else schema,
        expected=None if kind == "sink" else expected,
        deadline=None if milliseconds is None else milliseconds / 1000,
        write_key=write_key,
        attempt=write_key[::-1],
        token=token,
        partition=partition,
        metadata=metadata,
        capabilities=capabilities if kind == "exchange" else frozenset(),
    )
    assert CallHead.decode(*joined(head)) == head


@pytest.mark.requirement("AC-94")
@pytest.mark.requirement("AC-3")
def test_headers_of_others_are_ignored():
    headers, payload = joined(CallHead("h", "sink", INPUT))
    more = [(b"other-000000", b"1"), *headers, (b"other-000000", b"2")]
    assert CallHead.decode(more, payload) == CallHead("h", "sink", INPUT)


def test_a_token_is_not_shown():
    assert "hidden" not in repr(CallHead("h", "source", token=b"hidden"))


@pytest.mark.requirement("AC-7")
@pytest.mark.requirement("AC-11")
@pytest.mark.requirement("AC-12")
@pytest.mark.parametrize(
    ("head", "text"),
    [
        (CallHead("", "source"), "'' cannot be the name of a handler"),
        (CallHead("a\nb", "source"), "'a\\nb' cannot be the name of a handler"),
        (
            CallHead("é" * 129, "source"),
            "the handler's name of a call has 258 bytes of UTF-8, above the limit of 256",
        ),
        (
            CallHead("h", cast(Any, "other")),
            "the kind of a call is one of ('exchange', 'source', 'sink')",
        ),
        (CallHead("h", "source", INPUT), "a call of the kind source has no input schema"),
        (CallHead("h", "exchange"), "a call of the kind exchange needs an input schema"),
        (CallHead("h", "sink", INPUT, OUTPUT), "a call of the kind sink expects no output schema"),
        (
            CallHead("h", "sink", INPUT, capabilities=frozenset({FAILURES})),
            "a call of the kind sink asks for no capabilities",
        ),
        (CallHead("h", "source", deadline=0), "the deadline of a call is 0 s; it must be above 0"),
        (CallHead("h", "source", deadline=float("nan")), "the deadline of a call is nan s; it mus"),
        (CallHead("h", "source", deadline=1e12), "at most 316224000 s"),
        (
            CallHead("h", "source", write_key="r" * 257),
            "the write key of a call has 257 bytes of UTF-8, abov",
        ),
        (CallHead("h", "source", attempt="a" * 257), "the attempt of a call has 257 bytes of UTF"),
        (
            CallHead("h", "source", write_key="\ud800"),
            "the write key of a call cannot be sent: 'utf-8' codec",
        ),
        (CallHead("h", "source", token=bytes(16385)), "the token of a call has 16385 bytes, above"),
        (
            CallHead("h", "source", partition=Partition(3, 3)),
            "Partition(index=3, count=3) is no share of anything",
        ),
        (
            CallHead("h", "source", partition=Partition(-1)),
            "Partition(index=-1, count=None) is no share of anything",
        ),
        (
            CallHead("h", "source", metadata={"a": cast(Any, 1)}),
            "the metadata of a call is text to text, not ('a', 1)",
        ),
        (
            CallHead("h", "source", metadata={"a": "b" * 32769}),
            "the metadata of a call has 32777 bytes of UTF-8, above the limit of 32768",
        ),
        (
            CallHead("h", "source", expected=INPUT.with_metadata({"a": "b" * (8 << 20)})),
            "above the limit of 8388608; do their fields carry large metadata?",
        ),
    ],
)
def test_calls_that_cannot_be_made(head, text):
    with pytest.raises(LocalProtocolError, match=re.escape(text)):
        head.encode()


HEADERS, PAYLOAD = joined(CallHead("h", "exchange", INPUT, OUTPUT))
SIZE = len(serialize_schema(INPUT))
WRONG = {
    "no version": (
        keys.CALL,
        None,
        (
            "not an Arrow call: it has no header arrow-call-405c16; is the peer's Arrow call "
            "convention version 1?"
        ),
    ),
    "a later version": (
        keys.CALL,
        b"2",
        (
            "the call follows version 2 of the Arrow call convention, and the service knows "
            "version 1 only; update the aqueduct-arrow of the service"
        ),
    ),
    "an earlier version": (
        keys.CALL,
        b"0",
        (
            "the call follows version 0 of the Arrow call convention, and the service knows "
            "version 1 only; update the aqueduct-arrow of the caller"
        ),
    ),
    "no number": (keys.CALL, b"x", "the header arrow-call-405c16 is b'x', which is not a number"),
    "no handler": (keys.HANDLER, None, "the call has no header arrow-handler-3c8e32"),
    "an empty handler": (keys.HANDLER, b"", "'' cannot be the name of a handler"),
    "a handler over lines": (keys.HANDLER, b"a\n", "'a\\n' cannot be the name of a handler"),
    "a long handler": (
        keys.HANDLER,
        b"h" * 257,
        "the header arrow-handler-3c8e32 has 257 bytes, above the limit of 256",
    ),
    "a handler in other letters": (
        keys.HANDLER,
        b"\xff" * 50,
        "the header arrow-handler-3c8e32 is not UTF-8: b'" + r"\xff" * 40 + "...'",
    ),
    "no kind": (keys.KIND, None, "the call has no header arrow-kind-b4c4e5"),
    "another kind": (
        keys.KIND,
        b"Sink",
        "the call is of the kind b'Sink'; there are exchange, source, sink",
    ),
    "no time": (
        keys.DEADLINE,
        b"0",
        "the header arrow-deadline-84b09e is 0, which is not between 1 and 316224000000",
    ),
    "no end": (keys.DEADLINE, b"1e9", "the header arrow-deadline-84b09e is b'1e9', which is not a"),
    "a long write key": (
        keys.WRITE_KEY,
        b"r" * 257,
        "the header arrow-run-abde1f has 257 bytes, above",
    ),
    "a long attempt": (keys.ATTEMPT, b"r" * 257, "the header arrow-attempt-4d8599 has 257 bytes,"),
    "a long token": (keys.TOKEN, bytes(16385), "the token has 16385 bytes, above the limit of"),
    "many capabilities": (
        keys.ASKED,
        b"a," * 200,
        "the header arrow-wishes-58c0d3 has 400 bytes, abo",
    ),
    "capabilities in other letters": (
        keys.ASKED,
        b"\xff",
        "the header arrow-wishes-58c0d3 is not UTF-8",
    ),
    "a share beyond": (
        keys.PARTITION,
        b"3/3",
        "the header arrow-partition-cf36d2 is 3, which is not between 0 and 2",
    ),
    "a share of nothing": (keys.PARTITION, b"0/0", "is 0, which is not between 1 and"),
    "no share": (keys.PARTITION, b"a", "the header arrow-partition-cf36d2 is b'a', which is not"),
    "half a share": (keys.PARTITION, b"3/", "the header arrow-partition-cf36d2 is b'', which is"),
    "no JSON": (keys.METADATA, b"{", "the header arrow-metadata-9772af is not JSON: Expecting"),
    "no end of JSON": (keys.METADATA, b"[" * 30_000, "the header arrow-metadata-9772af is not JSO"),
    "a list": (
        keys.METADATA,
        b"[]",
        "the header arrow-metadata-9772af is not a JSON object of strings",
    ),
    "numbers": (keys.METADATA, b'{"a":1}', "is not a JSON object of strings"),
    "much metadata": (keys.METADATA, bytes(32769), "has 32769 bytes, above the limit of 32768"),
    "a schema beyond": (
        keys.EXPECTED,
        b"%d" % (len(PAYLOAD) + 1),
        f"is {len(PAYLOAD) + 1}, which is not between 0 and {len(PAYLOAD)}",
    ),
    "schemas cut elsewhere": (keys.EXPECTED, b"%d" % (SIZE - 8), "the input schema: not a schema"),
    "two schemas for one": (
        keys.EXPECTED,
        None,
        f"the input schema: {len(PAYLOAD) - SIZE} bytes follow the schema",
    ),
    "no expected schema": (keys.EXPECTED, b"%d" % len(PAYLOAD), "the input schema: "),
}


@pytest.mark.requirement("AC-94")
@pytest.mark.requirement("AC-2")
@pytest.mark.requirement("AC-7")
@pytest.mark.requirement("AC-8")
@pytest.mark.requirement("AC-11")
@pytest.mark.parametrize(("key", "value", "text"), WRONG.values(), ids=WRONG)
def test_calls_that_are_wrong(key, value, text):
    assert text in refusal(changed(HEADERS, key, value), PAYLOAD)


@pytest.mark.requirement("AC-4")
@pytest.mark.parametrize("key", sorted({key for key, _ in HEADERS}))
def test_no_header_is_there_twice(key):
    text = refusal([*HEADERS, *(pair for pair in HEADERS if pair[0] == key)], PAYLOAD)
    assert text == f"the header {key.decode()} is there twice"


@pytest.mark.requirement("AC-12")
def test_the_payload_must_fit_the_kind():
    source = changed(changed(HEADERS, keys.KIND, b"source"), keys.EXPECTED, None)
    assert refusal(source, PAYLOAD) == (
        f"a call of the kind source has no input schema, and {len(PAYLOAD)} bytes came"
    )
    assert refusal(changed(HEADERS, keys.KIND, b"sink"), PAYLOAD) == (
        "a call of the kind sink expects no output schema, and one came"
    )
    for kind in (b"exchange", b"sink"):
        headers = changed(changed(HEADERS, keys.KIND, kind), keys.EXPECTED, None)
        assert refusal(headers).startswith("the input schema: not a schema in Arrow IPC form: ")
    assert refusal(HEADERS, bytes((8 << 20) + 1)) == (
        "the schemas have 8388609 bytes, above the limit of 8388608"
    )


def test_errors_name_the_handler_once_it_is_known():
    with pytest.raises(BadCall) as caught:
        CallHead.decode(changed(HEADERS, keys.KIND, b"?"), PAYLOAD, peer="p")
    assert (caught.value.peer, caught.value.handler) == ("p", "h")


@given(st.lists(st.tuples(st.sampled_from(sorted(keys.__dict__.values(), key=repr)), st.binary())))
def test_any_headers_are_a_call_or_an_error(headers):
    headers = [(key, value) for key, value in headers if isinstance(key, bytes)]
    for start in ((), HEADERS):
        try:
            head = CallHead.decode([*start, *headers], PAYLOAD)
        except BadCall:
            continue
        assert head.handler == "h"


@pytest.mark.requirement("AC-15")
def test_places():
    assert {kind: check_attachments(kind, PLACES[kind].count) for kind in PLACES} == PLACES
    exchange, source, sink = PLACES["exchange"], PLACES["source"], PLACES["sink"]
    assert (exchange.to_server, exchange.to_client, exchange.status) == (0, 1, 2)
    assert (source.to_server, source.to_client, source.status) == (None, 0, 1)
    assert sink == exchange
    with pytest.raises(BadCall, match="a call of the kind source carries 2 channels, not 3"):
        check_attachments("source", 3)


@pytest.mark.requirement("AC-17")
@pytest.mark.requirement("AC-18")
def test_the_bytes_of_an_accept_message():
    headers, payload = Accepted(OUTPUT).encode()
    assert headers == ((b"arrow-hello-e42c4c", b"1"),)
    assert payload == [serialize_schema(OUTPUT)]
    assert Accepted().encode() == (headers, [])


@pytest.mark.requirement("AC-17")
def test_the_bytes_of_capabilities():
    capabilities = frozenset({ONE_TO_ONE, IDEMPOTENT, AS_COMPLETED, FAILURES})
    headers, _ = Accepted(OUTPUT, "lz4", capabilities).encode()
    assert headers == (
        (b"arrow-hello-e42c4c", b"1"),
        (b"arrow-compression-4e9d17", b"lz4"),
        (b"arrow-traits-e61b07", b"as-completed,failures,idempotent,one-to-one"),
    )


@pytest.mark.requirement("AC-5")
def test_unknown_capabilities_are_left_alone():
    headers, payload = joined(CallHead("h", "exchange", INPUT))
    for value in (b"", b"faster", b"as-completed,faster", b",,"):
        head = CallHead.decode([*headers, (keys.ASKED, value)], payload)
        assert (AS_COMPLETED in head.capabilities) == (b"as-completed" in value)
        assert FAILURES not in head.capabilities


@pytest.mark.parametrize("kind", ["exchange", "source", "sink"])
@pytest.mark.parametrize(
    "capabilities", [frozenset(), frozenset({IDEMPOTENT, "of-later-versions"})]
)
def test_accept_messages_survive(kind, capabilities):
    accepted = Accepted(None if kind == "sink" else OUTPUT, capabilities=capabilities)
    headers, payload = accepted.encode()
    assert Accepted.decode(headers, b"".join(payload), kind=kind) == accepted


@pytest.mark.requirement("AC-17")
@pytest.mark.requirement("AC-18")
@pytest.mark.parametrize(
    ("kind", "headers", "payload", "text"),
    [
        ("sink", (), b"", "not an Arrow accept message: it has no header arrow-hello-e42c4c"),
        ("sink", ((keys.ACCEPTED, b"1"),) * 2, b"", "the header arrow-hello-e42c4c is there twice"),
        (
            "sink",
            ((keys.ACCEPTED, b"1"), (keys.CAPABILITIES, b"a"), (keys.CAPABILITIES, b"a")),
            b"",
            "the header arrow-traits-e61b07 is there twice",
        ),
        (
            "sink",
            ((keys.ACCEPTED, b"1"), (keys.CAPABILITIES, b"\xff")),
            b"",
            "the header arrow-traits-e61b07 is not UTF-8",
        ),
        (
            "sink",
            ((keys.ACCEPTED, b"1"), (keys.CAPABILITIES, b"t" * 257)),
            b"",
            "the header arrow-traits-e61b07 has 257 bytes, above the limit of 256",
        ),
        (
            "sink",
            ((keys.ACCEPTED, b"2"),),
            b"",
            "the accept message follows version 2 of the Arrow call conv",
        ),
        (
            "sink",
            ((keys.ACCEPTED, b"1"),),
            b"x",
            "the accept message of a sink is empty, and 1 bytes came",
        ),
        (
            "source",
            ((keys.ACCEPTED, b"1"),),
            b"",
            "the accept message of a call of the kind source has no output schema",
        ),
        (
            "source",
            ((keys.ACCEPTED, b"1"),),
            b"x",
            "the output schema: not a schema in Arrow IPC fo",
        ),
    ],
)
def test_accept_messages_that_are_wrong(kind, headers, payload, text):
    with pytest.raises(BadCall, match=re.escape(text)) as caught:
        Accepted.decode(headers, payload, kind=kind, peer="p", handler="h")
    assert (caught.value.peer, caught.value.handler) == ("p", "h")
