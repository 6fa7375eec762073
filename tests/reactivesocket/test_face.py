"""Two programs that request from each other: what each call gives, over every carrier."""

from __future__ import annotations

import asyncio
import gc
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from aqueduct.address import Address
from aqueduct.carriers.certificates import ClientTls
from aqueduct.carriers.stream.binding import bind
from aqueduct.config import Flow
from aqueduct.endpoint.accounts import process
from aqueduct.errors import (
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    Ended,
    LocalProtocolError,
    ReactiveError,
)
from aqueduct.protocol.reactivesocket.connection import ReactiveConnection
from aqueduct.reactivesocket import (
    ReactiveItem,
    ReactiveRequest,
    ReactiveSocketConnection,
    connect,
    serve,
)
from aqueduct.reactivesocket.face import ReactiveFace
from tests.carriers.certificates import Authority
from tests.reactivesocket.pairs import (
    BRISK,
    FAMILIES,
    Peer,
    answering,
    brisk,
    eventually,
    frame,
    frames,
    joined,
    serving,
    within,
)

MOST = (1 << 63) - 1


@pytest.mark.parametrize("family", FAMILIES)
async def test_each_side_asks_the_other(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path, setup=b"of the client") as pair:
        assert pair.client.setup == pair.server.setup == b"of the client"
        for side in (pair.client, pair.server):
            found = await within(side.request(b"echo hello"))
            assert found.data == b"hello"
            assert [each.data async for each in side.stream(b"count 40")] == [
                b"%d" % number for number in range(40)
            ]
            async with side.subscribe(b"ever 10", n=3) as items:
                for _ in range(20):
                    item = await within(items.receive())
                    assert item is not None
                    assert item.data == bytes(10)
            assert items.ended
        await eventually(lambda: not pair.server.snapshot().responding)


