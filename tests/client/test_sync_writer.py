"""Writers in threads: they wait, may be used by several threads, and stay behind in a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

import aqueduct
from aqueduct.client.sync_writer import SyncAck
from aqueduct.errors import HandlerFailed, LocalProtocolError
from tests.sinks.shelf import NotedShelf, service_with
from tests.support.calls import NUMBERS, numbers, served, until_seen


@pytest.fixture
def shelf() -> NotedShelf:
    return NotedShelf()


@pytest.fixture
def client(shelf: NotedShelf) -> Iterator[aqueduct.SyncClient]:
    service = service_with(shelf)
    with (
        served(service, "tcp") as address,
        aqueduct.SyncClient(address, config=service.config) as client,
    ):
        yield client


def test_rows_are_there_after_their_commit(client: aqueduct.SyncClient, shelf: NotedShelf) -> None:
    heard: list[int] = []
    with client.writer("shelf", key="k", on_ack=lambda ack: heard.append(ack.number)) as writer:
        assert (writer.sink, writer.key) == ("shelf", "k")
        assert writer.schema is not None and writer.schema.equals(NUMBERS)
        acks = [writer.write(numbers(value, value)) for value in range(3)]
        assert writer.uncommitted == 6 and writer.kept_bytes
        acks[1].result(timeout=20)
        acks[1].result()
        assert acks[0].done and acks[0].error is None
        assert (acks[1].number, acks[1].commit, acks[1].rows) == (1, 0, 2)
        writer.flush()
        assert heard == [0, 1, 2] and writer.unacknowledged() == []
        assert shelf.rows == []
        assert writer.commit(note=3).rows == 6
        assert writer.committed.note == 3
    assert writer.closed
    writer.close()
    writer.abort()
    with client.writer("shelf", key="k") as writer:
        assert writer.committed.note == 3
        assert repr(writer) == "<SyncWriter into 'shelf' by the key 'k', 0 rows not committed>"
    assert shelf.rows == [0, 0, 1, 1, 2, 2]


def test_threads_share_a_writer(client: aqueduct.SyncClient, shelf: NotedShelf) -> None:
    with client.writer("shelf", key="k", in_flight_bytes=10_000) as writer:

        def one(first: int) -> None:
            for value in range(first, first + 50):
                writer.write(numbers(value))
            writer.flush()

        threads = [threading.Thread(target=one, args=(50 * each,)) for each in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert writer.commit().rows == 200
    assert shelf.rows == list(range(200))


def test_an_acknowledgement_that_does_not_come_in_time(
    client: aqueduct.SyncClient, shelf: NotedShelf
) -> None:
    opened, go_on = threading.Event(), threading.Event()
    real = shelf.note

    def note(what: str, *details: object) -> None:
        real(what, *details)
        if what == "prepare":
            opened.set()
            assert go_on.wait(20)

    shelf.note = note  # type: ignore[method-assign]
    with client.writer("shelf", key="k") as writer:
        ack = writer.write(numbers(1))
        assert repr(ack) == "<SyncAck of write 0, 1 rows: waiting>"
        with pytest.raises(TimeoutError):
            ack.result(timeout=0.01)
        assert opened.wait(20) and not ack.done
        go_on.set()
        ack.result(timeout=20)
        writer.commit()
    assert shelf.rows == [1]


def test_errors_come_where_they_are_waited_for(
    client: aqueduct.SyncClient, shelf: NotedShelf
) -> None:
    shelf.fail["write"] = ValueError("a row that is none")
    writer = client.writer("shelf", key="k").open()
    ack: SyncAck = writer.write(numbers(1))
    for use in (ack.result, ack.result, writer.flush, writer.commit):
        with pytest.raises(HandlerFailed, match="a row that is none"):
            use()
    writer.close()
    shelf.fail.clear()
    with pytest.raises(LocalProtocolError, match="1 rows that were written and not committed"):
        with client.writer("shelf", key="k") as writer:
            writer.write(numbers(1))
            writer.flush()
    with pytest.raises(ZeroDivisionError):
        with client.writer("shelf", key="k") as writer:
            writer.write(numbers(2))
            raise ZeroDivisionError
    until_seen(lambda: not shelf.staged)
    assert shelf.rows == []


def test_a_writer_does_not_outlive_its_client(shelf: NotedShelf) -> None:
    service = service_with(shelf)
    with served(service, "tcp") as address:
        client = aqueduct.SyncClient(address, config=service.config)
        writer = client.writer("shelf", key="k").open()
        client.close()
        writer.close()
        for use in (writer.flush, writer.commit, lambda: writer.write(numbers(1))):
            with pytest.raises(LocalProtocolError, match="closed"):
                use()
        with pytest.raises(LocalProtocolError, match="closed"):
            client.writer("shelf", key="k")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_no_writer_and_the_parent_s_goes_on(
    client: aqueduct.SyncClient, shelf: NotedShelf
) -> None:
    with client.writer("shelf", key="k") as writer:
        ack = writer.write(numbers(1))
        child = os.fork()
        if not child:
            status = 1
            try:
                for use in (writer.flush, writer.commit, ack.result):
                    with pytest.raises(LocalProtocolError, match="make a client after the fork"):
                        use()
                writer.close()
                writer.abort()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        writer.write(numbers(2))
        writer.commit()
    assert shelf.rows == [1, 2]
