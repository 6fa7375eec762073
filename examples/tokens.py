"""A service for callers with tokens, and three callers: each may do what its token says.

    python examples/tokens.py

The file of tokens is made here. Otherwise `aqueduct token NAME --file tokens.txt` makes its lines.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

import aqueduct
from aqueduct.service.token_file import append_line, make_token, token_line

NUMBERS = pa.schema([("x", pa.int64())])


def make_service(tokens: Path) -> aqueduct.Service:
    """Two handlers, for those who are in the file."""
    service = aqueduct.Service("numbers", authorize=aqueduct.TokenFile(tokens, recheck=0))

    @service.handler(input=NUMBERS)
    def double(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"x": pc.multiply(batch["x"], 2)}, schema=NUMBERS)

    @service.handler(input=NUMBERS)
    def square(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"x": pc.multiply(batch["x"], batch["x"])}, schema=NUMBERS)

    return service


async def attempt(client: aqueduct.Client, handler: str, token: str | None) -> None:
    """Calls a handler, and prints the answer or why there is none."""
    batch = pa.record_batch({"x": [3]}, schema=NUMBERS)
    try:
        answer = await client.call(handler, batch, token=token)
    except aqueduct.errors.Refused as error:
        print(f"{handler}: {error}")
    else:
        print(f"{handler}: {answer['x'].to_pylist()}")


async def main() -> None:
    """Serves, and calls."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.txt"
        admin, guest = make_token(), make_token()
        append_line(tokens, token_line("admin", admin))
        append_line(tokens, token_line("guest", guest, handlers=["double"]))
        service = make_service(tokens)
        async with service.serving(f"aqueduct+unix://{folder}/numbers") as serving:
            async with await aqueduct.Client.connect(serving.addresses[0]) as client:
                await attempt(client, "square", admin)
                await attempt(client, "double", guest)
                await attempt(client, "square", guest)
                await attempt(client, "double", None)
                tokens.write_text(token_line("admin", admin) + "\n")  # the guest leaves
                await attempt(client, "double", guest)


if __name__ == "__main__":
    asyncio.run(main())
