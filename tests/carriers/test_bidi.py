"""What ``aqueduct.carriers.contract`` promises of bidirectional streams, kept by every carrier."""

from __future__ import annotations

import dataclasses
import random

import pytest

from aqueduct.carriers.contract import BIDI
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import LocalProtocolError
from tests.carriers.users import KINDS, Pair, Recorder, is_lossy, linked

pytestmark = pytest.mark.parametrize("kind", KINDS)

KiB = 1 << 10
MiB = 1 << 20
WINDOW = DEFAULT.flow.initial_window


def mine(index: int) -> int:
    """The number of a stream that this side opened."""
    return BIDI | index << 1


def theirs(index: int) -> int:
    """The number that the other side has for it."""
    return BIDI | index << 1 | 1


def slots(count: int) -> Config:
    """So many bidirectional streams at once."""
    return dataclasses.replace(
        DEFAULT, limits=dataclasses.replace(DEFAULT.limits, channels=count - 1)
    )


def ends(pair: Pair) -> tuple[tuple[Recorder, Recorder], ...]:
    """Each side as the one that opens, with the other one."""
    return (pair.client, pair.server), (pair.server, pair.client)


def seen(user: Recorder, number: int) -> bytes:
    """What has come of a stream."""
    return bytes(user.data.get(number, b""))


def got(user: Recorder, number: int) -> int:
    """Bytes that have come of a stream."""
    return len(user.data.get(number, b""))


async def begun(pair: Pair) -> None:
    for user in (pair.client, pair.server):
        await user.until(lambda: user.begun)  # noqa: B023


async def beat(pair: Pair, count: int = 3) -> None:
    """Pings both ways, one after the other: time for others to misbehave."""
    for _ in range(count):
        for user in (pair.client, pair.server):
            before = user.pongs
            user.carrier.ping()
            user.carrier.flush()
            await user.until(lambda: user.pongs > before)  # noqa: B023


async def test_properties_after_connected(kind: str) -> None:
    async with linked(kind, slots(5), bidi=True) as pair:
        await begun(pair)
        for user in (pair.client, pair.server):
            assert user.carrier.bidi is True
            assert user.carrier.bidi_openable == 5
            assert user.carrier.openable == DEFAULT.flow.streams


async def test_each_side_opens_and_both_write(kind: str) -> None:
    """Both directions at once, of streams of both sides, beside unidirectional ones."""
    size = 100 * KiB if is_lossy(kind) else MiB
    async with linked(kind, bidi=True) as pair:
        await begun(pair)
        data = {
            user: {
                n: random.Random(f"{user.carrier.is_client} {n}").randbytes(size) for n in range(3)
            }
            for user in (pair.client, pair.server)
        }
        for user in (pair.client, pair.server):
            user.carrier.write(0, [data[user][2]], True)
            user.carrier.write(mine(0), [data[user][0][:7], data[user][0][7:]], False)
            user.carrier.write(mine(0), [], True)
            user.carrier.flush()
        for user in (pair.client, pair.server):
            await user.until(lambda: theirs(0) in user.data)  # noqa: B023
            user.carrier.write(theirs(0), [data[user][1]], True)
            user.carrier.flush()
        for user, other in ends(pair):
            await user.until_ended(0, mine(0), theirs(0))
            assert user.data[0] == data[other][2]
            assert user.data[theirs(0)] == data[other][0]
            assert user.data[mine(0)] == data[other][1]
            sizes = {0: size, mine(0): size, theirs(0): size}
            await user.until(lambda: user.written_by == sizes, "written")  # noqa: B023
            assert not user.resets
            assert not user.stops


