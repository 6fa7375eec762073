"""The handshake, from both sides and in any pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct.errors import (
    FrameError,
    LinkUnknown,
    LocalProtocolError,
    SequenceError,
    VersionError,
)
from aqueduct.protocol.relink.handshake import (
    HIGHEST_LINK,
    ChosenLink,
    ConnectorHandshake,
    DistantLink,
    LinkAgreement,
    ListenerHandshake,
    Opening,
    RefusedLink,
    decode_opening,
    encode_hello,
    encode_opening,
    encode_reply,
)

NEW = Opening("server")
OLD = replace(NEW, require_old_link=True, old_epoch=5, old_link=77)
OPENINGS = st.builds(
    Opening,
    st.text(max_size=60),
    st.integers(0, 8),
    st.integers(0, 8),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, HIGHEST_LINK),
)


@pytest.mark.requirement("RL-2")
@pytest.mark.requirement("RL-3")
@pytest.mark.requirement("RL-R2")
@given(OPENINGS, st.binary(max_size=20))
def test_an_opening_is_decoded_as_it_was_encoded(opening: Opening, behind: bytes) -> None:
    data = encode_opening(opening)
    assert (len(data)) % 8 == 0
    assert decode_opening(data + behind) == (opening, len(data))
    for size in range(len(data)):
        assert decode_opening(data[:size]) is None


def in_pieces(
    side: ConnectorHandshake | ListenerHandshake, data: bytes, size: int
) -> LinkAgreement:
    """Feeds the data until there is an agreement."""
    for at in range(0, len(data), size):
        found = side.receive_data(data[at : at + size])
        if found is not None:
            return found
    raise AssertionError("no agreement")


@pytest.mark.requirement("RL-2")
@pytest.mark.requirement("RL-7")
@pytest.mark.requirement("RL-R5")
@given(st.integers(1, 80))
def test_both_sides_agree_in_any_pieces(size: int) -> None:
    connector = ConnectorHandshake(OLD)
    listener = ListenerHandshake(lambda opening: ChosenLink(5, opening.old_link, resumed=True))
    sent = connector.first_flight + b"early"
    first = in_pieces(listener, sent, size)
    assert b"early".startswith(first.left)
    second = in_pieces(connector, listener.output + b"more", size)
    assert replace(first, left=b"") == replace(second, left=b"")
    assert (second.epoch, second.link, second.resumed) == (5, 77, True)


@pytest.mark.requirement("RL-8")
def test_a_new_link_is_new() -> None:
    connector = ConnectorHandshake(NEW)
    agreement = connector.receive_data(encode_hello() + encode_reply(9, 3) + b"rest")
    assert agreement == LinkAgreement(NEW, 9, 3, resumed=False, left=b"rest")


@pytest.mark.requirement("RL-2")
@pytest.mark.requirement("RL-R5")
def test_the_connector_sends_one_flight() -> None:
    assert ConnectorHandshake(NEW).first_flight == encode_hello() + encode_opening(NEW)


@pytest.mark.requirement("RL-6")
@pytest.mark.requirement("RL-7")
@pytest.mark.requirement("RL-R12")
@pytest.mark.parametrize(
    ("answer", "restarted"),
    [(encode_reply(5, 0), False), (encode_reply(6, 0), True), (encode_reply(6, 77), True)],
    ids=["dropped", "restarted", "another instance with the same id"],
)
def test_an_old_link_that_is_unknown_is_lost(answer: bytes, restarted: bool) -> None:
    with pytest.raises(LinkUnknown) as caught:
        ConnectorHandshake(OLD).receive_data(encode_hello() + answer)
    assert caught.value.restarted is restarted


@pytest.mark.requirement("RL-8")
@pytest.mark.requirement("RL-R19")
def test_another_link_than_the_required_one_is_no_answer() -> None:
    with pytest.raises(LinkUnknown, match="dropped"):
        ConnectorHandshake(OLD).receive_data(encode_hello() + encode_reply(5, 78))


@pytest.mark.requirement("RL-R4")
def test_a_listener_that_gives_no_link_refuses() -> None:
    with pytest.raises(SequenceError, match="refuses a link"):
        ConnectorHandshake(NEW).receive_data(encode_hello() + encode_reply(5, 0))


@pytest.mark.requirement("RL-4")
@pytest.mark.requirement("RL-R4")
@pytest.mark.requirement("RL-R19")
def test_another_version_is_an_error_at_its_first_byte() -> None:
    with pytest.raises(VersionError, match="version 3"):
        ConnectorHandshake(NEW).receive_data(b"\x03")


@pytest.mark.requirement("RL-4")
@pytest.mark.requirement("RL-R4")
def test_a_listener_answers_a_later_version_with_0() -> None:
    listener = ListenerHandshake(lambda _: ChosenLink(1, 1, resumed=False))
    assert listener.receive_data(b"\x05" + bytes(7)) is None
    assert listener.output == encode_hello()


@pytest.mark.requirement("RL-5")
@pytest.mark.requirement("RL-7")
def test_a_refusal_is_answered_or_not() -> None:
    listener = ListenerHandshake(lambda _: RefusedLink(5, True, "no such link"))
    with pytest.raises(SequenceError, match="no such link"):
        listener.receive_data(encode_hello() + encode_opening(OLD))
    assert listener.output == encode_hello() + encode_reply(5, 0)
    listener = ListenerHandshake(lambda _: RefusedLink(5, False, "no such endpoint"))
    with pytest.raises(SequenceError, match="no such endpoint"):
        listener.receive_data(encode_hello() + encode_opening(NEW))
    assert listener.output == encode_hello()


@pytest.mark.requirement("RL-5")
@pytest.mark.requirement("RL-6")
@pytest.mark.requirement("RL-R3")
@pytest.mark.requirement("RL-R4")
def test_fields_that_cannot_be() -> None:
    good = encode_opening(replace(NEW, old_link=1))
    for data, why in (
        (b"\x06\xff" + good[2:], "UTF-8"),
        (good[:7] + b"\x09" + good[8:], "0 to 8"),
        (good[:-1] + b"\x80", "2^63"),
    ):
        with pytest.raises(FrameError, match=why.replace("^", r"\^")):
            decode_opening(data)
    with pytest.raises(FrameError, match=r"2\^63"):
        ConnectorHandshake(NEW).receive_data(encode_hello() + bytes(15) + b"\x80")


@pytest.mark.requirement("RL-R3")
@pytest.mark.requirement("RL-R19")
def test_openings_that_have_no_bytes() -> None:
    for opening, why in (
        (Opening("x" * 256), "256 bytes"),
        (Opening("x", connector_id_size=9), "9 and 1 bytes"),
        (Opening("x", old_link=1 << 63), "below"),
    ):
        with pytest.raises(LocalProtocolError, match=why):
            encode_opening(opening)
    with pytest.raises(LocalProtocolError, match="RL-R19"):
        ConnectorHandshake(replace(OLD, require_old_link=False))


@pytest.mark.requirement("RL-7")
@pytest.mark.parametrize("size", [1, 5, 200])
def test_a_handshake_that_another_process_is_to_make_is_given_to_it_whole(size: int) -> None:
    side = ListenerHandshake(lambda opening: DistantLink(3))
    flight = encode_hello() + encode_opening(OLD)
    for at in range(0, len(flight), size):
        assert side.distant is None
        assert side.receive_data(flight[at : at + size]) is None
    assert side.distant == DistantLink(3, flight)
    other = ListenerHandshake(lambda opening: ChosenLink(5, opening.old_link, resumed=True))
    agreement = other.receive_data(side.distant.data + b"behind")
    assert agreement == LinkAgreement(OLD, 5, 77, True, b"behind")
    assert side.output == encode_hello()  # which the other one says again
