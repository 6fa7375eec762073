"""Makes the pictures in docs/images: of the live page while a Spark job runs, and of the docs site.

``ci/env python ci/screenshots.py``: a service in a process of its own, a job of Spark in another,
and a Chromium without a window that looks at the admin port. It takes about a minute. Those of the
docs site come last, from ``build/site``; ``make docs`` builds it. ``ci/screenshots.py docs`` makes
these alone, and ``ci/screenshots.py docs FOLDER`` those of a site that was built elsewhere.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
IMAGES: Final = ROOT / "docs" / "images"
SITE: Final = ROOT / "build" / "site"
LOOKS: Final = 45
"""Seconds for which the page looks at the job before it is drawn."""
LARGEST: Final = 200_000
"""Bytes of one picture."""
PICTURES: Final = {
    "live-page-light.png": {"width": 1280, "height": 1400},
    "live-page-dark.png": {"width": 1280, "height": 1400, "dark": True},
    "live-page-phone.png": {"width": 390, "height": 1100},
}

PICTURES_OF_DOCS: Final = {
    "docs-site.png": "index.html",
    "docs-reference.png": "reference/client.html",
}
"""Pages of the docs site, by their pictures."""


def serve() -> None:
    """The service: a function of one batch, and a model of which two calls run at once."""
    import random

    import pyarrow as pa

    import aqueduct

    service = aqueduct.Service("scores")
    numbers = pa.schema([("id", pa.int64())])

    @service.handler("clean", input=numbers, output=numbers, concurrency=4)
    def clean(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(random.uniform(0.05, 0.3))
        return batch.slice(0, batch.num_rows * 9 // 10)

    @service.handler("score", input=numbers, output=numbers, max_concurrency=1)
    def score(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(random.uniform(0.05, 0.25))
        return batch

    service.run("aqueduct+tcp://127.0.0.1:0", admin="127.0.0.1:0")


def job(address: str) -> None:
    """A job of Spark: rows are cleaned, then scored."""
    from pyspark.sql import SparkSession

    from spark_udfs import exchange

    spark = (
        SparkSession.builder.master("local[4]")
        .appName("nightly scores")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "5000")
        .getOrCreate()
    )
    cleaned = exchange(address, "clean", retries=3)
    scored = exchange(address, "score", retries=3)
    rows = spark.range(0, 20_000_000, 1, numPartitions=200)
    rows.transform(cleaned.apply).transform(scored.apply).write.format("noop").mode(
        "overwrite"
    ).save()


@contextlib.contextmanager
def program(*arguments: str, output: int) -> Iterator[subprocess.Popen[str]]:
    """This program in another process, until the end of the block."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), *arguments],
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable},
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def places(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Where the service says that it listens: for clients, and for operators."""
    words: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        words += (word for word in line.split() if "://" in word)
        if len(words) == 2:
            operators, clients = sorted(words, key=lambda word: word.startswith("aqueduct"))
            return clients, operators
    raise SystemExit(f"the service ended with {process.wait()}")


def keep(name: str, picture: bytes) -> None:
    """Writes a picture that is small enough."""
    if len(picture) > LARGEST:
        raise SystemExit(f"{name} has {len(picture)} bytes, above {LARGEST}")
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / name).write_bytes(picture)
    print(f"{name}: {len(picture):,} bytes")


def with_few_colours(picture: bytes) -> bytes:
    """A picture of text with at most 256 colours, which takes half the bytes."""
    from PIL import Image  # comes with matplotlib

    made = io.BytesIO()
    with Image.open(io.BytesIO(picture)) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
            made, "PNG", optimize=True
        )
    return made.getvalue()


def docs_pages(site: Path) -> dict[str, str]:
    """The address of each page of the docs site in a folder, by the name of its picture."""
    for page in PICTURES_OF_DOCS.values():
        if not (site / page).is_file():
            raise SystemExit(f"{site} has no {page}: type make docs, or name another folder")
    return {name: (site / page).resolve().as_uri() for name, page in PICTURES_OF_DOCS.items()}


def docs(site: Path) -> None:
    """Makes the pictures of the docs site in a folder."""
    from tests.support import chromium, installed_programs

    program = installed_programs.installed("chromium")
    for name, url in docs_pages(site).items():
        with (
            tempfile.TemporaryDirectory() as folder,
            chromium.opened("about:blank", Path(folder), program=program) as page,
        ):
            page.command("Emulation.setScrollbarsHidden", hidden=True)
            page.appear(width=1300, height=900, scale=0.75)
            page.command("Page.navigate", url=url)
            page.until(f"location.href === {url!r} && document.readyState === 'complete'")
            keep(name, with_few_colours(page.screenshot()))


def live() -> None:
    """Makes the pictures of the live page."""
    from tests.support import chromium, installed_programs

    chromium.WAIT = 300.0
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(program("serve", output=subprocess.PIPE))
        address, place = places(service)
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        worker = stack.enter_context(program("job", address, output=log.fileno()))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        page = stack.enter_context(
            chromium.opened(f"{place}/", folder, program=installed_programs.installed("chromium"))
        )
        page.command("Emulation.setScrollbarsHidden", hidden=True)
        while not page.evaluate("document.querySelectorAll('#tasks tbody tr').length"):
            if worker.poll() is not None:
                log.seek(0)
                raise SystemExit(f"the job has ended: {log.read()}")
            time.sleep(0.2)
        page.command("Page.reload")  # its charts begin now
        page.evaluate(f"new Promise(done => setTimeout(done, {LOOKS * 1000}))")
        for name, given in PICTURES.items():
            page.appear(**given)  # type: ignore[arg-type]
            looks = page.evaluate("Number(document.documentElement.dataset.looks)")
            page.until(f"Number(document.documentElement.dataset.looks) > {looks}")
            keep(name, page.screenshot())


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    elif sys.argv[1:2] == ["job"]:
        job(sys.argv[2])
    elif sys.argv[1:2] == ["docs"]:
        docs(Path(sys.argv[2]) if sys.argv[2:] else SITE)
    else:
        docs_pages(SITE)  # without the site it ends before the job begins
        live()
        docs(SITE)
