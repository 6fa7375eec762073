"""A core whose messages have headers, in front of their payloads: that of Arrow calls."""

from __future__ import annotations

import pytest

from aqueduct._speedups.channels.encoder import VERSION
from aqueduct.errors import LocalProtocolError
from aqueduct.protocol.common import effects
from aqueduct.protocol.common.registry import Attach
from aqueduct.protocol.common.sender import Mode
from tests.protocol.control_streams.lone import Lone, message
from tests.reference.control_streams import header_block

requirement = pytest.mark.requirement
PAIRS = ((b"key", b"value"),)
BLOCK = header_block(PAIRS)


@requirement("AC-95")
@pytest.mark.parametrize("mode", Mode)
def test_what_is_sent_begins_with_its_headers(mode: Mode) -> None:
    it = Lone(header_blocks=True)
    for pairs in (PAIRS, ()):
        it.applied.clear()
        it.send(it.sender, b"payload", headers=pairs, mode=mode)
        sent = b"".join(
            b"".join(map(bytes, effect[2])) if effect[0] == effects.WRITE else effect[1]
            for effect in it.applied
            if effect[0] in (effects.WRITE, effects.DATAGRAM)
        )
        assert header_block(pairs) + b"payload" in sent


@requirement("AC-96")
@pytest.mark.parametrize("datagram", [False, True])
def test_what_comes_has_its_headers(datagram: bool) -> None:
    it = Lone("server", header_blocks=True)
    data = VERSION + message(0, 0, BLOCK + b"payload") + message(0, 1, header_block(()))
    it.datagram(data) if datagram else it.say(data)
    first, second = it.take(it.receiver), it.take(it.receiver)
    assert first is not None and second is not None
    assert isinstance(first.raw, bytes)  # as compiled code looks at them
    assert (first.headers, bytes(first.payload)) == (PAIRS, b"payload")
    assert (second.headers, bytes(second.payload)) == ((), b"")
    assert not it.core.budget.budget_used


@requirement("AC-96")
def test_a_payload_lands_where_its_headers_say() -> None:
    it = Lone("server", header_blocks=True)
    memory = bytearray(8)
    asked = []

    def place(headers: object, size: int) -> memoryview:
        asked.append((headers, size))
        return memoryview(memory)[:size]

    it.receiver.queue.placement = place
    it.receiver.queue.placement_key = b"key"
    it.say(VERSION, message(0, 0, BLOCK + b"payload"), message(0, 1, header_block(()) + b"other"))
    assert asked == [(PAIRS, 7)]
    assert memory == b"payload\0"
    received = it.take(it.receiver)
    assert received is not None and received.payload.obj is memory


@requirement("AC-97")
@pytest.mark.parametrize("datagram", [False, True])
def test_a_malformed_block_is_told_and_the_connection_goes_on(datagram: bool) -> None:
    it = Lone("server", header_blocks=True)
    data = VERSION + message(0, 0, b"none") + message(0, 1, BLOCK)
    it.datagram(data) if datagram else it.say(data)
    broken, good = it.take(it.receiver), it.take(it.receiver)
    assert broken is not None and good is not None
    ((key, text),) = broken.headers
    assert key == b"" and b"(AC-97)" in text
    assert bytes(broken.payload) == b"" and good.headers == PAIRS
    assert it.code is None
    assert not it.core.budget.budget_used


@requirement("AC-97")
def test_attachments_of_a_broken_message_reach_the_application() -> None:
    it = Lone("server", header_blocks=True)
    it.say(VERSION, message(0, 0, b"none", [8]))
    broken = it.take(it.receiver)
    assert broken is not None
    ((half, headers),) = broken.attachments
    assert half.channel == 8 and headers == ()


def test_attachments_have_no_headers_even_so() -> None:
    it = Lone(header_blocks=True)
    attach = Attach(keep_sender=True, is_oneshot=False, headers=PAIRS)
    with pytest.raises(LocalProtocolError, match="attachments of the control-stream draft have no"):
        it.core.send(it.sender, b"", it.now, headers=PAIRS, attachments=[attach])


def test_a_row_of_messages_is_framed_alike() -> None:
    it = Lone(header_blocks=True)
    it.send(it.sender, b"first", headers=PAIRS)
    it.applied.clear()
    assert it.sender.post([b"pay", b"load"], PAIRS) == 1
    it.apply()
    (written,) = [effect for effect in it.applied if effect[0] == effects.WRITE]
    assert b"".join(map(bytes, written[2])) == message(0, 1, BLOCK + b"payload")
    plain = Lone()
    plain.send(plain.sender, b"first")
    plain.applied.clear()
    assert plain.sender.post(b"payload", ()) == 1
    plain.apply()
    (written,) = [effect for effect in plain.applied if effect[0] == effects.WRITE]
    assert b"".join(map(bytes, written[2])) == message(0, 1, b"payload")