@pytest.mark.parametrize("family", FAMILIES)
async def test_large_data_come_whole(family: str, tmp_path: Path) -> None:
    config = brisk(frame_bytes=1 << 20)
    async with joined(family, tmp_path, config) as pair:
        size = 5 << 20
        found = await within(pair.client.request(b"large %d" % size))
        assert bytes(found.data) == bytes(range(256)) * (size // 256)
        sent = bytes(range(251)) * 4000
        found = await within(pair.server.request([b"echo ", sent[:1000], memoryview(sent)[1000:]]))
        assert found.data == sent


async def test_many_requests_at_once_get_their_own_answers() -> None:
    async with joined() as pair:
        found = await within(
            asyncio.gather(*(pair.client.request(b"echo %d" % number) for number in range(2000)))
        )
        assert [item.data for item in found] == [b"%d" % number for number in range(2000)]


async def test_a_request_without_an_answer_is_sent_alone() -> None:
    came: list[bytes] = []

    def responder(request: ReactiveRequest) -> None:
        assert request.kind == "fire"
        assert request.ended
        assert request.demand == 0
        assert not request.complete(b"nobody hears this")
        assert not request.fail("nor this")
        came.append(bytes(request.data))

    async with joined(responder=responder) as pair:
        await pair.client.fire(b"one")
        await pair.client.fire([b"t", b"wo"])
        await eventually(lambda: came == [b"one", b"two"])


async def test_a_plain_function_answers_by_on_change() -> None:
    steps: list[tuple[int, bool]] = []

    def responder(request: ReactiveRequest) -> None:
        left = [b"a", b"b", b"c"]

        def go_on() -> None:
            steps.append((request.demand, request.ended))
            while left and request.writable:
                assert request.send_nowait(left.pop(0))
            if not left:
                request.complete()

        request.on_change = go_on
        go_on()

    async with joined(responder=responder) as pair:
        stream = pair.client.stream(b"", n=1)
        assert [item.data async for item in stream] == [b"a", b"b", b"c"]
        assert steps[0] == (1, False)
        assert len(steps) >= 3


async def test_on_change_hears_of_a_cancel() -> None:
    requests: list[ReactiveRequest] = []
    heard: list[bool] = []

    def responder(request: ReactiveRequest) -> None:
        request.on_change = lambda: heard.append(request.ended)
        requests.append(request)

    async with joined(responder=responder) as pair:
        asking = asyncio.ensure_future(pair.client.request(b"x"))
        await eventually(lambda: requests)
        asking.cancel()
        await eventually(lambda: heard == [True])
        (request,) = requests
        assert not request.send_nowait(b"late")
        assert not request.complete(b"late")
        assert not request.writable
        with pytest.raises(Ended, match="the peer has cancelled it"):
            await request.send(b"late")


async def test_an_item_that_comes_too_late_says_what_has_ended_the_request() -> None:
    heard: list[str] = []

    async def responder(request: ReactiveRequest) -> None:
        if bytes(request.data) == b"fail":
            request.fail("no")
        elif request.kind != "fire":
            await request.send(b"first")
        with pytest.raises(Ended) as caught:
            await request.send(b"late")
        heard.append(str(caught.value))

    async with joined(responder=responder) as pair:
        await pair.client.fire(b"x")
        await within(pair.client.request(b"x"))
        with pytest.raises(ReactiveError):
            await within(pair.client.request(b"fail"))
        await eventually(lambda: len(heard) == 3)
    assert heard == [
        "request 1 takes no item: a fire is not answered",
        "request 3 takes no item: this side has completed it",
        "request 5 takes no item: this side has ended it with an ERROR",
    ]


async def test_an_item_for_a_request_that_was_ended_for_its_demand() -> None:
    requests: list[ReactiveRequest] = []
    async with serving(responder=requests.append) as server:
        peer = await Peer.connect(server, frame(frames.SETUP))
        peer.say(frame(frames.REQUEST_STREAM, 1, b"", n=1))
        await eventually(lambda: requests)
        peer.say(frame(frames.REQUEST_N, 1, n=0))
        assert "INVALID" in await peer.error(1)
        with pytest.raises(Ended, match=r"request 1 takes no item: .*REQUEST_N"):
            await requests[0].send(b"late")
        peer.close()


async def test_a_task_that_answers_is_cancelled_with_its_request() -> None:
    ended: list[BaseException] = []

    async def responder(request: ReactiveRequest) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            ended.append(error)
            raise

    async with joined(responder=responder) as pair:
        with pytest.raises(TimeoutError):
            await pair.client.request(b"x", timeout=0.05)
        await eventually(lambda: ended)
        asking = asyncio.ensure_future(pair.client.request(b"x"))
        await eventually(lambda: pair.server.snapshot().responding)
        await pair.client.close()
        with pytest.raises(ConnectionLost):
            await asking
        await eventually(lambda: len(ended) == 2)


async def test_a_responder_is_closed_that_never_began() -> None:
    """A request and its cancel come together: nothing warns of a coroutine nobody awaited."""
    began: list[bytes] = []

    async def responder(request: ReactiveRequest) -> None:
        began.append(bytes(request.data))
        if request.kind == "request":
            request.complete(b"x")

    async with serving(responder=responder) as server:
        peer = await Peer.connect(server, frame(frames.SETUP))
        peer.say(frame(frames.REQUEST_RESPONSE, 1, b"first") + frame(frames.REQUEST_N, 9, n=1))
        assert (await peer.read())[3] == b"x"
        (connection,) = server.connections
        connection.core.receive_data(frame(frames.REQUEST_RESPONSE, 3, b"second"), 0.0)
        connection.advance()
        connection.core.receive_data(frame(frames.CANCEL, 3), 0.0)
        connection.advance()
        await asyncio.sleep(0)
        peer.close()
    gc.collect()
    assert began == [b"first"]


@pytest.mark.parametrize("way", ["break", "aclose", "cancel", "drop"])
async def test_leaving_a_stream_cancels_it(way: str) -> None:
    async with joined() as pair:
        if way == "break":
            async for _ in pair.client.subscribe(b"ever 1"):
                break
        elif way == "aclose":
            stream = pair.client.subscribe(b"ever 1")
            await stream.receive()
            await stream.aclose()
        elif way == "cancel":
            stream = pair.client.subscribe(b"ever 1")
            await stream.receive()
            stream.cancel()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        else:
            stream = pair.client.subscribe(b"ever 1")
            await stream.receive()
            del stream
            gc.collect()
        await eventually(lambda: not pair.client.snapshot().requested)
        await eventually(lambda: not pair.server.snapshot().responding)
        assert (await within(pair.client.request(b"echo on"))).data == b"on"


async def test_reading_is_the_demand() -> None:
    requests: list[ReactiveRequest] = []
    async with joined(responder=requests.append) as pair:
        stream = pair.client.stream(b"", n=4)
        await asyncio.sleep(0.02)
        assert not requests  # nothing is asked before somebody reads
        reading = asyncio.ensure_future(stream.receive())
        await eventually(lambda: requests)
        (request,) = requests
        assert request.demand == 1
        with pytest.raises(LocalProtocolError, match="was not asked for an item"):
            request.send_nowait(b"0")
            request.send_nowait(b"1")
        assert await within(reading) is not None
        await eventually(lambda: request.demand == 4)
        for number in range(4):
            request.send_nowait(b"%d" % number)
        await eventually(lambda: stream.waiting == 4)
        await asyncio.sleep(0.02)
        assert request.demand == 0
        await stream.receive()
        await stream.receive()
        await eventually(lambda: request.demand == 2)


async def test_demand_follows_the_bytes_of_items() -> None:
    async with joined() as pair:
        stream = pair.client.subscribe(b"ever 100000", n=1000, bytes="500k")
        for _ in range(20):
            await within(stream.receive())
            assert stream.waiting <= 5
        await asyncio.sleep(0.05)
        assert stream.waiting <= 5


async def test_errors_say_who_and_what() -> None:
    async with joined() as pair:
        text = "answers with an error: APPLICATION_ERROR: no tea"
        with pytest.raises(ReactiveError, match=text) as found:
            await pair.client.request(b"fail no tea")
        assert (found.value.word, found.value.text) == ("APPLICATION_ERROR", "no tea")
        assert found.value.data == b"APPLICATION_ERROR: no tea"
        with pytest.raises(ReactiveError, match="the responder failed: ValueError"):
            await pair.client.request(b"raise secret")
        with pytest.raises(ReactiveError, match="the responder gave no answer"):
            await pair.client.request(b"nothing")
        with pytest.raises(ReactiveError, match="the subscription has ended"):
            async for _ in pair.client.subscribe(b"count 3"):
                pass
        with pytest.raises(ReactiveError, match="no tea"):
            await anext(pair.client.stream(b"fail no tea"))
        with pytest.raises(TimeoutError):
            await pair.client.request(b"wait", timeout="50ms")
        with pytest.raises(TimeoutError):
            await pair.client.stream(b"wait").receive(timeout=0.05)
        with pytest.raises(LocalProtocolError, match="a request is not fragmented"):
            await pair.client.request(bytes(17 << 20))
        with pytest.raises(ConfigError, match=r"request: data is 'text'; it must be a buffer"):
            await pair.client.request("text")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="n is 0; it must be above zero"):
            pair.client.stream(b"", n=0)


