"""Messages of all three modes, with headers and channels in them, over every carrier."""

from __future__ import annotations

import asyncio
import random

import pytest

from aqueduct import Connection, Mode, Receiver, Sender, channel
from aqueduct.errors import Cancelled, Finished, LocalProtocolError, ReceiverClosed
from tests.channels.peers import Peers, ending, payloads, within

MODES = tuple(Mode)


@pytest.mark.requirement("AQ-31")
@pytest.mark.requirement("AQ-R34")
async def test_messages_both_ways_on_channels_in_messages(peers: Peers) -> None:
    to_server, mine = channel()
    back, answers = channel()
    receiver, sender = await peers.call(mine, back)
    assert isinstance(receiver, Receiver) and isinstance(sender, Sender)

    async def echo() -> None:
        async for message in receiver:
            await sender.send(message.payload, headers=message.headers)
        sender.finish()

    task = asyncio.create_task(echo())
    sent = [random.Random(index).randbytes(index * 500) for index in range(60)]
    for index, payload in enumerate(sent):
        await to_server.send(payload, headers=peers.named((b"n", b"%d" % index)))
    to_server.finish()
    got = [message async for message in answers]
    assert [bytes(message.payload) for message in got] == sent
    assert [message.headers for message in got] == [
        peers.named((b"n", b"%d" % n)) for n in range(60)
    ]
    await task
    await to_server.wait_closed()
    with pytest.raises(Finished):
        await answers.receive()


@pytest.mark.requirement("AQ-31")
@pytest.mark.requirement("AQ-34")
@pytest.mark.requirement("AQ-45")
@pytest.mark.parametrize("upstream", [True, False], ids=["up", "down"])
async def test_unordered_messages_all_arrive(peers: Peers, upstream: bool) -> None:
    sender, receiver = await (peers.to_server if upstream else peers.to_client)(Mode.UNORDERED)
    for index in range(200):
        await sender.send(b"%d" % index)
    sender.finish()
    got = await within(payloads(receiver))
    assert sorted(got) == sorted(b"%d" % n for n in range(200))
    await within(sender.wait_closed())
    await peers.forgotten(channels=1)


@pytest.mark.requirement("AQ-31")
@pytest.mark.requirement("AQ-37")
@pytest.mark.requirement("AQ-38")
@pytest.mark.requirement("AQ-45")
async def test_unreliable_messages_arrive_once_or_not_at_all(peers: Peers) -> None:
    sender, receiver = await peers.to_server(Mode.UNRELIABLE)
    sent = [b"%d" % index for index in range(300)]
    for payload in sent:
        await sender.send(payload)
        if random.Random(payload).random() < 0.1:
            await asyncio.sleep(0)  # what leaves in one turn is bounded by the carrier's queue
    sender.finish()
    got = await within(payloads(receiver))
    assert len(set(got)) == len(got) and set(got) <= set(sent)
    assert got  # most of them, but nothing promises how many
    await within(sender.wait_closed())  # finished, although some were lost
    assert sender.error is None
    await peers.forgotten()


@pytest.mark.requirement("AQ-31")
@pytest.mark.requirement("AQ-R17")
async def test_what_fits_no_datagram_goes_by_stream_and_is_never_lost(peers: Peers) -> None:
    sender, receiver = await peers.to_server(Mode.UNRELIABLE)
    limit = peers.client.carrier.datagram_limit
    assert limit > 1000
    large = [bytes([index]) * (limit + index) for index in range(20)]
    for payload in large:
        await sender.send(payload)
    sender.finish()
    assert sorted(await within(payloads(receiver))) == large
    await within(sender.wait_closed())


@pytest.mark.requirement("AQ-31")
async def test_the_mode_may_change_from_message_to_message(peers: Peers) -> None:
    sender, receiver = await peers.to_server()
    chance = random.Random(7)
    sent: dict[bytes, Mode] = {}
    for index in range(120):
        mode = chance.choice(MODES)
        payload = b"%d " % index + bytes(chance.randrange(3000))
        sent[payload] = mode
        await sender.send(payload, mode=mode)
    sender.finish()
    got = await within(payloads(receiver))
    assert len(set(got)) == len(got) and set(got) <= set(sent)
    lost = set(sent) - set(got)
    limit = peers.client.carrier.datagram_limit
    assert all(sent[payload] is Mode.UNRELIABLE and len(payload) < limit for payload in lost)
    ordered = [payload for payload in got if sent[payload] is Mode.ORDERED]
    assert ordered == [payload for payload in sent if sent[payload] is Mode.ORDERED]