async def test_an_answer_to_a_stream_that_has_no_bytes_yet(kind: str) -> None:
    async with linked(kind, bidi=True) as pair:
        await begun(pair)
        pair.client.carrier.write(mine(0), [], False)
        pair.client.send(mine(1), b"second")
        await pair.server.until(lambda: seen(pair.server, theirs(1)) == b"second")
        pair.server.send(theirs(0), b"answer", fin=True)
        await pair.client.until_ended(mine(0))
        assert pair.client.data == {mine(0): b"answer"}
        pair.client.send(mine(0), b"late", fin=True)
        await pair.server.until_ended(theirs(0))
        assert pair.server.data[theirs(0)] == b"late"


async def test_an_end_leaves_the_other_direction(kind: str) -> None:
    async with linked(kind, bidi=True) as pair:
        await begun(pair)
        for user, other in ends(pair):
            user.send(mine(0), b"question", fin=True)
            await other.until_ended(theirs(0))
            with pytest.raises(LocalProtocolError, match="ended"):
                user.carrier.write(mine(0), [b"more"], False)
            for piece in (b"an ", b"answer"):
                other.send(theirs(0), piece)
            await user.until(lambda: seen(user, mine(0)) == b"an answer")  # noqa: B023
            other.send(theirs(0), fin=True)
            await user.until_ended(mine(0))
            with pytest.raises(LocalProtocolError, match="ended"):
                other.carrier.write(theirs(0), [b"more"], False)
            assert bytes(other.data[theirs(0)]) == b"question"


async def test_a_stream_of_ends_alone(kind: str) -> None:
    async with linked(kind, bidi=True) as pair:
        await begun(pair)
        pair.client.send(mine(0), fin=True)
        await pair.server.until_ended(theirs(0))
        pair.server.send(theirs(0), fin=True)
        await pair.client.until_ended(mine(0))
        assert pair.server.data == {theirs(0): b""}
        assert pair.client.data == {mine(0): b""}


async def test_a_reset_leaves_the_other_direction(kind: str) -> None:
    async with linked(kind, bidi=True) as pair:
        await begun(pair)
        for user, other in ends(pair):
            user.send(mine(0), b"begun")
            await other.until(lambda: seen(other, theirs(0)) == b"begun")  # noqa: B023
            user.carrier.reset(mine(0), 4321)
            user.carrier.reset(mine(0), 1)  # without effect
            user.carrier.flush()
            await other.until(lambda: other.resets == {theirs(0): 4321})  # noqa: B023
            with pytest.raises(LocalProtocolError, match="ended"):
                user.carrier.write(mine(0), [b"more"], False)
            other.send(theirs(0), b"answer", fin=True)
            await user.until_ended(mine(0))
            assert user.data[mine(0)] == b"answer"
            # And the direction of who did not open it.
            user.send(mine(1), b"question")
            await other.until(lambda: theirs(1) in other.data)  # noqa: B023
            other.carrier.reset(theirs(1), 7)
            other.carrier.flush()
            await user.until(lambda: user.resets == {mine(1): 7})  # noqa: B023
            user.send(mine(1), b" goes on", fin=True)
            await other.until_ended(theirs(1))
            assert other.data[theirs(1)] == b"question goes on"
            assert not user.stops
            assert not other.stops
            user.resets.clear()
            other.resets.clear()


async def test_a_reset_of_a_stream_without_bytes(kind: str) -> None:
    async with linked(kind, bidi=True) as pair:
        await begun(pair)
        pair.client.carrier.write(mine(0), [], False)
        pair.client.carrier.reset(mine(0), 3)
        pair.client.carrier.flush()
        await pair.server.until(lambda: pair.server.resets == {theirs(0): 3})
        pair.server.send(theirs(0), b"answer", fin=True)
        await pair.client.until_ended(mine(0))


