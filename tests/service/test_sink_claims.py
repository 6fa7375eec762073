"""A sink whose commits have notes: what a claim is told, and what becomes of other writers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

import aqueduct
from aqueduct.errors import BadCall, ConfigError, HandlerFailed, Refused
from aqueduct.rpc.sink_commit import (
    ABORT,
    ATTEMPT_HEADER,
    CLAIM,
    COMMIT,
    DOCUMENT_SCHEMA,
    WRITE,
    Attempt,
    Claim,
    ClaimedKey,
    PreparedAttempt,
    Receipt,
    Settlement,
    WriteKey,
    document_of,
    numbered,
    to_batch,
)
from tests.sinks.shelf import NotedShelf, Shelf, service_with
from tests.support.calls import NUMBERS, connected, numbers, until

LIMIT = 1 << 20


class LoopShelf(NotedShelf):
    """The same on the event loop."""

    async def commit(
        self, write_key: WriteKey, prepared: Sequence[PreparedAttempt], note: Any = None
    ) -> Any:
        while not self.blocked.is_set():
            self.committing.set()
            await asyncio.sleep(0.001)
        return super().commit(write_key, prepared, note)

    async def committed(self, write_key: WriteKey) -> Any:
        return super().committed(write_key)


@pytest.fixture(params=[NotedShelf, LoopShelf], ids=["threads", "loop"])
def shelf(request: pytest.FixtureRequest) -> NotedShelf:
    made: NotedShelf = request.param()
    return made


@pytest.fixture
async def client(shelf: NotedShelf) -> AsyncIterator[aqueduct.Client]:
    async with connected(service_with(shelf)) as client:
        yield client


async def ask(client: aqueduct.Client, what: str, text: str) -> Any:
    return await client.call(what + "shelf", to_batch(text), output_schema=DOCUMENT_SCHEMA)


async def claim(client: aqueduct.Client, key: str = "k", execution: str = "e") -> ClaimedKey:
    answer = await ask(client, CLAIM, Claim(key, execution).to_json())
    return ClaimedKey.from_json([answer], limit=LIMIT)


async def commit(
    client: aqueduct.Client, number: int, *prepared: PreparedAttempt, note: Any = None
) -> dict[str, Any]:
    settlement = Settlement(numbered("k", number), prepared, note=note)
    answer = await ask(client, COMMIT, settlement.to_json())
    return dict(document_of([answer], "it", limit=LIMIT))


async def write(
    client: aqueduct.Client, number: int, *rows: int, execution: str = "e"
) -> PreparedAttempt:
    attempt = Attempt(numbered("k", number), execution=execution, task=len(rows))
    stream = client.exchange(
        WRITE + "shelf",
        [numbers(*rows)],
        headers={ATTEMPT_HEADER: attempt.to_json()},
        write_key=attempt.write_key.key,
    )
    receipt = Receipt.from_json([batch async for batch in stream], limit=LIMIT)
    return PreparedAttempt(attempt, receipt.receipt)


@pytest.mark.requirement("AC-99")
@pytest.mark.requirement("AC-101")
async def test_a_claim_tells_how_many_commits_are_there_and_the_last_note(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    for count in range(18):
        found = await claim(client)
        assert (found.commits, found.note) == (count, {"at": count - 1} if count else None)
        assert found.description.schema is not None and found.description.schema.equals(NUMBERS)
        await commit(client, count, await write(client, count, count), note={"at": count})
    assert shelf.rows == list(range(18))
    shelf.asked.clear()
    assert (await claim(client)).commits == 18
    assert len(shelf.asked) <= 12, "few are looked for"
    assert (await claim(client, "another")).commits == 0
    assert shelf.there.keys() == {f"k/{number}" for number in range(18)}


@pytest.mark.requirement("AC-100")
async def test_a_claim_aborts_what_others_have_prepared_and_leaves_its_own(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    former = await write(client, 0, 1, execution="former")
    own = await write(client, 0, 2, 3)
    elsewhere = await write(client, 1, 4, execution="former")  # not the next commit
    await claim(client)
    assert shelf.staged.keys() == {own.attempt.id, elsewhere.attempt.id}
    assert former.attempt.id not in shelf.staged
    with pytest.raises(Refused, match="another writer has claimed the key 'k'"):
        await write(client, 0, 5, execution="former")
    await claim(client)  # an answer that was lost
    await commit(client, 0, own, note=1)
    assert shelf.rows == [2, 3]


@pytest.mark.requirement("AC-100")
async def test_an_attempt_that_is_open_is_refused_its_next_batch(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    attempt = Attempt(numbered("k", 0), execution="former")
    more = asyncio.Event()

    async def batches() -> AsyncIterator[Any]:
        yield numbers(1)
        await more.wait()
        yield numbers(2)

    stream = client.exchange(
        WRITE + "shelf",
        batches(),
        schema=NUMBERS,
        headers={ATTEMPT_HEADER: attempt.to_json()},
        write_key="k/0",
    )
    async with stream:
        await until(lambda: shelf.asked_for("write"))
        await claim(client)
        more.set()
        with pytest.raises(Refused, match="another writer has claimed the key 'k'"):
            await anext(stream)
    assert shelf.staged == {}


@pytest.mark.requirement("AC-100")
async def test_a_claim_waits_for_a_commit_that_is_under_way(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    prepared = await write(client, 0, 1, execution="former")
    shelf.blocked.clear()
    committing = asyncio.ensure_future(commit(client, 0, prepared, note="former"))
    await until(shelf.committing.is_set)
    shelf.asked.clear()
    claiming = asyncio.ensure_future(claim(client))
    await until(lambda: shelf.asked_for("committed"))  # it has looked, and found none
    shelf.blocked.set()
    found = await claiming
    assert (found.commits, found.note) == (1, "former")
    assert (await committing)["result"]["repeated"] is False
    assert shelf.rows == [1]


@pytest.mark.requirement("AC-102")
async def test_a_repeated_commit_tells_whose_it_was(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    prepared = await write(client, 0, 1)
    assert await commit(client, 0, prepared, note={"writer": "e"}) == {
        "version": 1,
        "result": {"repeated": False, "rows": 1},
    }
    late = await write(client, 0, 2, 3, execution="late")
    answer = await commit(client, 0, late, note={"writer": "late"})
    assert answer["note"] == {"writer": "e"} and answer["result"] == {"repeated": True}
    assert "note" not in await commit(client, 0, prepared)  # whoever has none is told none
    assert shelf.rows == [1] and shelf.staged == {}


@pytest.mark.requirement("AC-101")
async def test_a_sink_without_notes_says_so() -> None:
    shelf = Shelf()
    async with connected(service_with(shelf)) as client:
        for asking in (claim(client), commit(client, 0, note=1)):
            with pytest.raises(BadCall, match=r"give it a method committed\(write_key\)"):
                await asking
        assert shelf.asked == []
        assert (await commit(client, 0))["result"]["rows"] == 0


async def test_what_committed_may_return() -> None:
    class Wrong(NotedShelf):
        def committed(self, write_key: WriteKey) -> Any:
            return True

    async with connected(service_with(Wrong())) as client:
        with pytest.raises(HandlerFailed, match=r"returned True; it must return None, or a dict"):
            await claim(client)


async def test_an_abort_of_others_that_fails_is_tried_again(
    client: aqueduct.Client, shelf: NotedShelf
) -> None:
    await write(client, 0, 1, execution="former")
    shelf.fail["abort run"] = RuntimeError("the disk is gone")
    with pytest.raises(HandlerFailed, match="the disk is gone"):
        await claim(client)
    shelf.fail.clear()
    await claim(client)
    assert shelf.staged == {}


class WithoutNote(Shelf):
    def committed(self, write_key: WriteKey) -> Any:
        return None


class WithoutKey(NotedShelf):
    def committed(self) -> Any:  # type: ignore[override]
        return None


def test_the_methods_of_a_sink_with_notes_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"called as commit\(write_key, prepared, note\)"):
        service_with(WithoutNote())
    with pytest.raises(ConfigError, match=r"called as committed\(write_key\)"):
        service_with(WithoutKey())


@pytest.mark.requirement("AC-84")
@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({}, "no 'key' of the type str"),
        ({"key": 7, "execution": "e"}, "no 'key' of the type str"),
        ({"key": "", "execution": "e"}, "1 to 236 bytes"),
        ({"key": "x" * 237, "execution": "e"}, "1 to 236 bytes"),
        ({"key": "a\nb", "execution": "e"}, "printable"),
        ({"key": "k"}, "no 'execution' of the type str"),
        ({"key": "k", "execution": ""}, "1 to 256 bytes"),
        ({"key": "k", "execution": "e", "version": 2}, "version 2"),
    ],
)
async def test_a_document_that_is_no_claim(document: dict[str, Any], text: str) -> None:
    shelf = NotedShelf()
    async with connected(service_with(shelf)) as client:
        with pytest.raises(BadCall, match=text):
            await ask(client, CLAIM, json.dumps({"version": 1} | document))
    assert shelf.asked == []


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"commits": -1, "time_to_live": 1}, "counts from 0"),
        ({"commits": 1 << 63, "time_to_live": 1}, "counts from 0"),
        ({"commits": True, "time_to_live": 1}, "no 'commits' of the type int"),
        ({"commits": 1}, "no number 'time_to_live'"),
    ],
)
def test_an_answer_that_is_none(answer: dict[str, Any], text: str) -> None:
    with pytest.raises(BadCall, match=text):
        ClaimedKey.from_json(json.dumps({"version": 1} | answer), limit=LIMIT)


def test_a_key_of_the_largest_size_has_room_for_every_number() -> None:
    assert len(numbered("x" * 236, (1 << 63) - 1).key) == 256


async def test_an_abort_has_no_note(client: aqueduct.Client, shelf: NotedShelf) -> None:
    prepared = await write(client, 0, 1)
    await ask(client, ABORT, Settlement(numbered("k", 0), (prepared,)).to_json())
    assert shelf.staged == {} and shelf.there == {}


async def test_what_authorize_sees_of_a_key_is_the_key_that_is_worked_on(
    client: aqueduct.Client,
) -> None:
    commit_other = Settlement(numbered("k", 0), ()).to_json()
    for what, text in ((CLAIM, Claim("k", "e").to_json()), (COMMIT, commit_other)):
        with pytest.raises(BadCall, match="has the write key 'mine', and its document 'k"):
            await client.call(
                what + "shelf", to_batch(text), output_schema=DOCUMENT_SCHEMA, write_key="mine"
            )
    attempt = Attempt(numbered("k", 0), execution="e")
    stream = client.exchange(
        WRITE + "shelf",
        [numbers(1)],
        headers={ATTEMPT_HEADER: attempt.to_json()},
        write_key="mine",
    )
    with pytest.raises(BadCall, match="has the write key 'mine', and its document 'k/0'"):
        await stream.read_all()


async def test_a_note_has_a_limit_for_every_client(client: aqueduct.Client) -> None:
    with pytest.raises(BadCall, match=r"the note of a commit has \d+ bytes.*Sinks.note_bytes"):
        await commit(client, 0, note="x" * (1 << 17))
    assert (await claim(client)).commits == 0