async def test_a_side_without_a_responder_refuses() -> None:
    async with joined(client_responder=None) as pair:
        with pytest.raises(ReactiveError, match="REJECTED: this side answers no requests"):
            await pair.server.request(b"echo x")


async def test_a_responder_that_raises_at_once() -> None:
    def responder(request: ReactiveRequest) -> None:
        raise RuntimeError("bad")

    async with joined(responder=responder) as pair:
        with pytest.raises(ReactiveError, match="APPLICATION_ERROR: the responder failed"):
            await pair.client.request(b"x")


async def test_a_responder_that_is_a_generator_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def generating(request: ReactiveRequest) -> AsyncIterator[bytes]:
        yield b"never"

    async with joined(responder=generating) as pair:  # type: ignore[arg-type]
        with pytest.raises(ReactiveError, match="the responder failed"):
            await pair.client.request(b"x", timeout=5)
    assert "must return a coroutine or None, not async_generator" in caplog.text


async def test_a_second_reader_is_refused() -> None:
    async with joined() as pair:
        stream = pair.client.stream(b"wait")
        first = asyncio.ensure_future(stream.receive())
        await eventually(lambda: pair.client.snapshot().requested)
        with pytest.raises(LocalProtocolError, match="read by another task already"):
            await stream.receive()
        first.cancel()