async def test_a_stop_leaves_the_other_direction(kind: str) -> None:
    async with linked(kind, bidi=True, server_window=None, window=None) as pair:
        await begun(pair)
        for user, other in ends(pair):
            user.send(mine(0), bytes(4 * WINDOW))
            await other.until(lambda: other.total == WINDOW)  # noqa: B023
            other.carrier.stop(theirs(0), 99)
            other.carrier.flush()
            await user.until(lambda: user.stops == {mine(0): 99})  # noqa: B023
            await other.until(lambda: other.resets == {theirs(0): 99})  # noqa: B023
            user.carrier.write(mine(0), [b"late"], False)  # crossed the stop: without effect
            other.send(theirs(0), b"answer", fin=True)
            await user.until_ended(mine(0))
            assert user.written_by.get(mine(0), 0) <= WINDOW
            # And of what the other one writes.
            user.send(mine(1), b"question")
            await other.until(lambda: theirs(1) in other.data)  # noqa: B023
            other.send(theirs(1), b"a part")
            await user.until(lambda: mine(1) in user.data)  # noqa: B023
            user.carrier.stop(mine(1), 5)
            user.carrier.flush()
            await other.until(lambda: other.stops == {theirs(1): 5})  # noqa: B023
            await user.until(lambda: user.resets == {mine(1): 5})  # noqa: B023
            other.carrier.write(theirs(1), [b"late"], False)
            user.send(mine(1), b" goes on", fin=True)
            await other.until_ended(theirs(1))
            assert other.data[theirs(1)] == b"question goes on"
            for each in (user, other):
                each.data.clear()
                each.resets.clear()
                each.stops.clear()
                each.ended.clear()


async def test_a_stop_is_the_first_that_is_heard(kind: str) -> None:
    async with linked(kind, bidi=True) as pair:
        await begun(pair)
        pair.client.carrier.write(mine(0), [], False)
        pair.client.carrier.stop(mine(0), 8)
        pair.client.carrier.flush()
        await pair.server.until(lambda: pair.server.stops == {theirs(0): 8})
        await pair.client.until(lambda: pair.client.resets == {mine(0): 8})
        pair.server.carrier.write(theirs(0), [b"late"], False)
        pair.client.send(mine(0), b"one way", fin=True)
        await pair.server.until_ended(theirs(0))


async def test_a_stop_of_an_ended_direction_does_nothing(kind: str) -> None:
    async with linked(kind, bidi=True) as pair:
        await begun(pair)
        pair.client.send(mine(0), b"all", fin=True)
        await pair.server.until_ended(theirs(0))
        pair.server.carrier.stop(theirs(0), 5)
        pair.server.carrier.credit(theirs(0), 1 << 30)
        pair.server.carrier.flush()
        await beat(pair)
        assert not pair.client.stops
        assert not pair.server.resets


async def test_credit_alone_lets_the_peer_send(kind: str) -> None:
    async with linked(kind, bidi=True, server_window=None, window=None) as pair:
        await begun(pair)
        data = random.Random(1).randbytes(WINDOW * 3)
        for user, other in ends(pair):
            user.send(mine(0), data, fin=True)
            await other.until(lambda: theirs(0) in other.data)  # noqa: B023
            other.send(theirs(0), data, fin=True)
            for reader, number in ((other, theirs(0)), (user, mine(0))):
                await reader.until(lambda: got(reader, number) == WINDOW)  # noqa: B023
            await beat(pair)
            for reader, number in ((other, theirs(0)), (user, mine(0))):
                assert got(reader, number) == WINDOW
                for limit in (WINDOW + 1, WINDOW, WINDOW + 5000, 2 * WINDOW):
                    reader.credit(number, limit)
                    reader.carrier.flush()
                    allowed = reader.limits[number]
                    await reader.until(lambda: got(reader, number) == allowed)  # noqa: B023
                await beat(pair, 1)
                assert got(reader, number) == 2 * WINDOW
                reader.credit(number, 100 * WINDOW)
                reader.carrier.flush()
                await reader.until_ended(number)
                assert reader.data[number] == data