@pytest.mark.requirement("AQ-5")
@pytest.mark.requirement("AQ-29")
async def test_headers_of_connections_channels_and_messages(peers: Peers) -> None:
    assert peers.server.headers == ((b"who", b"me"),)
    assert peers.client.headers == ((b"who", b"you"),)
    assert peers.server.peer and peers.client.peer
    assert peers.client.is_client and not peers.server.is_client
    # Order and repeats survive, and values are any bytes.
    pairs = ((b"b", b"2"), (b"a", bytes(range(256))), (b"b", b"1"), (b"c", b""))
    if peers.carrier.draft:
        with pytest.raises(LocalProtocolError, match="have no headers"):
            peers.client.entrypoint.send_nowait(b"", headers=pairs)
        with pytest.raises(LocalProtocolError, match="have no headers"):
            peers.client.entrypoint.send_nowait(b"", attachments=[(channel()[1], pairs)])
        return
    sender, receiver = channel()
    await peers.client.entrypoint.send(
        b"", headers=pairs, attachments=[(receiver, pairs[::-1]), channel()[0]]
    )
    message = await peers.server.entrypoint.receive()
    assert message.headers == pairs
    assert [attachment.headers for attachment in message.attachments] == [pairs[::-1], ()]
    (theirs, _) = (attachment.handle for attachment in message.attachments)
    await sender.send(b"x", headers=pairs)
    assert (await within(theirs.receive())).headers == pairs


@pytest.mark.requirement("AQ-42")
@pytest.mark.parametrize("mode", [Mode.ORDERED, Mode.UNORDERED], ids=lambda mode: mode.value)
async def test_channels_in_channels_in_both_directions(peers: Peers, mode: Mode) -> None:
    """Each step sends the next channel on the last one, from alternating sides, in both halves."""
    depth = 12
    out: Sender = peers.client.entrypoint
    into: Receiver = peers.server.entrypoint
    chain: list[tuple[Sender, Receiver]] = []
    for level in range(depth):
        sender, receiver = channel(mode=mode)
        away: Sender | Receiver = sender if level % 2 else receiver
        await out.send(b"%d" % level, attachments=[(away, peers.named((b"level", b"%d" % level)))])
        message = await within(into.receive())
        assert bytes(message.payload) == b"%d" % level
        (attachment,) = message.attachments
        assert attachment.headers == peers.named((b"level", b"%d" % level))
        theirs = attachment.handle
        if isinstance(theirs, Receiver):
            out, into = sender, theirs
        else:
            out, into = theirs, receiver
        chain.append((out, into))
    assert [type(side) for side in (peers.client, peers.server)] == [Connection, Connection]
    for number, (a, b) in enumerate(reversed(chain)):
        await a.send(b"last %d" % number)
        a.finish()
        assert await within(payloads(b)) == [b"last %d" % number]
    await peers.forgotten()


@pytest.mark.requirement("AQ-42")
async def test_many_attachments_in_one_message(peers: Peers) -> None:
    pairs = [channel(oneshot=index % 3 == 0) for index in range(120)]
    halves = await peers.call(*(pair[index % 2] for index, pair in enumerate(pairs)))
    for index, theirs in enumerate(halves):
        mine = pairs[index][1 - index % 2]
        sender, receiver = (theirs, mine) if isinstance(theirs, Sender) else (mine, theirs)
        assert isinstance(sender, Sender) and isinstance(receiver, Receiver)
        await sender.send(b"%d" % index)
        if index % 3:
            sender.finish()
        assert await within(payloads(receiver)) == [b"%d" % index]
    await peers.forgotten()


@pytest.mark.requirement("AQ-R28")
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
async def test_oneshot_channels_take_one_message(peers: Peers, mode: Mode) -> None:
    sender, receiver = channel(oneshot=True, mode=mode)
    (theirs,) = await peers.call(receiver)
    inner, nested = channel(oneshot=True)
    large = bytes(30_000)  # by stream in every mode: it must arrive
    await sender.send(large, attachments=[nested])
    with pytest.raises(LocalProtocolError):
        sender.send_nowait(b"a second one")
    message = await within(theirs.receive())
    assert bytes(message.payload) == large
    with pytest.raises(Finished):
        await theirs.receive()
    await within(sender.wait_closed())
    inner.cancel()  # unused
    deep = message.attachments[0].handle
    assert isinstance(await ending(deep), Cancelled)
    unread, closed = channel(oneshot=True, mode=mode)
    (theirs,) = await peers.call(closed)
    theirs.close()
    assert isinstance(await ending(unread), ReceiverClosed)
    await peers.forgotten()


async def test_a_copied_payload_may_change_at_once(peers: Peers) -> None:
    sender, receiver = await peers.to_server()
    buffer = bytearray(b"a" * 100_000)
    await sender.send([buffer, buffer], copy=True)
    buffer[:] = b"b" * 100_000
    assert bytes((await within(receiver.receive())).payload) == b"a" * 200_000


@pytest.mark.requirement("AQ-R4")
async def test_misuse_is_refused_with_an_explanation(peers: Peers) -> None:
    sender, receiver = channel()
    (theirs,) = await peers.call(receiver)
    with pytest.raises(LocalProtocolError, match="already sent away"):
        await peers.call(receiver)
    with pytest.raises(LocalProtocolError, match="cannot be sent on"):
        await peers.call(sender)
    with pytest.raises(LocalProtocolError, match="cannot be sent on"):
        await peers.client.entrypoint.send(b"", attachments=[theirs])
    with pytest.raises(LocalProtocolError, match="sent away"):
        await receiver.receive()
    a, b = channel()
    with pytest.raises(LocalProtocolError, match="twice"):
        await peers.call(a, b)
    c, _d = channel()
    with pytest.raises(LocalProtocolError, match="twice"):
        await peers.call(c, c)
    # Nothing of it had any effect.
    await sender.send(b"still here")
    assert bytes((await within(theirs.receive())).payload) == b"still here"
