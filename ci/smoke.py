"""Tries an installed wheel: the compiled modules import, and a loopback exchange passes.

Run it as ``python -I ci/smoke.py``, so that nothing is imported from where it stands.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pyarrow as pa

import aqueduct

TIME_LIMIT = 60.0
SCHEMA = pa.schema([("key", pa.int64()), ("text", pa.string())])


def check_compiled_modules() -> int:
    """Imports every module that has a stub, and sees that it is compiled and installed."""
    package = Path(aqueduct.__file__).parent
    if not package.is_relative_to(sys.prefix):
        sys.exit(f"aqueduct is imported from {package}, not from the wheel in {sys.prefix}")
    compiled = package / "_speedups"
    stubs = sorted(compiled.rglob("*.pyi"))
    if not stubs:
        sys.exit(f"no stub in {compiled}")
    for stub in stubs:
        module = importlib.import_module(
            ".".join(stub.relative_to(package.parent).with_suffix("").parts)
        )
        path = Path(str(module.__file__))
        # Beside its stub, or in the one file that has all of them.
        if path.parent not in (stub.parent, compiled) or not path.name.endswith(
            tuple(EXTENSION_SUFFIXES)
        ):
            sys.exit(f"{module.__name__} is {path}, not a compiled module of {compiled}")
    return len(stubs)


def exchange(address: str, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Sends the batches through the handler `echo` and returns what comes back."""
    with aqueduct.SyncClient(address) as client:
        return list(client.exchange("echo", batches, schema=SCHEMA))


async def check_loopback() -> int:
    """Serves `echo` on the loopback and exchanges batches with it."""
    service = aqueduct.Service("smoke")

    @service.handler("echo", kind="exchange")
    def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    batches = [
        pa.record_batch([range(n, n + 1000), [f"row {n}"] * 1000], schema=SCHEMA) for n in range(50)
    ]
    async with service.serving("aqueduct://127.0.0.1:0", dev_certificate=True) as running:
        answer = await asyncio.to_thread(exchange, running.addresses[0], batches)
    if answer != batches:
        sys.exit("what came back from `echo` is not what was sent")
    return sum(batch.num_rows for batch in answer)


def main() -> None:
    """Runs both checks within the time limit."""
    faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
    modules = check_compiled_modules()
    rows = asyncio.run(check_loopback())
    print(f"{modules} compiled modules imported, {rows} rows exchanged")


if __name__ == "__main__":
    main()
