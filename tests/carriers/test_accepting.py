"""A server that closes in the moment in which it accepts loses no socket."""

from __future__ import annotations

import asyncio
import gc
import socket

import pytest

from aqueduct import reactivesocket


@pytest.mark.parametrize("turns", range(4))
async def test_a_close_while_a_connection_comes_leaves_no_socket_open(turns: int) -> None:
    for _ in range(10):
        server = await reactivesocket.serve(None, "reactivesocket+tcp://127.0.0.1:0")
        await asyncio.sleep(0)
        port = server.address.port
        with socket.create_connection(("127.0.0.1", port)) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.close()
            client.settimeout(10)
            try:
                assert client.recv(100) is not None, "it hears of the end"
            except ConnectionResetError:
                pass
    gc.collect()  # a socket that was lost would warn, which is an error here
