"""Batches that are committed: each is processed once, or not, and both sides know which."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from aqueduct import relink
from aqueduct.errors import Ended, LinkLost, LocalProtocolError
from aqueduct.protocol.relink.cost import message_cost
from aqueduct.protocol.relink.handshake import Opening
from aqueduct.testing.stream_relay import End, Fate, StreamRelay
from tests.relink.pairs import BRISK, FAMILIES, brisk, eventually, joined, within
from tests.relink.peers import ScriptedPeer, general, message, operation, packets


def texts(batch: relink.RelinkBatch) -> list[bytes]:
    return [b"".join(map(bytes, message.parts)) for message in batch.messages]


async def commit(channel: relink.RelinkChannel, *words: bytes) -> relink.RelinkTransaction:
    async with channel.transaction() as transaction:
        for word in words:
            await transaction.send(word)
    return transaction


async def first(connection: relink.RelinkConnection) -> relink.RelinkIncoming:
    found = await within(connection.accept())
    assert found is not None
    return found


@pytest.mark.requirement("RL-17")
@pytest.mark.parametrize("family", FAMILIES)
async def test_batches_are_grouped_as_they_were_committed(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path, transactions="connector") as pair:
        out = pair.client.channel(1)
        sent = [await commit(out, b"a", b"b"), await commit(out), await commit(out, b"c")]
        with pytest.raises(KeyError):
            async with out.transaction() as dropped:
                await dropped.send(b"never")
                raise KeyError
        async with out.transaction() as taken_back:
            await taken_back.send(b"never")
            taken_back.rollback()
        sent.append(await commit(out, b"d"))
        found = await first(pair.server)
        batches = [await within(found.receive_batch()) for _ in range(3)]
        assert [texts(batch) for batch in batches] == [[b"a", b"b"], [b"c"], [b"d"]]
        assert [message.number for message in batches[2].messages] == [5]
        await batches[0].committed()
        await batches[1].uncommitted()
        await batches[2].committed()
        assert [await within(each.result) for each in sent] == [True, True, False, True]
        assert (dropped.committed, taken_back.committed) == (False, False)
        assert await taken_back.result is False
        await within(out.close())
        with pytest.raises(Ended):
            await found.receive_batch()
        assert pair.client.snapshot().held_bytes == pair.server.snapshot().held_bytes == 0


async def test_answers_out_of_order_reach_their_own_transactions(tmp_path: Path) -> None:
    async with joined("tcp", tmp_path, transactions="listener") as pair:
        sent = [await commit(pair.server.channel(1), b"%d" % number) for number in range(3)]
        found = await first(pair.client)
        batches = [await within(found.receive_batch()) for _ in range(3)]
        await batches[2].uncommitted()
        await batches[1].committed()
        with pytest.raises(TimeoutError):
            await sent[1].wait(timeout=0.05)
        await batches[0].uncommitted()
        assert [await within(each.result) for each in sent] == [False, True, False]
        with pytest.raises(LocalProtocolError, match="one answer"):
            await batches[0].committed()


async def test_a_batch_answers_by_its_block_or_by_being_dropped(tmp_path: Path) -> None:
    async with joined("tcp", tmp_path, transactions="connector") as pair:
        sent = [await commit(pair.client.channel(1), b"%d" % number) for number in range(4)]
        found = await first(pair.server)

        async def consume() -> None:
            async for batch in found.transactions():
                if texts(batch) == [b"3"]:
                    raise ValueError(texts(batch))  # without an answer
                async with batch:
                    if texts(batch) == [b"1"]:
                        await batch.uncommitted()
                    if texts(batch) == [b"2"]:
                        return

        await within(consume())
        assert [await within(each.result) for each in sent[:3]] == [True, False, True]
        with pytest.raises(ValueError, match="3"):
            await within(consume())
        gc.collect()
        assert await within(sent[3].result) is False
        failing = await commit(pair.client.channel(1), b"x")
        with pytest.raises(KeyError):
            async with await within(found.receive_batch()):
                raise KeyError
        assert await within(failing.result) is False


async def test_transactions_of_a_channel_take_turns(tmp_path: Path) -> None:
    async with joined("tcp", tmp_path, transactions="both") as pair:
        out = pair.client.channel(1)
        with pytest.raises(LocalProtocolError, match="within channel"):
            await out.send(b"x")
        async with out.transaction() as one:
            await one.send(b"1")
            with pytest.raises(TimeoutError):
                async with out.transaction(timeout=0.05):
                    raise AssertionError("it is not its turn")
            with pytest.raises(LocalProtocolError, match="once its block is left"):
                await one.result
            other = asyncio.create_task(commit(out, b"2"))
            await one.send(b"1")
        with pytest.raises(LocalProtocolError, match="within its block"):
            await one.send(b"late")
        with pytest.raises(LocalProtocolError, match="used before"):
            async with one:
                pass
        await within(other)
        found = await first(pair.server)
        assert [texts(await found.receive_batch()) for _ in range(2)] == [[b"1", b"1"], [b"2"]]
        with pytest.raises(LocalProtocolError, match=r"channel\.transactions"):
            await found.receive()


async def test_a_close_within_a_transaction_is_refused_or_did_not_begin(tmp_path: Path) -> None:
    async with joined("tcp", tmp_path, transactions="connector") as pair:
        out = pair.client.channel(1)
        async with out.transaction() as one:
            await one.send(b"1")
            with pytest.raises(LocalProtocolError, match="leave its block before"):
                await out.close()
            with pytest.raises(TimeoutError, match="stays open"):
                await asyncio.create_task(out.close(timeout=0.01))
        async with out.transaction() as two:
            await two.send(b"2")
        with pytest.raises(TimeoutError, match="is closing"):
            await out.close(timeout=0.01)
        with pytest.raises(LocalProtocolError, match="is closing"):
            await commit(out, b"3")
        found = await first(pair.server)
        for text in (b"1", b"2"):
            async with await within(found.receive_batch()) as batch:
                assert texts(batch) == [text]
        assert await within(one.result)
        assert await within(two.result)
        await eventually(lambda: not pair.client.open_channels)  # the close has gone on
        assert await commit(out, b"3") is not None


async def test_a_transaction_above_the_window_is_refused_not_waited_for(tmp_path: Path) -> None:
    config = brisk(window_bytes=1000, window_messages=3)
    async with joined("tcp", tmp_path, config, transactions="connector") as pair:
        out = pair.client.channel(1)
        for sizes in ((500, 500), (600, 17), (1, 1, 1, 1)):
            with pytest.raises(LocalProtocolError, match="can never be committed"):
                async with out.transaction() as transaction:
                    for size in sizes:
                        await transaction.send(bytes(size))
        with pytest.raises(LocalProtocolError, match="3 messages that count for 1152 bytes"):
            async with out.transaction() as transaction:
                for _ in range(3):
                    await transaction.send(b"", b"", b"", b"")
        async with pair.client.channel(2).transaction() as other:
            await other.send(bytes(700))
            with pytest.raises(TimeoutError):  # both together are above the window
                async with out.transaction() as transaction:
                    await transaction.send(bytes(200), timeout=0.05)
            waiting = asyncio.create_task(commit(out, bytes(200)))
            await asyncio.sleep(0)
        await within(waiting)
        got = [await within((await first(pair.server)).receive_batch()) for _ in range(2)]
        assert sorted(len(texts(batch)[0]) for batch in got) == [200, 700]
        for batch in got:
            await batch.committed()
        assert await within(other.result)


@pytest.mark.requirement("RL-17")
@pytest.mark.parametrize("kind", ["commit", "rollback", "error"])
async def test_who_waits_to_send_when_the_block_is_left_sends_nothing(
    kind: str, tmp_path: Path
) -> None:
    """What a task sends later would be committed with the next transaction."""
    async with joined("tcp", tmp_path, brisk(window_bytes=1000), transactions="connector") as pair:
        out = pair.client.channel(1)
        before = await commit(out, bytes(900))
        with suppress(KeyError):
            async with out.transaction() as left:
                late = asyncio.create_task(left.send(b"late".ljust(400)))
                await asyncio.sleep(0)
                assert not late.done()
                if kind == "rollback":
                    left.rollback()
                elif kind == "error":
                    raise KeyError
        with pytest.raises(LocalProtocolError, match="was not sent"):
            await within(late)
        assert await left.result is (kind == "commit")  # of nothing
        found = await first(pair.server)
        await (await within(found.receive_batch())).committed()
        assert await within(before.result)
        after = await commit(out, b"after")
        batch = await within(found.receive_batch())
        assert texts(batch) == [b"after"]
        await batch.committed()
        assert await within(after.result)
        assert pair.client.snapshot().unacknowledged == 0


async def test_a_result_that_no_transaction_waits_for_is_no_error(tmp_path: Path) -> None:
    async with joined("tcp", tmp_path, transactions="connector") as pair:
        pair.client.link.send(1, b"by the core")
        pair.client.link.commit(1)
        pair.client.advance()
        found = await first(pair.server)
        await (await within(found.receive_batch())).committed()
        await eventually(lambda: not pair.client.link.unresolved())
        out = pair.client.channel(1)
        sent = await commit(out, b"x")
        pair.client.link.send(1, b"by the core")
        pair.client.link.commit(1)
        for _ in range(2):
            await (await within(found.receive_batch())).committed()
        assert await within(sent.result)
        await eventually(lambda: not pair.client.link.unresolved())
        assert pair.client.state == "up"


async def test_the_largest_transaction_of_many_small_messages_is_committed(tmp_path: Path) -> None:
    config = brisk(window_bytes=1 << 20, receive_bytes=1 << 20)
    count = (1 << 20) // message_cost(10, 1)
    async with joined("tcp", tmp_path, config, transactions="connector") as pair:
        sent = await commit(pair.client.channel(1), *[bytes(10)] * count)
        async with await within((await first(pair.server)).receive_batch()) as batch:
            assert len(batch.messages) == count
        assert await within(sent.result)
        with pytest.raises(LocalProtocolError, match="can never be committed"):
            await commit(pair.client.channel(1), *[bytes(10)] * (count + 1))


@pytest.mark.requirement("RL-R12")
@pytest.mark.parametrize("seed", range(3))
async def test_exactly_once_over_many_cuts(seed: int, tmp_path: Path) -> None:
    """A producer that sends again what was not committed, a consumer that refuses at times."""
    done: list[list[bytes]] = []
    up = Fate(limit=9000 + 611 * seed, end=End.RESET, chop=True)
    proxy = StreamRelay(up=up, down=Fate(limit=1500 + 97 * seed, end=End.RESET), seed=seed)

    async def consume(connection: relink.RelinkConnection) -> None:
        async for batch in (await first(connection)).transactions():
            async with batch:
                if (len(done) + int(texts(batch)[0])) % 7 == 3:
                    done.append([])
                    await batch.uncommitted()
                else:
                    done.append(texts(batch))

    async with joined("tcp", tmp_path, transactions="connector", proxy=proxy) as pair:
        consuming = asyncio.create_task(consume(pair.server))
        out = pair.client.channel(5)
        again = 0
        for number in range(60):
            words = [b"%d" % number, bytes(300 * (number % 5)), b"end"]
            while not await within((await commit(out, *words)).result):
                again += 1
        await within(out.close())
        await within(consuming)
        assert [int(batch[0]) for batch in done if batch] == list(range(60))
        assert all(batch[-1] == b"end" and len(batch) == 3 for batch in done if batch)
        assert again == len([batch for batch in done if not batch]) > 0
        assert pair.client.link.resumes >= 3


async def test_commits_during_a_cut_stay_apart(tmp_path: Path) -> None:
    proxy = StreamRelay()
    async with joined("tcp", tmp_path, transactions="connector", proxy=proxy) as pair:
        out = pair.client.channel(1)
        proxy.up = proxy.down = Fate(limit=0)
        proxy.link.cut()
        await eventually(lambda: pair.client.state == "resuming")
        sent = [await commit(out, b"%d" % number, b"x") for number in range(5)]
        proxy.up = proxy.down = Fate()
        for link in proxy.links:
            link.close()
        found = await first(pair.server)
        for number in range(5):
            batch = await within(found.receive_batch())
            assert texts(batch) == [b"%d" % number, b"x"]
            await batch.committed()
        assert all([await within(each.result) for each in sent])


async def test_what_is_unknown_when_the_link_is_lost(tmp_path: Path) -> None:
    async with joined("tcp", tmp_path, brisk(keep=0.2), transactions="connector") as pair:
        out = pair.client.channel(1)
        known, unknown = await commit(out, b"a"), await commit(out, b"b", b"c")
        found = await first(pair.server)
        await (await within(found.receive_batch())).committed()
        assert await within(known.result)
        taken = await within(found.receive_batch())
        async with pair.client.channel(2).transaction() as open_one:
            await open_one.send(b"never committed")
            pair.server.abandon("the test drops it")
            with pytest.raises(LinkLost) as caught:
                await within(unknown.result)
            error = caught.value
            assert error.why == "dropped"
            assert error.unconsumed == {1: [1, 2], 2: [0]}
            assert error.unconfirmed == {1: [1, 2]}
            assert "2 messages committed without a result on channel 1" in str(error)
            with pytest.raises(LinkLost):
                await taken.committed()
            with pytest.raises(LinkLost):
                await open_one.send(b"more")
            open_one.rollback()
        assert open_one.committed is False
        with pytest.raises(LinkLost):
            await commit(out, b"late")


async def test_a_handler_that_fails_answers_what_it_took(tmp_path: Path) -> None:
    taken = []

    async def handler(connection: relink.RelinkConnection) -> None:
        async for batch in (await first(connection)).transactions():
            taken.append(batch)  # a reference outlives the failure
            raise ValueError("a fault")

    address = "aqueduct+tcp://127.0.0.1:0"
    server = await relink.serve(handler, address, transactions="connector", config=BRISK)
    async with server:
        client = await relink.connect(server.address, transactions="connector", config=BRISK)
        sent = await commit(client.channel(1), b"x")
        assert await within(sent.result) is False
        with pytest.raises(LinkLost) as caught:
            await within(client.accept())
        assert caught.value.unconfirmed == {}


@pytest.mark.parametrize("closed", [False, True])
async def test_a_handler_that_returns_leaves_no_batch_without_an_answer(
    closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Not those that wait, and none that come after; also if the peer has closed the channel."""
    came = asyncio.Event()

    async def handler(connection: relink.RelinkConnection) -> None:
        found = await first(connection)
        async with await found.receive_batch():
            await came.wait()
        await asyncio.sleep(0)

    address = "aqueduct+tcp://127.0.0.1:0"
    config = brisk(unconfirmed_results=3)
    server = await relink.serve(handler, address, transactions="connector", config=config)
    async with server:
        peer = await ScriptedPeer.connect(server.address)
        await peer.greet(replace(Opening("", 4, 4), connector_transactions=True))
        commit_one = message(b"x") + operation(packets.COMMIT)
        peer.say(commit_one * 3, operation(packets.CLOSE) if closed else b"")
        await eventually(lambda: any(link.link.held_bytes for link in server.links))
        assert (await peer.packet()).type == packets.RECEIVED
        (link,) = server.links
        came.set()
        found = [await peer.packet() for _ in range(2)]
        assert [each.type for each in found] == [packets.COMMITTED, packets.UNCOMMITTED]
        assert [each.sequence for each in found] == [0, 2]
        if closed:
            assert (await peer.packet()).type == packets.CLOSED
        assert (await peer.packet()).type == packets.SHUTDOWN
        if closed:
            peer.say(general(packets.SHUTDOWN))
            await within(link.wait_closed())
        else:
            # The peer has read none of these results: a fourth one is not kept for it.
            peer.say(commit_one * 2)
            while (await peer.packet()).type != packets.UNCOMMITTED:
                pass
            assert link.state == "up"
            assert "Fatal error" not in caplog.text
        assert not isinstance(link.error, LinkLost)
        peer.close()
        link.abandon("the test is over")


async def test_a_batch_that_came_after_the_close_is_uncommitted(tmp_path: Path) -> None:
    async with joined("tcp", tmp_path, transactions="connector") as pair:
        out = pair.client.channel(1)
        sent = [await commit(out, b"%d" % number) for number in range(3)]
        found = await first(pair.server)
        taken = await within(found.receive_batch())
        closing = asyncio.create_task(pair.server.close())
        await asyncio.sleep(0)
        late = await commit(out, b"late")
        await taken.committed()
        results = [await within(each.result) for each in (*sent, late)]
        assert results == [True, False, False, False]
        await within(pair.client.close())
        await within(closing)


async def test_a_block_that_fails_answers_what_it_took(tmp_path: Path) -> None:
    async with joined("tcp", tmp_path, transactions="connector") as pair:
        sent = await commit(pair.client.channel(1), b"x")
        with pytest.raises(KeyError):
            async with pair.server as server:
                taken = await (await first(server)).receive_batch()
                raise KeyError
        assert taken.answer is False
        assert await within(sent.result) is False