async def test_who_reads_a_stream_hears_of_its_cancel() -> None:
    async with joined() as pair:
        stream = pair.client.stream(b"wait")
        reading = asyncio.ensure_future(stream.receive())
        await eventually(lambda: pair.server.snapshot().responding)
        stream.cancel()
        assert await within(reading) is None


async def test_a_stream_that_could_not_begin_says_so_each_time() -> None:
    async with joined(config=brisk(streams=1)) as pair:
        large = pair.client.stream(bytes(17 << 20))
        for _ in range(2):
            with pytest.raises(LocalProtocolError, match=r"ReactiveSocket\.frame_bytes"):
                await within(large.receive())
        async with pair.client.stream(b"wait") as first:
            reading = asyncio.ensure_future(first.receive())
            await eventually(lambda: pair.client.snapshot().requested)
            second = pair.client.stream(b"count 1")
            with pytest.raises(LocalProtocolError, match=r"ReactiveSocket\.streams"):
                await second.receive()
        assert await within(reading) is None
        item = await within(second.receive())  # there is room now
        assert item is not None
        assert item.data == b"0"


async def test_a_stream_that_waits_for_room_to_begin() -> None:
    flow = Flow(channel_high_water=1 << 16, connection_high_water=1 << 16)
    async with joined(config=brisk(flow=flow)) as pair:
        await pair.client.fire(bytes(10 << 20))
        cancelled, shared = pair.client.stream(b"wait"), pair.client.stream(b"count 1")
        reading = [asyncio.ensure_future(each.receive()) for each in (cancelled, shared, shared)]
        await asyncio.sleep(0)
        assert not pair.client.snapshot().requested
        cancelled.cancel()
        assert await within(reading[0]) is None
        item = await within(reading[1])
        assert item is not None
        assert item.data == b"0"
        with pytest.raises(LocalProtocolError, match="read by another task already"):
            await within(reading[2])


async def test_what_answers_no_one_ends_with_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun: list[bytes] = []
    ended: list[bytes] = []
    done = asyncio.Event()

    async def responder(request: ReactiveRequest) -> None:
        begun.append(bytes(request.data))
        try:
            await asyncio.sleep(30)
        finally:
            if bytes(request.data) == b"stubborn":
                await done.wait()
            ended.append(bytes(request.data))

    gc.collect()  # what earlier tests left counts until it is collected
    before = process().receiving.used
    config = brisk(timing={"close_linger": 0.2})
    async with serving(responder=responder, config=config) as server:
        async with await connect(server.address) as client:
            await client.fire(b"one")
            await client.fire(b"two")
            await eventually(lambda: len(begun) == 2)
            assert process().receiving.used - before > 2 * 1024
        await eventually(lambda: sorted(ended) == [b"one", b"two"])
        await eventually(lambda: process().receiving.used == before)
        async with await connect(server.address) as client:
            await client.fire(b"stubborn")
            await eventually(lambda: len(begun) == 3)
            await within(server.close())
    assert "a task goes on after its server was closed" in caplog.text
    assert len(ended) == 2
    done.set()
    await eventually(lambda: len(ended) == 3)