async def test_streams_without_credit_hold_up_no_others(kind: str) -> None:
    count = 12 if is_lossy(kind) else 150
    async with linked(kind, bidi=True, server_window=None) as pair:
        await begun(pair)
        for index in range(count):
            pair.client.carrier.write(mine(index), [bytes(2 * WINDOW)], False)
        pair.client.carrier.flush()
        await pair.server.until(lambda: pair.server.total == count * WINDOW, "full windows")
        pair.client.send(0, b"small", fin=True)
        pair.client.send(mine(count), b"small", fin=True)
        await pair.server.until_ended(0, theirs(count))


async def test_a_thousand_at_once(kind: str) -> None:
    count = 100 if is_lossy(kind) else 1000
    async with linked(kind, bidi=True) as pair:
        await begun(pair)
        for user, _ in ends(pair):
            for index in range(count):
                user.carrier.write(mine(index), [b"a%d" % index], False)
            user.carrier.flush()
        opened = {theirs(index) for index in range(count)}
        for user, _ in ends(pair):
            await user.until(lambda: opened <= user.data.keys())  # noqa: B023
            for index in range(count):
                user.carrier.write(theirs(index), [b"c%d" % index], True)
                user.carrier.write(mine(index), [b"b"], True)
            user.carrier.flush()
        for user, _ in ends(pair):
            await user.until(lambda: len(user.ended) == 2 * count)  # noqa: B023
            assert user.data == {theirs(n): b"a%db" % n for n in range(count)} | {
                mine(n): b"c%d" % n for n in range(count)
            }


