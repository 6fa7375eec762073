"""How many turns of the event loop lie between a message and the answer to it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aqueduct import Connection, Receiver, Sender, channel, connect, serve
from aqueduct.carriers.contract import Buffer
from aqueduct.endpoint.connection import _DROPS
from aqueduct.errors import ReceiverClosed
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.protocol.common.registry import Half
from tests.carriers.streams import listen_at
from tests.carriers.users import DEADLINE


class Turns:
    """Counts the turns of the running loop, at the start of each."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.count = 0
        self._next = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self.count += 1
        self._next = self._loop.call_soon(self._turn)

    def stop(self) -> None:
        self._next.cancel()


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
async def test_an_answer_leaves_in_the_turn_that_makes_it(scheme: str, tmp_path: Path) -> None:
    """The task that was woken by a message runs first, and behind it leaves what it sends."""
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    async with (
        asyncio.timeout(DEADLINE),
        await serve(arrived.set_result, listen_at(scheme, tmp_path)) as listener,
        await connect(listener.addresses[0]) as client,
    ):
        questions, to_server = channel()
        from_server, answers = channel()
        await client.entrypoint.send(b"", attachments=[to_server, from_server])
        server = await arrived
        message = await server.entrypoint.receive()
        receiver, sender = (attachment.handle for attachment in message.attachments)
        assert isinstance(receiver, Receiver)
        assert isinstance(sender, Sender)
        turns = Turns()
        made: list[int] = []
        left: list[int] = []
        carrier: Any = server.carrier
        write = carrier.write

        def writes(stream: int, buffers: Sequence[Buffer], fin: bool) -> None:
            if any(b"answer" in bytes(part) for part in buffers):
                left.append(turns.count)
            write(stream, buffers, fin)

        carrier.write = writes

        async def answer() -> None:
            async for question in receiver:
                made.append(turns.count)
                sender.send_nowait(b"answer to " + bytes(question.payload))

        answering = asyncio.create_task(answer())
        for number in range(5):
            await questions.send(b"%d" % number)
            assert bytes((await answers.receive()).payload) == b"answer to %d" % number
        answering.cancel()
        turns.stop()
        assert len(made) == 5
        assert left == made


async def test_very_many_dropped_handles_end_in_several_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer sends a thousand channels that nobody takes: others have their turn meanwhile."""
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    count = 4 * _DROPS
    done = asyncio.Event()
    ended: Counter[int] = Counter()
    end_one = ChannelConnection.drop_attachment
    async with (
        asyncio.timeout(DEADLINE),
        await serve(arrived.set_result, listen_at("unix", tmp_path)) as listener,
        await connect(listener.addresses[0]) as client,
    ):
        pairs = [channel() for _ in range(count)]
        await client.entrypoint.send(b"", attachments=[receiver for _, receiver in pairs])
        server = await arrived
        message = await server.entrypoint.receive()
        assert len(message.attachments) == count
        turns = Turns()

        def drop(core: ChannelConnection, half: Half, now: float) -> None:
            ended[turns.count] += 1
            end_one(core, half, now)
            if ended.total() == count:
                done.set()

        monkeypatch.setattr(ChannelConnection, "drop_attachment", drop)
        del message
        await done.wait()
        turns.stop()
        assert max(ended.values()) <= _DROPS
        for sender, _ in pairs:
            with pytest.raises(ReceiverClosed):
                await sender.wait_closed()