async def test_a_close_waits_for_what_answered_a_connection_that_is_over() -> None:
    begun, stopping, done, ended = (asyncio.Event() for _ in range(4))

    async def responder(request: ReactiveRequest) -> None:
        begun.set()
        try:
            await asyncio.sleep(30)
        finally:
            stopping.set()
            await done.wait()
            ended.set()

    async with serving(responder=responder) as server:
        async with await connect(server.address) as client:
            await client.fire(b"x")
            await within(begun.wait())
        await within(stopping.wait())
        await eventually(lambda: not server.connections and not server.ending)
        asyncio.get_running_loop().call_later(0.05, done.set)
        await within(server.close())
        assert ended.is_set()


async def test_who_answers_may_close_the_connection() -> None:
    closed = asyncio.Event()

    async def responder(request: ReactiveRequest) -> None:
        await request.connection.close()
        closed.set()

    async with joined(responder=responder) as pair:
        await pair.client.fire(b"bye")
        await within(closed.wait())


def test_what_is_released_after_its_loop_does_no_harm() -> None:
    async def made() -> ReactiveFace:
        return ReactiveFace(ReactiveConnection(client=True), BRISK, lambda: None)

    loop = asyncio.new_event_loop()
    face = loop.run_until_complete(made())
    loop.close()
    face.give_back_request(0)
    assert face.unsettled


async def test_a_setup_is_looked_at() -> None:
    def authorize(connection: ReactiveSocketConnection) -> bool | str | None:
        return {b"good": None, b"well": True, b"bad": False}.get(connection.setup, "who are you?")

    async def later(connection: ReactiveSocketConnection) -> bool | str | None:
        await asyncio.sleep(0)
        return authorize(connection)

    for way in (authorize, later):
        async with serving(authorize_setup=way) as server:
            for setup in (b"good", b"well"):
                async with await connect(server.address, setup=setup) as client:
                    assert (await client.request(b"echo x")).data == b"x"
            for setup, text in ((b"bad", "the server does not take it"), (b"", "who are you?")):
                async with await connect(server.address, setup=setup) as client:
                    with pytest.raises(ConnectFailed, match=f"rejects the SETUP: .*{text}"):
                        await client.request(b"echo x")
            assert not server.connections
            assert not server.handshakes


async def test_a_setup_that_cannot_be_looked_at_is_rejected() -> None:
    def authorize(connection: ReactiveSocketConnection) -> bool:
        raise RuntimeError("the data base is away")

    async with (
        serving(authorize_setup=authorize) as server,
        await connect(server.address) as client,
    ):
        with pytest.raises(ConnectFailed, match="the server failed to look at the SETUP"):
            await client.request(b"echo x")


async def test_requests_before_the_setup_is_taken_wait() -> None:
    decided: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def authorize(connection: ReactiveSocketConnection) -> bool:
        return await decided

    async with (
        serving(authorize_setup=authorize) as server,
        await connect(server.address) as client,
    ):
        first = asyncio.ensure_future(client.request(b"echo a"))
        second = asyncio.ensure_future(client.request(b"echo b"))
        await client.fire(b"echo c")
        gone = asyncio.ensure_future(client.request(b"echo d"))
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.sleep(0.05)
        assert not first.done()
        decided.set_result(True)
        assert (await within(first)).data == b"a"
        assert (await within(second)).data == b"b"


async def test_what_comes_before_the_setup_is_taken_is_told_once_and_in_order() -> None:
    decided: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    came: list[bytes] = []

    async def authorize(connection: ReactiveSocketConnection) -> bool:
        return await decided

    def responder(request: ReactiveRequest) -> None:
        came.append(bytes(request.data))

    async with serving(authorize_setup=authorize, responder=responder) as server:
        peer = await Peer.connect(server, frame(frames.SETUP))
        peer.say(frame(frames.REQUEST_RESPONSE, 1, b"a") + frame(frames.REQUEST_FNF, 3, b"b"))
        peer.say(frame(frames.REQUEST_FNF, 5, b"c") + frame(frames.CANCEL, 1))
        peer.say(frame(frames.REQUEST_FNF, 7, b"d") + frame(frames.REQUEST_RESPONSE, 1, b"e"))
        await asyncio.sleep(0.05)
        assert not came
        decided.set_result(True)
        await eventually(lambda: came == [b"b", b"c", b"d", b"e"])
        peer.close()


