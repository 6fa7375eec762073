"""Each promise of ``aqueduct.carriers.contract``, kept by every carrier."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from aqueduct.config import DEFAULT, Config
from aqueduct.errors import LocalProtocolError
from tests.carriers.users import KINDS, Pair, is_lossy, linked

pytestmark = pytest.mark.parametrize("kind", KINDS)

KiB = 1 << 10
MiB = 1 << 20
WINDOW = DEFAULT.flow.initial_window


def flow(**changes: object) -> Config:
    changed = dataclasses.replace(DEFAULT.flow, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(DEFAULT, flow=changed)


async def round_trips(pair: Pair, stream: int, count: int = 3) -> int:
    """Small messages on new streams, one after the other: time for others to misbehave."""
    for number in range(stream, stream + count):
        pair.client.send(number, b"tick", fin=True)
        await pair.server.until_ended(number)
    return stream + count


async def test_properties_after_connected(kind: str) -> None:
    async with linked(kind) as pair:
        await pair.client.until(lambda: pair.client.begun)
        await pair.server.until(lambda: pair.server.begun)
        for user, client in ((pair.client, True), (pair.server, False)):
            carrier = user.carrier
            assert carrier.is_client is client
            assert carrier.peer and carrier.local and carrier.peer != carrier.local
            assert carrier.openable == DEFAULT.flow.streams
            assert carrier.rtt >= 0.0
            assert all(
                isinstance(value, int | float | str) for value in carrier.snapshot().values()
            )


async def test_a_second_user_is_refused(kind: str) -> None:
    async with linked(kind) as pair:
        with pytest.raises(LocalProtocolError):
            pair.client.carrier.attach(pair.server)


async def test_bytes_arrive_in_order_and_written_counts_them(kind: str) -> None:
    size = 300 * KiB if is_lossy(kind) else 4 * MiB
    sent = {n: random.Random(n).randbytes(size + n) for n in range(3)}
    async with linked(kind) as pair:
        await pair.client.until(lambda: pair.client.begun)
        await pair.server.until(lambda: pair.server.begun)
        for user in (pair.client, pair.server):
            for number, data in sent.items():
                cuts = [0, 1, 2, 1500, 70_000, 70_001, len(data)]
                buffers = [data[a:b] for a, b in itertools.pairwise(cuts)]
                user.carrier.write(number, buffers[:3], False)
                user.carrier.write(number, [memoryview(b) for b in buffers[3:]], False)
                user.carrier.write(number, [], True)
            user.carrier.flush()
        for user in (pair.client, pair.server):
            await user.until_ended(*sent)
            sizes = {number: len(data) for number, data in sent.items()}
            await user.until(lambda: user.written_by == sizes, "written")  # noqa: B023
            assert user.data == sent


async def test_the_end_of_an_empty_stream(kind: str) -> None:
    async with linked(kind) as pair:
        await pair.client.until(lambda: pair.client.begun)
        pair.client.send(0, fin=True)
        await pair.server.until(lambda: pair.server.ended == {0})
        assert pair.server.data == {0: b""}


async def test_credit_alone_lets_the_peer_send(kind: str) -> None:
    async with linked(kind, server_window=None) as pair:
        await pair.client.until(lambda: pair.client.begun)
        data = random.Random(1).randbytes(WINDOW * 6)
        pair.client.send(0, data, fin=True)
        await pair.server.until(lambda: pair.server.total == WINDOW, "the first window")
        following = await round_trips(pair, 1)
        assert len(pair.server.data[0]) == WINDOW  # the Recorder saw no byte too many either
        for limit in (WINDOW + 1, WINDOW, WINDOW + 5000, 4 * WINDOW):
            pair.server.credit(0, limit)
            pair.server.carrier.flush()
            allowed = pair.server.limits[0]
            await pair.server.until(lambda: len(pair.server.data[0]) == allowed)  # noqa: B023
        await round_trips(pair, following)
        assert len(pair.server.data[0]) == 4 * WINDOW
        pair.server.credit(0, 100 * WINDOW)
        pair.server.carrier.flush()
        await pair.server.until(lambda: 0 in pair.server.ended)
        assert pair.server.data[0] == data


async def test_a_limit_at_the_very_end_lets_the_end_through(kind: str) -> None:
    async with linked(kind, server_window=None) as pair:
        await pair.client.until(lambda: pair.client.begun)
        pair.client.send(0, bytes(WINDOW))
        await pair.server.until(lambda: pair.server.total == WINDOW)
        pair.client.send(0, fin=True)
        await pair.server.until(lambda: pair.server.ended == {0})


async def test_blocked_uploads_never_hold_up_other_streams(kind: str) -> None:
    """The connection-wide limit never binds, however many streams are full and not credited."""
    count = 12 if is_lossy(kind) else 150
    async with linked(kind, server_window=None) as pair:
        await pair.client.until(lambda: pair.client.begun)
        for number in range(count):
            pair.client.carrier.write(number, [bytes(2 * WINDOW)], False)
        pair.client.carrier.flush()
        await pair.server.until(lambda: pair.server.total == count * WINDOW, "full windows")
        await round_trips(pair, count, 5)
        assert pair.server.total == count * WINDOW + 5 * 4


async def test_a_running_upload_delays_small_messages_by_little(kind: str) -> None:
    """What is queued behind a big upload passes it: counted in bytes, not in time."""
    big = 5 * MiB if is_lossy(kind) else 24 * MiB
    async with linked(kind, server_window=64 * MiB) as pair:
        await pair.client.until(lambda: pair.client.begun)
        overtaken: list[int] = []
        pair.client.send(0, bytes(big), fin=True)
        await pair.server.until(lambda: pair.server.total > 0)
        number = 1
        while 0 not in pair.server.ended and number <= 5:
            before = len(pair.server.data[0])
            pair.client.send(number, b"small", fin=True)
            await pair.server.until_ended(number)
            overtaken.append(len(pair.server.data[0]) - before)
            number += 1
        await pair.server.until(lambda: 0 in pair.server.ended)
        # In flight at most Quic.transport_buffer is ahead of it, and what a busy loop let in.
        assert min(overtaken) <= DEFAULT.quic.transport_buffer + MiB


async def test_thousands_of_streams_through_few_slots(kind: str) -> None:
    slots, count = (16, 200) if is_lossy(kind) else (64, 3000)
    async with linked(kind, flow(streams=slots)) as pair:
        client, server = pair.client, pair.server
        await client.until(lambda: client.begun)
        opened = 0

        def more() -> None:
            nonlocal opened
            while client.carrier.openable and opened < count:
                client.carrier.write(opened, [b"stream %d" % opened], True)
                opened += 1

        client.hooks.append(more)
        more()
        assert opened == slots
        client.carrier.flush()
        await server.until(lambda: len(server.ended) == count, "all streams")
        assert server.data == {n: b"stream %d" % n for n in range(count)}
        await client.until(lambda: len(client.written_by) == count, "all written")
        assert client.openings > 0
        await client.until(lambda: client.carrier.openable >= slots // 2, "slots came back")


async def test_a_thousand_streams_at_once(kind: str) -> None:
    count = 100 if is_lossy(kind) else DEFAULT.flow.streams
    async with linked(kind) as pair:
        await pair.client.until(lambda: pair.client.begun)
        for number in range(count):
            pair.client.carrier.write(number, [b"a%d" % number], False)
        pair.client.carrier.flush()
        await pair.server.until(lambda: len(pair.server.data) == count)
        for number in range(count):
            pair.client.carrier.write(number, [b"b"], True)
        pair.client.carrier.flush()
        await pair.server.until(lambda: len(pair.server.ended) == count)
        assert pair.server.data == {n: b"a%db" % n for n in range(count)}


async def test_slots_are_given_and_kept_back(kind: str) -> None:
    async with linked(kind, flow(streams=8)) as pair:
        client, server = pair.client, pair.server
        await client.until(lambda: client.begun)
        await server.until(lambda: server.begun)
        server.carrier.extra_streams(-8)
        server.carrier.flush()
        for number in range(8):
            client.carrier.write(number, [b"x"], True)
        client.carrier.flush()
        await server.until(lambda: len(server.ended) == 8)
        client.carrier.ping()
        client.carrier.flush()
        await client.until(lambda: client.pongs == 1)
        assert client.carrier.openable == 0
        server.carrier.extra_streams(-5)
        server.carrier.flush()
        await client.until(lambda: client.carrier.openable == 3, "three slots")
        server.carrier.extra_streams(0)
        server.carrier.flush()
        await client.until(lambda: client.carrier.openable == 8, "all slots")
        server.carrier.extra_streams(3)
        server.carrier.flush()
        for number in range(8, 14):  # a carrier may wait until the slots are needed
            client.carrier.write(number, [b"x"], False)
        client.carrier.flush()
        await client.until(lambda: client.carrier.openable == 5, "three more")
        server.carrier.extra_streams(0)  # what was given stays
        for number in range(14, 19):
            client.carrier.write(number, [b"x"], True)
        for number in range(8, 14):
            client.carrier.write(number, [b"y"], True)
        client.carrier.flush()
        await server.until(lambda: len(server.ended) == 19)
        await client.until(lambda: client.carrier.openable == 8, "the budget again")


async def test_misuse_is_refused(kind: str) -> None:
    async with linked(kind, flow(streams=8)) as pair:
        carrier = pair.client.carrier
        await pair.client.until(lambda: pair.client.begun)
        with pytest.raises(LocalProtocolError, match="next one to open is 0"):
            carrier.write(1, [b"x"], False)
        with pytest.raises(LocalProtocolError, match="never opened"):
            carrier.reset(0, 1)
        with pytest.raises(LocalProtocolError, match="never opened"):
            carrier.stop(0, 1)
        with pytest.raises(LocalProtocolError, match="never opened"):
            carrier.credit(0, 1 << 20)
        pair.client.send(0, b"x", fin=True)
        with pytest.raises(LocalProtocolError, match="ended"):
            carrier.write(0, [b"y"], False)
        await pair.client.until(lambda: pair.client.written_by == {0: 1})
        with pytest.raises(LocalProtocolError, match="ended"):
            carrier.write(0, [b"y"], False)
        carrier.write(1, [b"x"], False)
        carrier.reset(1, 7)
        with pytest.raises(LocalProtocolError, match="ended"):
            carrier.write(1, [b"y"], False)
        for number in range(2, 2 + carrier.openable):
            carrier.write(number, [b"x"], True)
        assert carrier.openable == 0
        with pytest.raises(LocalProtocolError, match="no more streams"):
            carrier.write(number + 1, [b"x"], True)
        carrier.flush()
        await pair.server.until(lambda: len(pair.server.ended) + len(pair.server.resets) == 8)


async def test_a_reset_drops_what_is_queued_and_frees_the_slot(kind: str) -> None:
    async with linked(kind, flow(streams=8), server_window=None) as pair:
        client, server = pair.client, pair.server
        await client.until(lambda: client.begun)
        client.send(0, bytes(4 * WINDOW))
        await server.until(lambda: server.total == WINDOW)
        client.carrier.reset(0, 4321)
        client.carrier.reset(0, 1)  # without effect
        client.carrier.flush()
        await server.until(lambda: server.resets == {0: 4321})
        assert server.total == WINDOW
        assert client.written_by.get(0, 0) <= WINDOW
        for number in range(1, 8):
            client.carrier.write(number, [b"x"], True)
        client.carrier.flush()
        await server.until(lambda: len(server.ended) == 7)
        await client.until(lambda: client.carrier.openable > 0, "the slot of the reset stream")
        server.carrier.stop(0, 1)  # all without effect: it ended
        server.carrier.credit(0, 1 << 30)
        client.carrier.reset(0, 1)
        client.carrier.reset(1, 1)
        client.carrier.flush()
        await client.until(lambda: client.carrier.openable >= 4, "most slots")
        await round_trips(pair, 8, 2)
        assert server.resets == {0: 4321}


async def test_a_reset_of_a_stream_without_bytes(kind: str) -> None:
    async with linked(kind) as pair:
        await pair.client.until(lambda: pair.client.begun)
        pair.client.carrier.write(0, [], False)
        pair.client.carrier.reset(0, 3)
        pair.client.carrier.flush()
        await pair.server.until(lambda: pair.server.resets == {0: 3})
        assert not pair.server.total


async def test_a_stop_ends_the_stream_on_both_sides(kind: str) -> None:
    async with linked(kind, server_window=None) as pair:
        client, server = pair.client, pair.server
        await client.until(lambda: client.begun)
        client.send(0, bytes(4 * WINDOW))
        client.send(1, b"other")
        await server.until(lambda: server.total == WINDOW + 5)
        server.carrier.stop(0, 99)
        server.carrier.flush()
        await client.until(lambda: client.stops == {0: 99})
        await server.until(lambda: server.resets == {0: 99})
        client.carrier.write(0, [b"late"], False)  # crossed the stop: without effect
        client.send(1, b" goes on", fin=True)
        await server.until(lambda: 1 in server.ended)
        assert server.data[1] == b"other goes on"
        assert client.written_by.get(0, 0) <= WINDOW


async def test_a_stop_of_an_ended_stream_does_nothing(kind: str) -> None:
    async with linked(kind) as pair:
        client, server = pair.client, pair.server
        await client.until(lambda: client.begun)
        client.send(0, b"all", fin=True)
        await server.until(lambda: 0 in server.ended)
        server.carrier.stop(0, 5)
        server.carrier.flush()
        await round_trips(pair, 1)
        assert not client.stops
        assert not server.resets


async def test_datagrams(kind: str) -> None:
    async with linked(kind) as pair:
        client, server = pair.client, pair.server
        await client.until(lambda: client.begun)
        await server.until(lambda: server.begun)
        limit = client.carrier.datagram_limit
        assert limit >= 1000
        assert not client.carrier.send_datagram(bytes(limit + 1))
        sent = [bytes([n]) * size for n, size in enumerate((limit, 0, 1, limit, limit - 1) * 4)]
        for data in sent:
            assert client.carrier.send_datagram(data)
            client.carrier.flush()
        if is_lossy(kind):
            await server.until(lambda: len(server.datagrams) > len(sent) // 2)
            assert set(server.datagrams) <= set(sent)
        else:
            await server.until(lambda: len(server.datagrams) == len(sent))
            assert server.datagrams == sent
        # A datagram of the largest size blocks nothing behind it.
        client.send(0, b"after", fin=True)
        await server.until(lambda: 0 in server.ended)


async def test_the_queue_of_datagrams_is_bounded(kind: str) -> None:
    async with linked(kind) as pair:
        await pair.client.until(lambda: pair.client.begun)
        taken = 0
        room = pair.client.carrier.datagram_room
        while pair.client.carrier.send_datagram(b"x" * 900):
            taken += 1
            assert taken < 10_000
            assert pair.client.carrier.datagram_room == room - taken
        assert taken == room > 0
        pair.client.carrier.flush()
        await pair.client.until(lambda: pair.client.carrier.datagram_room == room)
        assert pair.client.rooms > 0


async def test_a_ping_is_answered(kind: str) -> None:
    async with linked(kind) as pair:
        await pair.client.until(lambda: pair.client.begun)
        await pair.server.until(lambda: pair.server.begun)
        for user in (pair.client, pair.server):
            user.carrier.ping()
            user.carrier.flush()
        for user in (pair.client, pair.server):
            await user.until(lambda: user.pongs == 1)  # noqa: B023


async def test_a_close_with_linger_delivers_everything(kind: str) -> None:
    size = 200 * KiB if is_lossy(kind) else 3 * MiB
    async with linked(kind) as pair:
        client, server = pair.client, pair.server
        await client.until(lambda: client.begun)
        await server.until(lambda: server.begun)
        sent = [random.Random(n).randbytes(size) for n in range(3)]
        for number, data in enumerate(sent):
            server.carrier.write(number, [data], number != 1)
        server.carrier.close(17, "enough", linger=30)
        server.carrier.close(18, "too late", linger=0)
        await client.until(lambda: client.lost, "the end")
        await server.until(lambda: server.lost, "the end")
        assert [client.data[n] for n in range(3)] == sent
        assert client.ended == {0, 2}
        assert (client.lost[0].code, client.lost[0].reason, client.lost[0].remote) == (
            17,
            "enough",
            True,
        )
        assert (server.lost[0].code, server.lost[0].reason, server.lost[0].remote) == (
            17,
            "enough",
            False,
        )
        assert "enough" in str(client.lost[0])


async def test_a_close_while_nothing_can_leave_ends_with_the_linger(kind: str) -> None:
    async with linked(kind, server_window=None) as pair:
        client, server = pair.client, pair.server
        await client.until(lambda: client.begun)
        await server.until(lambda: server.begun)
        client.send(0, bytes(3 * WINDOW))
        await server.until(lambda: server.total == WINDOW)
        client.carrier.close(5, "", linger=0.2)
        await server.until(lambda: server.lost)
        await client.until(lambda: client.lost)
        assert server.total == WINDOW
        assert server.lost[0].code == client.lost[0].code == 5


async def test_a_close_at_once(kind: str) -> None:
    async with linked(kind) as pair:
        client, server = pair.client, pair.server
        await client.until(lambda: client.begun)
        await server.until(lambda: server.begun)
        await round_trips(pair, 0)
        # The server closes: who still sends hears of it again, so that loss does not matter.
        server.carrier.close(6, "über " + "é" * 4000)
        assert not server.lost  # never from within
        await server.until(lambda: server.lost)
        client.send(3, b"?")
        await client.until(lambda: client.lost)
        assert client.lost[0].code == 6
        assert client.lost[0].reason.startswith("über é")
        assert server.lost[0].remote is False
        for user in (client, server):
            user.carrier.write(50, [b"x"], True)
            user.carrier.reset(50, 1)
            user.carrier.stop(50, 1)
            user.carrier.credit(50, 1)
            user.carrier.ping()
            user.carrier.flush()
            user.carrier.close(1, "again")
            assert user.carrier.openable == 0
            assert user.carrier.send_datagram(b"x") is False


async def test_a_user_may_close_from_within_a_report(kind: str) -> None:
    async with linked(kind) as pair:
        client, server = pair.client, pair.server
        await client.until(lambda: client.begun)

        def close_when_seen() -> None:
            if server.data:
                server.carrier.close(3, "seen")

        server.hooks.append(close_when_seen)
        client.send(0, b"hello")
        await server.until(lambda: server.lost)
        client.send(0, b"?")
        await client.until(lambda: client.lost)
        assert client.lost[0].code == 3
