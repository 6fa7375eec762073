"""bpmux by itself: a forked child has neither its parent's connections nor its places."""

from __future__ import annotations

import pytest

from tests.support.programs import python

CODE = """
import asyncio, os, sys
from aqueduct import bpmux
from aqueduct.errors import ConnectionLost

def in_child(work):
    "What work() returns in a forked child, as text."
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = str(work())
        except BaseException as error:
            said = repr(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as said:
        found = said.read()
    os.waitpid(child, 0)
    return found

def sockets():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(("socket:", "anon_inode:")):
            found.append(target)
    return found

async def answering(connection):
    async for opened in connection:
        await opened.respond(b"yes")

async def main():
    place = ("127.0.0.1", 0) if sys.argv[1] == "tcp" else sys.argv[1]
    async with await bpmux.serve(answering, place) as server:
        async with await bpmux.connect(server.place) as connection:
            assert await connection.request(b"?") == b"yes"
            assert sockets()
            print(in_child(sockets))
            print(in_child(lambda: asyncio.run(connection.request(b"?"))))
            print(in_child(lambda: asyncio.run(connection.close())))
            assert await connection.request(b"?") == b"yes"
        async with await bpmux.connect(server.place) as connection:
            assert await connection.request(b"?") == b"yes"

asyncio.run(main())
"""


@pytest.mark.parametrize("carrier", ["tcp", "unix"])
def test_a_connection_in_a_forked_child_is_an_error_and_the_parent_s_goes_on(tmp_path, carrier):
    done = python(CODE, "tcp" if carrier == "tcp" else f"{tmp_path}/bpmux.sock")
    assert (done.returncode, done.stderr) == (0, "")
    left, error, closed = done.stdout.splitlines()
    assert left == "[]"
    assert "ConnectionLost" in error
    assert "connect after the fork" in error
    assert closed == "None"


def test_names_are_found_once_the_main_thread_has_ended():
    code = """
    import asyncio, threading
    from aqueduct import bpmux

    async def answering(connection):
        async for opened in connection:
            await opened.respond(b"yes")

    async def serve():
        for host in ("localhost", "127.0.0.1", "::1"):
            async with await bpmux.serve(answering, (host, 0)) as server:
                async with await bpmux.connect((host, server.place[1])) as connection:
                    print(await connection.request(b"?"))

    def late():
        threading.main_thread().join()
        asyncio.run(serve())

    threading.Thread(target=late).start()
    """
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["b'yes'"] * 3