async def test_a_responder_that_is_cancelled_by_others_answers() -> None:
    async def responder(request: ReactiveRequest) -> None:
        raise asyncio.CancelledError

    async with joined(responder=responder) as pair:
        with pytest.raises(ReactiveError, match="CANCELED: the responder was cancelled"):
            await pair.client.request(b"x")


async def test_close_ends_both_sides_and_tells_them() -> None:
    async with joined() as pair:
        asking = asyncio.ensure_future(pair.client.request(b"wait"))
        streaming = asyncio.ensure_future(anext(pair.server.subscribe(b"wait")))
        await eventually(lambda: pair.server.snapshot().responding)
        await eventually(lambda: pair.client.snapshot().responding)
        await pair.server.close()
        with pytest.raises(ReactiveError, match="CANCELED: this side closes the connection"):
            await within(asking)
        with pytest.raises(ConnectionLost, match="this side closes the connection"):
            await within(streaming)
        await within(pair.client.wait_closed())
        assert pair.client.closed
        with pytest.raises(ConnectionLost, match="closed the connection"):
            await pair.client.request(b"x")
        assert pair.client.error is not None
        assert pair.client.error.remote
        with pytest.raises(ConnectionLost, match="this side closes"):
            await pair.server.request(b"x")


async def test_a_close_takes_close_linger_in_all() -> None:
    loop = asyncio.get_running_loop()
    async with serving(config=brisk(timing={"close_linger": 0.3})) as server:
        peer = await Peer.connect(server, frame(frames.SETUP))
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        peer.say(frame(frames.REQUEST_SUB, 1, b"ever 100000", n=MOST))
        await eventually(lambda: server.connections)
        (connection,) = server.connections
        transport = connection._transport
        assert transport is not None
        await eventually(lambda: not transport.free)
        closing = asyncio.ensure_future(connection.close())
        await asyncio.sleep(0)
        latest = loop.time() + 0.3
        await within(closing)
        assert transport._linger is not None
        assert transport._linger.when() <= latest
        peer.close()


async def test_what_was_sent_arrives_before_the_close() -> None:
    came: list[int] = []

    def responder(request: ReactiveRequest) -> None:
        came.append(request.data.nbytes)

    async with joined(responder=responder) as pair:
        for _ in range(20):
            await pair.client.fire(bytes(1 << 20))
        await pair.client.close()
        await eventually(lambda: len(came) == 20)


async def test_the_memory_of_the_process_counts_what_is_in_use() -> None:
    receiving, sending = process().receiving, process().sending
    gc.collect()
    gc.collect()  # what earlier tests left counts until it is collected
    before = receiving.used, sending.used
    async with joined() as pair:
        item: ReactiveItem | None = await within(pair.client.request(b"large 1000000"))
        await eventually(lambda: receiving.used - before[0] >= 1_000_000)
        assert item is not None
        item.release()
        item.release()
        await eventually(lambda: receiving.used - before[0] < 10_000)
        item = await within(pair.client.request(b"large 1000000"))
        await eventually(lambda: receiving.used - before[0] >= 1_000_000)
        del item
        await eventually(lambda: receiving.used - before[0] < 10_000)
        kept = await within(pair.client.request(b"large 1000000"))
        await eventually(lambda: receiving.used - before[0] >= 1_000_000)
    assert receiving.used - before[0] >= 1_000_000  # the application has it after the close too
    del kept
    assert (receiving.used, sending.used) == before


