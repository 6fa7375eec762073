"""Forks, the memory of the process, and what many open streams cost."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from aqueduct.config import Flow
from aqueduct.endpoint.accounts import process
from aqueduct.errors import ConnectFailed, ConnectionLost
from aqueduct.reactivesocket import (
    ReactiveItem,
    ReactiveRequest,
    ReactiveSocketConnection,
    connect,
    serve,
)
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


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_forked_child_has_nothing_of_its_parents_connections(
    family: str, tmp_path: Any
) -> None:
    async with joined(family, tmp_path) as pair:
        item = await within(pair.client.request(b"large 10000"))
        child = os.fork()
        if not child:
            status = 1
            try:
                error = pair.client.error
                told = isinstance(error, ConnectionLost) and "connect after the fork" in str(error)
                item.release()
                kept = process().receiving.used
                status = 0 if told and pair.server.closed and not kept else 2
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)  # noqa: ASYNC222  it does not run for long
        assert os.waitstatus_to_exitcode(status) == 0
        assert (await within(pair.client.request(b"echo on"))).data == b"on"


async def test_a_child_does_not_keep_connections_open() -> None:
    async with joined() as pair:
        child = os.fork()
        if not child:
            try:
                signal.pause()
            finally:
                os._exit(0)
        try:
            await pair.client.close()
            await within(pair.server.wait_closed())
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)  # noqa: ASYNC222  it is dead


async def test_above_the_budget_of_the_process_one_connection_goes_on_at_a_time() -> None:
    receiving = process().receiving
    gc.collect()
    gc.collect()  # what earlier tests left counts until it is collected
    before = receiving.used
    flow = Flow(process_receive_budget=before + 300_000)
    config = brisk(flow=flow, timing={"stall_deadline": 0.2})
    requests: list[ReactiveRequest] = []
    most = 0

    async def taking(request: ReactiveRequest) -> None:
        nonlocal most
        requests.append(request)
        most = max(most, receiving.used - before)
        await asyncio.sleep(0.01)
        await request.send(b"%d" % request.data.nbytes)

    async with serving(config=config, responder=taking) as server:
        clients = [await connect(server.address) for _ in range(5)]
        answers = await within(
            asyncio.gather(*(each.request(bytes(200_000)) for each in clients for _ in range(8)))
        )
        assert all(item.data == b"200000" for item in answers)
        assert len(requests) == 40
        assert most < 1_500_000  # of the 8,000,000 that came: one request of each connection
        requests.clear()
        for each in clients:
            await each.close()
    answers.clear()
    gc.collect()
    assert receiving.used == before
    assert not receiving.waiting


async def test_a_peer_that_stops_within_a_frame_keeps_no_others_waiting() -> None:
    gc.collect()
    gc.collect()  # what earlier tests left counts until it is collected
    before = process().receiving.used
    flow = Flow(process_receive_budget=before + 100_000)
    config = brisk(flow=flow, timing={"stall_deadline": 0.2})
    async with serving(config=config) as server:
        slow = []
        for _ in range(3):
            peer = await Peer.connect(server, frame(frames.SETUP))
            peer.say(frame(frames.REQUEST_RESPONSE, 1, b"echo " + bytes(200_000))[:150_000])
            slow.append(peer)
        await eventually(lambda: process().receiving.used - before > 100_000)
        async with await connect(server.address) as client:
            found = await within(client.request(b"echo " + bytes(200_000)))
            assert len(found.data) == 200_000
        for peer in slow:
            peer.close()


async def test_above_the_budget_for_sending_each_connection_sends_a_little() -> None:
    gc.collect()
    gc.collect()  # what earlier tests left counts until it is collected
    before = process().sending.used
    flow = Flow(process_send_budget=before + 1_000_000)
    async with serving(config=brisk(flow=flow)) as server:
        peers = []
        for _ in range(8):
            peer = await Peer.connect(server, frame(frames.SETUP))
            peer.say(frame(frames.REQUEST_SUB, 1, b"ever 100000", n=(1 << 63) - 1))
            peers.append(peer)
        await eventually(lambda: process().sending.used - before > 1_000_000)
        await asyncio.sleep(0.1)
        assert process().sending.used - before < 2_000_000
        for peer in peers:
            for _ in range(30):
                assert len((await peer.read())[3]) == 100_000
            peer.close()
    await eventually(lambda: process().sending.used == before)


async def steps_of(connection: ReactiveSocketConnection) -> int:
    """How many functions of the library a request calls."""
    found = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        if event == "call" and "aqueduct" in frame.f_code.co_filename:
            found += 1

    for _ in range(3):
        await connection.request(b"echo x")
    sys.setprofile(count)
    try:
        for _ in range(10):
            await connection.request(b"echo x")
    finally:
        sys.setprofile(None)
    return found


async def test_what_a_request_costs_does_not_grow_with_open_streams() -> None:
    async with joined() as pair:
        streams = [pair.client.subscribe(b"count 3", n=1)]
        await streams[0].receive()
        few = await steps_of(pair.client)
        streams += [pair.client.subscribe(b"count 3", n=1) for _ in range(10_000)]
        await within(asyncio.gather(*(stream.receive() for stream in streams[1:])))
        assert pair.server.snapshot().responding == 10_001
        many = await steps_of(pair.client)
        assert many <= few + 50
        for stream in streams:
            stream.cancel()
        await eventually(lambda: not pair.server.snapshot().responding)


async def test_a_server_that_stops_keeps_its_connections() -> None:
    async with serving() as server, await connect(server.address) as client:
        await within(client.request(b"echo x"))
        await server.stop()
        with pytest.raises(ConnectionLost):
            await connect(server.address, config=BRISK)
        assert (await within(client.request(b"echo y"))).data == b"y"


@pytest.mark.parametrize("steps", range(1, 4))
async def test_a_close_that_is_cancelled_leaves_nothing_listening(
    steps: int, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    for address in ("reactivesocket+tcp://127.0.0.1:0", f"reactivesocket+unix://{path}"):
        server = await serve(None, address)
        closing = asyncio.ensure_future(server.close())
        for _ in range(steps):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        with pytest.raises(ConnectFailed):
            await connect(server.address)
        assert not path.exists()
        await server.close()


async def test_a_second_stop_waits_for_the_first() -> None:
    server = await serve(None, "reactivesocket+tcp://127.0.0.1:0")
    first = asyncio.ensure_future(server.stop())
    await asyncio.sleep(0)
    await server.stop()
    with pytest.raises(ConnectFailed):
        await connect(server.address)
    await first
    await server.close()


async def test_requests_wait_for_room_in_turn() -> None:
    config = replace(BRISK, flow=Flow(connection_high_water=100_000))
    async with joined(config=config) as pair:
        items = await within(
            asyncio.gather(*(pair.client.request(b"echo " + bytes(30_000)) for _ in range(200)))
        )
        assert all(len(item.data) == 30_000 for item in items)
        fired = [pair.client.fire(bytes(50_000)) for _ in range(50)]
        await within(asyncio.gather(*fired))


async def test_both_sides_send_all_they_can_and_neither_waits_for_ever() -> None:
    config = replace(BRISK, flow=Flow(channel_high_water=100_000, connection_high_water=200_000))
    async with joined(config=config) as pair:

        async def take(side: ReactiveSocketConnection) -> None:
            count = 0
            async for item in side.subscribe(b"ever 60000", n=64):
                assert len(item.data) == 60_000
                count += 1
                if count == 300:
                    break

        await within(asyncio.gather(*(take(side) for side in (pair.client, pair.server) * 4)))


async def test_requests_leave_in_the_order_of_asking() -> None:
    asked = 0
    came: list[int] = []

    async def noting(request: ReactiveRequest) -> None:
        came.append(int(bytes(request.data[:4])))
        await request.send(b"")

    async def ask(client: ReactiveSocketConnection) -> None:
        nonlocal asked
        for _ in range(4):
            number, asked = asked, asked + 1
            await client.request(b"%04d" % number + bytes(100_000))

    config = brisk(flow=Flow(connection_high_water=100_000))
    async with joined(config=config, responder=noting) as pair:
        await within(asyncio.gather(*(ask(pair.client) for _ in range(40))))
        assert came == list(range(160))


async def test_who_gives_up_waiting_for_room_keeps_no_others() -> None:
    config = brisk(flow=Flow(connection_high_water=100_000))
    async with joined(config=config) as pair:
        filling = [asyncio.ensure_future(pair.client.fire(bytes(4 << 20))) for _ in range(2)]
        waiting = [asyncio.ensure_future(pair.client.request(b"echo x")) for _ in range(40)]
        await asyncio.sleep(0)
        for each in waiting[:-1]:
            each.cancel()
        assert (await within(waiting[-1])).data == b"x"
        await within(asyncio.gather(*filling))


async def test_streams_that_wait_for_room_send_in_turn() -> None:
    sent = [0] * 40

    async def ever(request: ReactiveRequest) -> None:
        number = int(bytes(request.data))
        while True:
            await request.send(bytes(100_000))
            sent[number] += 1

    async def read(client: ReactiveSocketConnection, number: int) -> None:
        async for _ in client.stream(b"%d" % number):
            if sum(sent) >= 400:
                return

    config = brisk(flow=Flow(connection_high_water=100_000))
    async with joined(config=config, responder=ever) as pair:
        await within(asyncio.gather(*(read(pair.client, number) for number in range(40))))
        assert min(sent) >= 5  # of 10 for each


@pytest.mark.parametrize("way", ["take", "cancel"])
async def test_a_connection_reads_on_once_what_came_is_taken(way: str) -> None:
    async def responder(request: ReactiveRequest) -> None:
        if bytes(request.data) != b"three":
            await answering(request)
            return
        for _ in range(3):
            await request.send(bytes(1_000_000))

    config = brisk(receive_bytes=2_100_000, timing={"stall_deadline": 60.0})
    async with joined(config=config, responder=responder) as pair:
        three, ever = pair.client.stream(b"three"), pair.client.stream(b"ever 100000")
        await within(three.receive())
        await eventually(lambda: three.ended and three.waiting == 2)
        await within(ever.receive())
        await eventually(lambda: ever.waiting and not pair.client.snapshot().reading)
        asking = asyncio.ensure_future(pair.client.request(b"echo x"))
        await asyncio.sleep(0.05)
        assert not asking.done()
        if way == "cancel":
            three.cancel()
        else:
            while three.waiting:
                await three.receive()
        found = await asyncio.wait_for(asking, 10)
        assert found.data == b"x"


class Slow(deque[int]):
    """Another thread has its turn before something is taken."""

    def popleft(self) -> int:
        time.sleep(0.001)
        return super().popleft()


async def test_after_the_end_threads_give_back_all_they_have() -> None:
    receiving = process().receiving
    gc.collect()
    gc.collect()  # what earlier tests left counts until it is collected
    before = receiving.used
    failed: list[BaseException] = []
    together = threading.Barrier(4)

    def let_go(items: list[ReactiveItem]) -> None:
        together.wait()
        try:
            for item in items:
                item.release()
        except BaseException as error:  # noqa: BLE001  the test looks at it
            failed.append(error)

    async with joined() as pair:
        asked = (pair.client.request(b"large 1024") for _ in range(80))
        items = await within(asyncio.gather(*asked))
    assert receiving.used > before
    pair.client._face._returned = Slow()
    threads = [threading.Thread(target=let_go, args=(items[each::4],)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert receiving.used == before
    assert not pair.client.snapshot().held_bytes
