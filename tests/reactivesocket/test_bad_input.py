"""Peers that lie, hoard or hurry: a clear ERROR, bounded work, and others are served."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import ssl
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from aqueduct.config import Flow
from aqueduct.endpoint.accounts import process
from aqueduct.errors import ConnectFailed, ConnectionLost, ReactiveError, SequenceError
from aqueduct.reactivesocket import (
    ReactiveRequest,
    ReactiveSocketConnection,
    ReactiveSocketServer,
    connect,
)
from tests.reactivesocket.pairs import (
    BRISK,
    Peer,
    answering,
    brisk,
    eventually,
    frame,
    frames,
    joined,
    scripted,
    serving,
    within,
)

SETUP = frame(frames.SETUP)
WHOLE = frames.BEGIN | frames.END
MOST = (1 << 63) - 1


async def goes_on(server: ReactiveSocketServer) -> None:
    """An honest client is served."""
    async with await connect(server.address, config=BRISK) as client:
        assert (await within(client.request(b"echo hello"))).data == b"hello"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "INVALID_SETUP: this is ReactiveSocket, .*HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "INVALID_SETUP: .*it speaks TLS"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "INVALID_SETUP: .*it speaks SSH"),
        (bytes(4), "INVALID_SETUP: "),
        (b"\x01\x00\x00\x10" + bytes(12), "setup_bytes"),
        (frame(frames.REQUEST_RESPONSE, 1, b"x"), "INVALID_SETUP: .*first frame is REQUEST_RESP"),
        (frame(frames.SETUP, 0, bytes(70_000)), "ReactiveSocket.setup_bytes"),
        (frame(frames.SETUP, 5), "INVALID_SETUP: .*SETUP"),
        (SETUP + frame(0, 1), "INVALID: "),
        (SETUP + frame(frames.REQUEST_RESPONSE, 0, b"x"), "INVALID: .*stream 0"),
        (SETUP + b"\0\0\0\x05xxxxx", "INVALID: "),
        (SETUP + b"\x7f\0\0\0", "INVALID: .*ReactiveSocket.frame_bytes"),
        (SETUP + frame(0x99, 1), "INVALID: .*0x99"),
        (SETUP + frames.encode_extension_head(7, 0), "INVALID: .*extension"),
    ],
)
async def test_a_violation_is_named_and_ends_the_connection(said: bytes, text: str) -> None:
    async with serving() as server:
        peer = await Peer.connect(server, said)
        found = await peer.error()

        assert re.search(text, found), found
        await peer.end()
        await eventually(lambda: not server.handshakes)
        await goes_on(server)


async def test_a_setup_of_16_mib_is_not_kept() -> None:
    async with serving() as server:
        gc.collect()  # what earlier tests left counts until it is collected
        before = process().receiving.used
        peer = await Peer.connect(server)
        peer.say(frame(frames.SETUP, 0, bytes(16 << 20)))
        assert "ReactiveSocket.setup_bytes" in await peer.error()
        await peer.end()
        assert process().receiving.used == before
        await goes_on(server)


async def test_tls_on_a_plain_port_and_plain_bytes_on_one_with_tls(tmp_path: Path) -> None:
    async with serving() as server:
        where = server.address
        with pytest.raises(ConnectFailed, match="handshake"):
            await connect(f"reactivesocket+tls://127.0.0.1:{where.port}?verify=off")
        await goes_on(server)
    async with serving("tls", tmp_path) as server:
        plain = f"reactivesocket+tcp://127.0.0.1:{server.address.port}"
        async with await connect(plain) as client:
            with pytest.raises(ConnectionLost):
                await within(client.request(b"echo x"))
        await eventually(lambda: not server.handshakes)
        await goes_on(server)


async def test_a_client_names_a_server_that_speaks_something_else() -> None:
    async def web(peer: Peer) -> None:
        peer.say(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with scripted(web) as where, await connect(where) as client:
        with pytest.raises(ConnectionLost, match=r"broke ReactiveSocket: .*it speaks HTTP"):
            await within(client.request(b"x"))


async def test_a_client_whose_setup_was_taken_is_not_told_that_it_was_rejected() -> None:
    """Though no response has come: it hears of no SETUP that is taken."""
    async with (
        serving(config=brisk(frame_bytes=1 << 16)) as server,
        await connect(server.address) as client,
    ):
        with pytest.raises(ConnectionLost, match=r"ended the connection: .*_bytes") as caught:
            await within(client.request(bytes(1 << 17)))
        assert not isinstance(caught.value, ConnectFailed)


async def test_a_silent_peer_loses_its_place() -> None:
    config = brisk(timing={"connect_timeout": 0.1})
    async with serving(config=config) as server:
        peer = await Peer.connect(server)
        await eventually(lambda: server.handshakes)
        await peer.end()
        await eventually(lambda: not server.handshakes)
        await goes_on(server)


async def test_a_slow_setup_is_cut_off() -> None:
    config = brisk(timing={"connect_timeout": 0.2})
    async with serving(config=config) as server:
        peer = await Peer.connect(server)

        async def drip() -> None:
            for byte in SETUP * 100:
                peer.say(bytes([byte]))
                await asyncio.sleep(0.02)

        dripping = asyncio.ensure_future(drip())
        peer.say(frame(frames.SETUP, 0, bytes(1000))[:20])
        with suppress(ConnectionResetError):  # a byte may come after the close
            await peer.end()
        dripping.cancel()
        await goes_on(server)


async def test_a_hundred_thousand_requests_without_reading() -> None:
    """The server stops: it neither reads on nor keeps answers without bound."""
    sending = process().sending
    gc.collect()  # what earlier tests left counts until it is collected
    before = sending.used
    flow = Flow(connection_high_water=1 << 20)
    config = brisk(flow=flow, timing={"progress_deadline": 1.0})
    async with serving(config=config) as server:
        peer = await Peer.connect(server, SETUP)
        many = b"".join(
            frame(frames.REQUEST_RESPONSE, stream, b"echo " + bytes(1000))
            for stream in range(1, 200_001, 2)
        )
        most = 0
        peer.say(many)
        await eventually(lambda: server.connections)
        while server.connections:
            most = max(most, sending.used - before)
            assert most < 32 << 20
            await asyncio.sleep(0.01)
        peer.close()
        assert sending.used == before
        await goes_on(server)


async def test_refusals_that_nobody_reads_do_not_pile_up() -> None:
    sending = process().sending
    gc.collect()  # what earlier tests left counts until it is collected
    before = sending.used
    flow = Flow(connection_high_water=1 << 20)
    config = brisk(flow=flow, timing={"progress_deadline": 1.0})
    async with serving(config=config, responder=None) as server:
        peer = await Peer.connect(server, SETUP)
        for stream in range(1, 200_001, 2):
            peer.say(frame(frames.REQUEST_RESPONSE, stream))
        await eventually(lambda: server.connections)
        while server.connections:
            assert sending.used - before < 8 << 20
            await asyncio.sleep(0.01)
        peer.close()


async def test_a_storm_of_request_n_costs_nothing() -> None:
    requests: list[ReactiveRequest] = []
    async with serving(responder=requests.append) as server:
        peer = await Peer.connect(server, SETUP)
        peer.say(frame(frames.REQUEST_STREAM, 1, b"x", n=1))
        peer.say(frame(frames.REQUEST_N, 1, n=MOST) * 50_000)
        peer.say(frame(frames.REQUEST_N, 77, n=1) * 50_000)
        await eventually(lambda: requests and requests[0].demand == MOST)
        requests[0].complete(b"done")
        assert (await peer.read())[3] == b"done"
        peer.say(frame(frames.REQUEST_STREAM, 3, b"x", n=1) + frame(frames.REQUEST_N, 3, n=0))
        assert (await peer.error(3)).startswith("INVALID: a REQUEST_N of 0 items")
        peer.say(frame(frames.REQUEST_STREAM, 5, b"x", n=1 << 63))
        assert (await peer.error(5)).startswith("INVALID: a request for 9223372036854775808 items")
        assert len(requests) == 1
        await goes_on_with(peer, requests)
        peer.close()


async def goes_on_with(peer: Peer, requests: list[ReactiveRequest]) -> None:
    """The connection serves another request."""
    known = len(requests)
    peer.say(frame(frames.REQUEST_RESPONSE, 1001, b"x"))
    await eventually(lambda: len(requests) > known)
    requests[-1].complete(b"y")
    kind, flags, stream, data = await peer.read()
    assert (kind, flags, stream, data) == (frames.RESPONSE, WHOLE | frames.COMPLETE, 1001, b"y")


async def test_an_id_that_is_used_again() -> None:
    """While it is in use the second request is ignored; one that was cancelled is not answered."""
    requests: list[ReactiveRequest] = []
    async with serving(responder=requests.append) as server:
        peer = await Peer.connect(server, SETUP)
        peer.say(frame(frames.REQUEST_RESPONSE, 1, b"a") + frame(frames.REQUEST_RESPONSE, 1, b"b"))
        await eventually(lambda: requests)
        assert bytes(requests[0].data) == b"a"
        again = frame(frames.CANCEL, 1) + frame(frames.REQUEST_RESPONSE, 1, b"c")
        peer.say(again + frame(frames.CANCEL, 1) + frame(frames.REQUEST_RESPONSE, 1, b"d"))
        await eventually(lambda: bytes(requests[-1].data) == b"d")
        assert [bytes(each.data) for each in requests] == [b"a", b"d"]
        assert [each.ended for each in requests] == [True, False]
        requests[0].complete(b"old")
        requests[1].complete(b"new")
        assert (await peer.read())[3] == b"new"
        peer.close()


async def test_more_streams_than_may_be_open_are_refused() -> None:
    async with serving(config=brisk(streams=5)) as server:
        peer = await Peer.connect(server, SETUP)
        for stream in range(1, 17, 2):
            peer.say(frame(frames.REQUEST_RESPONSE, stream, b"wait"))
        for stream in (11, 13, 15):
            assert "ReactiveSocket.streams" in await peer.error(stream)
        peer.close()


@pytest.mark.parametrize("family", ["tcp", "ws", "tls"])
async def test_a_burst_above_the_limit_of_streams_is_answered_one_by_one(
    family: str, tmp_path: Path
) -> None:
    config = brisk(streams=5, unsent_answers=20)
    async with serving(family, tmp_path, config) as server:
        async with await connect(server.address, config=BRISK) as client:
            waiting = [asyncio.ensure_future(client.request(b"wait")) for _ in range(5)]
            asked = [client.request(b"x" * 10, timeout=20) for _ in range(3000)]
            found = await within(asyncio.gather(*asked, return_exceptions=True))
            refused = [each for each in found if isinstance(each, ReactiveError)]
            assert {each.word for each in refused} == {"REJECTED"}
            assert len(refused) == 3000
            assert not client.closed
            for each in waiting:
                each.cancel()
            await asyncio.wait(waiting)
            assert (await within(client.request(b"echo on"))).data == b"on"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ([(WHOLE, b"1"), (WHOLE, b"2")], "not asked for"),
        ([(frames.END, b"1")], "has not begun"),
        ([(frames.BEGIN, b"1"), (frames.BEGIN, b"1")], "inside another one"),
        ([(frames.BEGIN, b"1")] + [(0, b"1")] * 300, "ReactiveSocket.fragments"),
        ([(frames.BEGIN, bytes(4000))] + [(0, bytes(4000))] * 4, "ReactiveSocket.item_bytes"),
    ],
)
async def test_a_server_that_answers_wrongly_loses_that_stream(
    said: list[tuple[int, bytes]], text: str
) -> None:
    """The client cancels it, and the connection goes on."""
    cancelled: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def lying(peer: Peer) -> None:
        await peer.read()
        _, _, stream, _ = await peer.read()
        for flags, data in said:
            peer.say(frame(frames.RESPONSE, stream, data, flags=flags))
        while True:
            kind, _, found, _ = await peer.read()
            if kind == frames.CANCEL:
                cancelled.set_result(found)
            elif kind == frames.REQUEST_RESPONSE:
                flags = WHOLE | frames.COMPLETE
                peer.say(frame(frames.RESPONSE, found, b"well", flags=flags))
                break

    config = brisk(fragments=256, item_bytes=16_000)
    async with scripted(lying) as where:
        async with await connect(where, config=config) as client:
            stream = client.stream(b"x", n=1)
            with pytest.raises((SequenceError, Exception), match=text):
                while True:
                    await within(stream.receive())
                    await asyncio.sleep(0.01)
            assert await within(cancelled) == 1
            assert (await within(client.request(b"y"))).data == b"well"
            assert client.snapshot().held_bytes < 5000


async def test_a_reader_that_stopped_costs_what_flow_allows() -> None:
    """A demand of 2^63-1, and nothing is read: the source stops, and others are served."""
    sending = process().sending
    gc.collect()  # what earlier tests left counts until it is collected
    before = sending.used
    flow = Flow(channel_high_water=1 << 20, connection_high_water=4 << 20)
    sent = 0

    async def counting(request: ReactiveRequest) -> None:
        nonlocal sent
        if bytes(request.data) != b"all":
            await answering(request)
            return
        while True:
            await request.send(bytes(10_000))
            sent += 1

    async with serving(config=brisk(flow=flow), responder=counting) as server:
        peer = await Peer.connect(server, SETUP)
        for stream in range(1, 201, 2):
            peer.say(frame(frames.REQUEST_SUB, stream, b"all", n=MOST))
        await eventually(lambda: sending.used - before > 4 << 20)
        for _ in range(20):
            was = sent
            await asyncio.sleep(0.02)
        assert sent == was
        assert sending.used - before < 5 << 20
        await goes_on(server)
        # It goes on once the peer reads, and every stream gets its share.
        seen: set[int] = set()
        while len(seen) < 100:
            seen.add((await peer.read())[2])
        peer.close()
    await eventually(lambda: sending.used == before)


async def test_a_peer_that_takes_nothing_is_given_up() -> None:
    flow = Flow(channel_high_water=1 << 20, connection_high_water=1 << 20)
    config = brisk(flow=flow, timing={"progress_deadline": 0.3})
    async with serving(config=config) as server:
        peer = await Peer.connect(server, SETUP)
        peer.say(frame(frames.REQUEST_SUB, 1, b"ever 100000", n=MOST))
        await eventually(lambda: server.connections)
        (connection,) = server.connections
        await within(connection.wait_closed())
        assert "has taken nothing for 0.3 s" in str(connection.error)
        peer.close()


async def test_a_peer_that_reads_slowly_is_kept(tmp_path: Path) -> None:
    """Though the kernel wants nothing meanwhile: not before most of what it has is taken."""
    config = brisk(timing={"progress_deadline": 0.5})
    loop = asyncio.get_running_loop()
    async with serving("unix", tmp_path, config) as server:
        with closing(socket.socket(socket.AF_UNIX)) as peer:
            peer.setblocking(False)
            await loop.sock_connect(peer, server.address.path)
            asked = SETUP + frame(frames.REQUEST_SUB, 1, b"ever 1000000", n=MOST)
            await loop.sock_sendall(peer, asked)
            await eventually(lambda: server.connections)
            (connection,) = server.connections
            for _ in range(40):
                assert await within(loop.sock_recv(peer, 16_000))
                await asyncio.sleep(0.05)
            assert not connection.closed
            await within(connection.wait_closed())  # it reads no more
            assert "has taken nothing for 0.5 s" in str(connection.error)


async def test_a_peer_that_reads_all_the_time_is_kept(tmp_path: Path) -> None:
    """Though something always waits to leave, as plain functions add to it at once."""

    def responder(request: ReactiveRequest) -> None:
        def refill() -> None:
            while request.writable:
                request.send_nowait(bytes(400))

        request.on_change = refill
        refill()

    # So little at once that the kernel takes it all.
    flow = Flow(channel_high_water=1 << 13, connection_high_water=1 << 14)
    config = brisk(flow=flow, timing={"progress_deadline": 0.3})
    async with joined("unix", tmp_path, config, responder=responder) as pair:
        streams = [pair.client.stream(n=100_000) for _ in range(8)]
        others = [asyncio.ensure_future(each.receive()) for each in streams[1:]]
        async with asyncio.timeout(30):
            until = asyncio.get_running_loop().time() + 1.0
            async for _ in streams[0]:
                if asyncio.get_running_loop().time() > until:
                    break
        assert not pair.server.closed
        await within(asyncio.gather(*others))


async def test_requests_that_are_never_done_with_hold_up_the_peer_and_then_are_refused() -> None:
    """Above ReactiveSocket.receive_bytes nothing is read; after a while new requests are refused,
    so that what the peer says of its older requests is heard."""
    requests: list[ReactiveRequest] = []
    config = brisk(receive_bytes=100_000, timing={"stall_deadline": 0.3})
    async with serving(config=config, responder=requests.append) as server:
        peer = await Peer.connect(server, SETUP)
        for stream in range(1, 41, 2):
            peer.say(frame(frames.REQUEST_STREAM, stream, bytes(10_000), n=9))
        await eventually(lambda: requests)
        (connection,) = server.connections
        await eventually(lambda: not connection.snapshot().reading)
        accepted = len(requests)
        assert accepted < 20
        assert "ReactiveSocket.receive_bytes" in await peer.error(39)
        assert connection.snapshot().reading
        peer.say(frame(frames.REQUEST_N, 1, n=1))
        await eventually(lambda: requests[0].demand == 10)
        assert len(requests) == accepted
        for each in requests:
            each.release()
        await goes_on_with(peer, requests)
        peer.close()


async def test_connections_above_the_limit_are_told() -> None:

    config = replace(BRISK, limits=replace(BRISK.limits, connections_address=1))
    async with serving(config=config) as server:
        async with await connect(server.address) as client:
            assert (await client.request(b"echo x")).data == b"x"
            async with await connect(server.address) as other:
                with pytest.raises(ConnectFailed, match=r"Limits\.connections_address"):
                    await within(other.request(b"echo x"))
        await eventually(lambda: not server.connections)
        config = replace(BRISK, limits=replace(BRISK.limits, connections=process().connections + 3))
    async with serving(config=config) as server, await connect(server.address) as client:
        async with await connect(server.address) as other:
            with pytest.raises(ConnectFailed, match=r"Limits\.connections"):
                await within(asyncio.gather(other.request(b"x"), client.request(b"x")))
        config = replace(BRISK, limits=replace(BRISK.limits, connections=1))
        with pytest.raises(ConnectFailed, match=r"the limit \(Limits\.connections\)"):
            await connect(server.address, config=config)


async def test_half_open_connections_take_turns() -> None:

    config = replace(
        BRISK,
        byte_stream=replace(BRISK.byte_stream, half_open=4),
        timing=replace(BRISK.timing, handshake_silence=0.05),
    )
    async with serving(config=config) as server:
        silent = [await Peer.connect(server) for _ in range(20)]
        await goes_on(server)
        assert server.handshakes <= 4
        for peer in silent:
            peer.close()


async def test_ten_thousand_streams_at_once() -> None:
    async with joined() as pair:
        streams = [pair.client.subscribe(b"count 3", n=1) for _ in range(10_000)]
        found = await within(asyncio.gather(*(stream.receive() for stream in streams)))
        assert all(item is not None and item.data == b"0" for item in found)
        assert pair.server.snapshot().responding == 10_000
        found = await within(asyncio.gather(*(stream.receive() for stream in streams)))
        assert all(item is not None and item.data == b"1" for item in found)
        for stream in streams:
            stream.cancel()
        await eventually(lambda: not pair.server.snapshot().responding)
        assert pair.client.snapshot().held_bytes < 5_000


async def test_a_client_in_tls_by_another_library(tmp_path: Path) -> None:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    async with serving("tls", tmp_path) as server:
        where = server.address
        peer = Peer(*await asyncio.open_connection(where.host, where.port, ssl=context))
        peer.say(SETUP + frame(frames.REQUEST_RESPONSE, 1, b"echo x"))
        assert (await peer.read())[3] == b"x"
        peer.say(frame(0, 1))
        assert (await peer.error()).startswith("INVALID: ")
        peer.close()


async def test_who_still_sends_in_tls_reads_the_error_first(tmp_path: Path) -> None:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    async with serving("tls", tmp_path) as server:
        where = server.address
        for _ in range(5):
            peer = Peer(*await asyncio.open_connection(where.host, where.port, ssl=context))
            peer.say(frame(frames.SETUP, 0, bytes(4 << 20)))
            assert "ReactiveSocket.setup_bytes" in await peer.error()
            peer.close()
        await eventually(lambda: not server.handshakes)


async def test_an_error_of_many_bytes_is_kept_in_part() -> None:
    async def play(peer: Peer) -> None:
        await peer.read()
        await peer.read()
        peer.say(frame(frames.ERROR, 1, b"INVALID: " + b"x" * (1 << 20)))

    async with scripted(play) as where, await connect(where) as client:
        with pytest.raises(ReactiveError) as found:
            await within(client.request(b"x"))
        assert found.value.word == "INVALID"
        assert len(found.value.data) == 64 << 10


async def test_an_end_of_many_bytes_is_told_in_part() -> None:
    async def play(peer: Peer) -> None:
        await peer.read()
        peer.say(frame(frames.ERROR, 0, b"INVALID: " + b"x" * (1 << 20)))

    async with scripted(play) as where, await connect(where) as client:
        await within(client.wait_closed())
        assert "xxx" in str(client.error)
        assert len(str(client.error)) < 70_000


async def test_a_setup_that_is_looked_at_for_too_long() -> None:
    seen: list[ReactiveSocketConnection] = []

    async def authorize(connection: ReactiveSocketConnection) -> None:
        seen.append(connection)
        await asyncio.sleep(30)

    config = brisk(timing={"connect_timeout": 0.2})
    async with serving(config=config, authorize_setup=authorize) as server:
        peer = await Peer.connect(server, SETUP)
        await peer.end()
        assert "authorize_setup has not said in time" in str(seen[0].error)


async def test_requests_without_an_answer_are_bounded() -> None:
    begun: list[int] = []
    gc.collect()  # what earlier tests left counts until it is collected
    before = process().receiving.used

    async def responder(request: ReactiveRequest) -> None:
        if request.kind == "request":
            await request.send(b"all before this has been looked at")
        else:
            begun.append(request.stream)
            await asyncio.sleep(30)

    async with serving(config=brisk(streams=8), responder=responder) as server:
        peer = await Peer.connect(server, SETUP + frame(frames.REQUEST_FNF, 1) * 100)
        peer.say(frame(frames.REQUEST_RESPONSE, 3))
        assert (await peer.read())[3].startswith(b"all before")
        assert len(begun) == 8
        assert process().receiving.used - before == 8 * (256 + 1024)
        peer.close()
        await eventually(lambda: process().receiving.used == before)


async def test_clients_without_a_setup_where_they_may() -> None:
    seen: list[bytes] = []

    def authorize(connection: ReactiveSocketConnection) -> str | None:
        seen.append(connection.setup)
        return None if len(seen) < 3 else "come later"

    async with serving(setup_required=False, authorize_setup=authorize) as server:
        peer = await Peer.connect(server, frame(frames.REQUEST_RESPONSE, 1, b"echo x"))
        assert (await peer.read())[3] == b"x"
        assert seen == [b""]
        peer.close()
        async with await connect(server.address, setup=b"hi") as client:
            assert (await within(client.request(b"echo x"))).data == b"x"
        assert seen == [b"", b"hi"]
        peer = await Peer.connect(server, frame(frames.REQUEST_RESPONSE, 1, b"echo x"))
        assert await peer.error() == "REJECTED_SETUP: come later"
        await peer.end()