async def test_a_stream_that_nobody_finishes_gives_its_memory_back() -> None:
    receiving = process().receiving
    gc.collect()
    gc.collect()  # what earlier tests left counts until it is collected
    before = receiving.used
    async with joined() as pair:
        streams = [pair.client.stream(b"count 16")]
        await streams[0].receive()
        await eventually(lambda: streams[0].ended)
        assert streams[0].waiting
        streams.clear()
        await eventually(lambda: receiving.used == before)


@pytest.mark.parametrize("way", ["take", "cancel", "drop"])
async def test_what_nobody_has_taken_counts_after_the_end(way: str) -> None:
    receiving = process().receiving
    gc.collect()
    gc.collect()  # what earlier tests left counts until it is collected
    before = receiving.used
    async with joined() as pair:
        streams = [pair.client.stream(b"ever 100000", n=5)]
        await within(streams[0].receive())
        await eventually(lambda: streams[0].waiting == 5)
    held = pair.client.snapshot().held_bytes
    assert receiving.used - before == held
    assert 600_000 <= held < 700_000  # the last one that was taken counts, too
    if way == "take":
        for left in range(5, 0, -1):
            item = await within(streams[0].receive())
            assert receiving.used - before == left * held // 6
        assert item is not None
        item.release()
    elif way == "cancel":
        streams[0].cancel()
    streams.clear()
    assert receiving.used == before
    assert not pair.client.snapshot().held_bytes


async def test_connections_count_in_the_process() -> None:
    before = process().connections
    async with joined():
        assert process().connections == before + 2
    assert process().connections == before


async def test_connections_that_are_being_made_count_in_the_limit() -> None:
    async with serving() as server:
        before = process().connections
        config = replace(BRISK, limits=replace(BRISK.limits, connections=before + 3))
        attempts = [connect(server.address, config=config) for _ in range(8)]
        found = await within(asyncio.gather(*attempts, return_exceptions=True))
        made = [each for each in found if isinstance(each, ReactiveSocketConnection)]
        refused = [str(each) for each in found if isinstance(each, ConnectFailed)]
        assert (len(made), len(refused)) == (3, 5)
        assert all("(Limits.connections)" in each for each in refused)
        for each in made:
            await each.close()
        await eventually(lambda: process().connections == before)
        with pytest.raises(ConnectFailed):
            await connect("reactivesocket+unix:///nobody/listens", config=config)
        assert process().connections == before