async def test_thousands_through_few_slots(kind: str) -> None:
    """Slots return when both directions have ended, in whatever way."""
    room, count = (16, 150) if is_lossy(kind) else (32, 2000)
    async with linked(kind, slots(room), bidi=True) as pair:
        client, server = pair.client, pair.server
        await begun(pair)
        opened = answered = 0

        def more() -> None:
            nonlocal opened
            while client.carrier.bidi_openable and opened < count:
                client.carrier.write(mine(opened), [b"%d" % opened], opened % 3 != 1)
                opened += 1

        def answer() -> None:
            nonlocal answered
            while theirs(answered) in server.data:
                number = theirs(answered)
                if answered % 3 == 1:  # it is still open
                    server.carrier.stop(number, 6)
                if answered % 2:
                    server.carrier.reset(number, 4)
                else:
                    server.carrier.write(number, [b"answer"], True)
                answered += 1

        client.hooks.append(more)
        server.hooks.append(answer)
        more()
        assert opened == room
        client.carrier.flush()
        await client.until(lambda: len(client.ended) + len(client.resets) == count, "all answers")
        assert client.openings > 0
        # A carrier may wait until slots are needed.
        await client.until(lambda: client.carrier.bidi_openable >= room // 2, "slots came back")
        assert server.carrier.bidi_openable == room


async def test_a_slot_returns_when_both_directions_have_ended(kind: str) -> None:
    async with linked(kind, slots(4), bidi=True) as pair:
        client, server = pair.client, pair.server
        await begun(pair)
        for index in range(4):
            client.carrier.write(mine(index), [b"x"], True)
        client.carrier.flush()
        await server.until(lambda: len(server.ended) == 4)
        await beat(pair)
        assert client.carrier.bidi_openable == 0
        with pytest.raises(LocalProtocolError, match="no more streams"):
            client.carrier.write(mine(4), [b"x"], True)
        for index in range(4):
            server.carrier.write(theirs(index), [b"y"], True)
        server.carrier.flush()
        await client.until(lambda: client.carrier.bidi_openable >= 2, "slots")
        assert client.openings > 0
        # Those of unidirectional streams are others, and ``extra_streams`` is of those.
        assert client.carrier.openable == DEFAULT.flow.streams
        server.carrier.extra_streams(5)
        server.carrier.flush()
        for index in (4, 6):  # a carrier may wait until the slots are needed
            await client.until(lambda: client.carrier.bidi_openable >= 2, "more slots")
            client.carrier.write(mine(index), [b"x"], True)
            client.carrier.write(mine(index + 1), [b"x"], True)
            client.carrier.flush()
        await server.until(lambda: len(server.ended) == 8)
        await beat(pair)
        assert client.carrier.bidi_openable == 0


async def test_misuse_is_refused(kind: str) -> None:
    async with linked(kind, slots(3), bidi=True) as pair:
        carrier = pair.client.carrier
        await begun(pair)
        with pytest.raises(LocalProtocolError, match=f"next one to open is {mine(0)}"):
            carrier.write(mine(1), [b"x"], False)
        for number in (theirs(0), theirs(7)):
            with pytest.raises(LocalProtocolError, match="never opened"):
                carrier.write(number, [b"x"], False)
        for number in (mine(0), theirs(0)):
            with pytest.raises(LocalProtocolError, match="never opened"):
                carrier.reset(number, 1)
            with pytest.raises(LocalProtocolError, match="never opened"):
                carrier.stop(number, 1)
            with pytest.raises(LocalProtocolError, match="never opened"):
                carrier.credit(number, 1 << 20)
        pair.client.send(mine(0), b"x", fin=True)
        await pair.server.until_ended(theirs(0))
        with pytest.raises(LocalProtocolError, match="ended"):
            carrier.write(mine(0), [b"y"], False)


async def test_without_the_keyword_there_are_none(kind: str) -> None:
    async with linked(kind) as pair:
        await begun(pair)
        for user in (pair.client, pair.server):
            assert user.carrier.bidi is False
            assert user.carrier.bidi_openable == 0
            with pytest.raises(LocalProtocolError, match="no bidirectional streams"):
                user.carrier.write(mine(0), [b"x"], False)
            for number in (mine(0), theirs(0)):
                with pytest.raises(LocalProtocolError, match="never opened"):
                    user.carrier.stop(number, 1)
                with pytest.raises(LocalProtocolError, match="never opened"):
                    user.carrier.reset(number, 1)


async def test_a_close_with_linger_delivers_everything(kind: str) -> None:
    size = 100 * KiB if is_lossy(kind) else MiB
    async with linked(kind, bidi=True) as pair:
        client, server = pair.client, pair.server
        await begun(pair)
        data = random.Random(3).randbytes(size)
        client.send(mine(0), b"question")
        await server.until(lambda: theirs(0) in server.data)
        server.carrier.write(theirs(0), [data], True)
        server.carrier.write(mine(0), [data], False)
        server.carrier.close(17, "enough", linger=30)
        await client.until(lambda: client.lost, "the end")
        await server.until(lambda: server.lost, "the end")
        assert client.lost[0].code == server.lost[0].code == 17, client.lost
        assert client.data == {mine(0): data, theirs(0): data}
        assert client.ended == {mine(0)}
        for user in (client, server):
            for number in (mine(0), theirs(0), mine(9)):
                user.carrier.write(number, [b"x"], True)
                user.carrier.reset(number, 1)
                user.carrier.stop(number, 1)
                user.carrier.credit(number, 1)
            assert user.carrier.bidi_openable == 0


async def test_a_connection_that_is_lost(kind: str) -> None:
    async with linked(kind, bidi=True) as pair:
        client, server = pair.client, pair.server
        await begun(pair)
        for user, other in ends(pair):
            user.send(mine(0), b"begun")
            await other.until(lambda: theirs(0) in other.data)  # noqa: B023
        client.carrier.write(mine(1), [bytes(8 * WINDOW)], True)
        pair.cut()
        await client.until(lambda: client.lost)
        if not is_lossy(kind):  # of a datagram that is lost nobody hears
            await server.until(lambda: server.lost)
        for number in (mine(0), mine(1), theirs(0), mine(2)):
            client.carrier.write(number, [b"x"], False)
            client.carrier.reset(number, 1)
            client.carrier.stop(number, 1)
        assert client.carrier.bidi_openable == 0
        assert not client.ended