async def test_an_address_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="ReactiveSocket is spoken at reactivesocket"):
        await connect("aqueduct+tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"origin is for reactivesocket\+ws"):
        await connect("reactivesocket+tcp://127.0.0.1:1", origin="http://x")
    with pytest.raises(ConfigError, match="tls, with the certificate to show, is for"):
        await serve(None, "reactivesocket+tls://127.0.0.1:0")
    with pytest.raises(ConfigError, match="on_connection is 5; it must be a function, or None"):
        await serve(5, "reactivesocket+tcp://127.0.0.1:0")  # type: ignore[arg-type]
    with pytest.raises(ConnectFailed, match="connection refused"):
        await connect("reactivesocket+tcp://127.0.0.1:1", config=BRISK)
    with pytest.raises(ConnectFailed, match="No such file or directory"):
        await connect("reactivesocket+unix:///nowhere/at/all")


async def test_origins_where_no_web_page_connects() -> None:
    with pytest.raises(ConfigError, match="origins are of web pages"):
        await serve(None, "reactivesocket+tcp://127.0.0.1:0", origins=["https://example.org"])


@pytest.mark.parametrize("family", ["tls"])
async def test_a_server_shows_a_certificate(family: str, tmp_path: Path) -> None:
    async with serving(family, tmp_path) as server:
        where = server.address
        assert "fingerprint" in where.options
        async with await connect(where) as client:
            assert client.peer_identity is not None
            assert client.peer_identity.fingerprint == where.options["fingerprint"]
        plain = f"{where.scheme}://127.0.0.1:{where.port}"
        with pytest.raises(ConnectFailed, match="certificate"):
            await connect(plain)
        other = "sha256:" + "0" * 64
        with pytest.raises(ConnectFailed, match="the server's certificate is sha256"):
            await connect(f"{plain}?fingerprint={other}")
        async with await connect(f"{plain}?verify=off") as client:
            assert (await within(client.request(b"echo x"))).data == b"x"


async def test_who_is_at_the_other_end_of_a_unix_socket(tmp_path: Path) -> None:
    async with joined("unix", tmp_path) as pair:
        for side in (pair.client, pair.server):
            assert side.peer_credentials is not None
        assert not (await pair.client.request(b"echo ")).data


async def test_data_are_buffers_of_any_shape() -> None:
    numbers = array("i", range(2000))
    table = memoryview(bytes(range(24))).cast("B", (4, 6))
    async with joined() as pair:
        for sent in (numbers, memoryview(numbers), [numbers], (b"", numbers, bytearray(3)), table):
            parts = sent if isinstance(sent, list | tuple) else [sent]
            found = await within(pair.client.request([b"echo ", *parts]))
            assert bytes(found.data) == b"".join(bytes(memoryview(part)) for part in parts)
        with pytest.raises(LocalProtocolError, match="not contiguous"):
            await pair.client.request(memoryview(bytes(10))[::2])


async def test_it_listens_where_others_have_bound() -> None:
    (bound,) = await bind(Address.parse("reactivesocket+tcp://127.0.0.1:0"))
    async with (
        await serve(None, bound, responder=answering, config=BRISK) as server,
        await connect(server.address) as client,
    ):
        assert server.address == bound.address
        assert (await within(client.request(b"echo x"))).data == b"x"


@pytest.mark.parametrize(("scheme", "plain"), [("tls", "tcp"), ("wss", "ws")])
async def test_a_server_may_demand_certificates_of_clients(scheme: str, plain: str) -> None:
    us, them = Authority("us"), Authority("them")
    tls = replace(us.server("localhost", "127.0.0.1"), client_ca=them.pem)
    seen: list[str] = []

    def authorize(connection: ReactiveSocketConnection) -> None:
        assert connection.peer_identity is not None
        seen.append(connection.peer_identity.subject)

    server = await serve(
        None,
        f"reactivesocket+{scheme}://127.0.0.1:0",
        responder=answering,
        authorize_setup=authorize,
        tls=tls,
        config=BRISK,
    )
    async with server:
        async with await connect(server.address, tls=them.client("one", ca=us.pem)) as client:
            assert (await within(client.request(b"echo x"))).data == b"x"
        assert seen == ["CN=one"]
        without = ClientTls(ca=us.pem)
        with pytest.raises(ConnectionLost, match="perhaps it demands another certificate"):
            async with await connect(server.address, tls=without) as client:
                await within(client.request(b"echo x"))
        with pytest.raises(ConnectFailed, match="certificate"):
            await connect(server.address, tls=them.client("one", ca=them.pem))
        with pytest.raises(ConfigError, match=r"there is no TLS here; use reactivesocket\+"):
            await connect(f"reactivesocket+{plain}://127.0.0.1:1", tls=without)


async def test_requests_end_in_time_by_themselves() -> None:
    config = brisk(timing={"progress_deadline": 0.3})
    async with joined(config=config) as pair:
        waiting = [asyncio.ensure_future(pair.client.request(b"wait"))]
        await asyncio.sleep(0.2)
        waiting.append(asyncio.ensure_future(pair.client.request(b"wait")))
        assert (await pair.client.request(b"echo x")).data == b"x"
        with pytest.raises(
            TimeoutError, match=r"no answer within 0.3 s \(Timing.progress_deadline"
        ):
            await within(waiting[0])
        assert not waiting[1].done()
        with pytest.raises(TimeoutError, match="no answer within"):
            await within(waiting[1])
        await eventually(lambda: not pair.server.snapshot().responding)
