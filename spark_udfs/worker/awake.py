"""Signs of life for an executor while a service is slow.

With ``spark.python.worker.idleTimeoutSeconds`` an executor takes a Python worker for idle that has
sent nothing for so long, and with ``killOnIdleTimeout`` ends it. A worker that waits for a service
has nothing to send but batches without rows, which change no result. Spark's worker keeps them in
a buffer until that is full, so as many are given as fill it.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from types import MappingProxyType
from typing import Final, Generic, TypeVar

import pyarrow as pa

from aqueduct.escaping import logger_of

__all__ = ["TIMEOUTS", "idle_limit", "kept_awake", "local_property", "sign_after", "without_rows"]

log = logger_of("spark_udfs")

T = TypeVar("T")

TIMEOUTS: Final = (
    "spark.sql.execution.pyspark.udf.idleTimeoutSeconds",
    "spark.python.worker.idleTimeoutSeconds",
)
"""The settings of Spark; the first one that is set counts."""
_UNITS: Final = MappingProxyType(
    {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
)
_SIGNS: Final = 3
"""Signs of life in the time after which Spark takes a worker for idle."""
_LEAVE: Final = 5.0
"""Seconds until a thread that still waits for an answer is left to the end of the process."""
_SURPLUS: Final = 1024
"""Bytes above the size of Spark's buffer, so that it is full whatever was in it."""


def local_property(name: str) -> str | None:
    """A setting or property of the running task's job; None outside a task, and if it is not set.

    Settings of the session travel with each query, those of Spark among them.
    """
    pyspark = sys.modules.get("pyspark")
    context = None if pyspark is None else pyspark.TaskContext.get()
    return None if context is None else context.getLocalProperty(name)


def idle_limit() -> float | None:
    """Seconds after which Spark takes this task's worker for idle; None: never."""
    given = next(filter(None, map(local_property, TIMEOUTS)), None)
    if given is None:
        return None
    found = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", given.lower())
    if found is None or found[2] not in _UNITS:
        log.warning("the idle timeout of Spark's workers is %r, which is no time known here", given)
        return None
    return int(found[1]) * _UNITS[found[2]] or None


def sign_after(limit: float | None) -> float | None:
    """Seconds of silence after which a sign of life is due, for an idle timeout of ``limit``."""
    return None if limit is None else limit / _SIGNS


def without_rows(schema: pa.Schema) -> list[pa.RecordBatch]:
    """Batches of ``schema`` without rows, as many as make Spark's worker send what it has."""
    arrays = [pa.array([], field.type) for field in schema]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    buffer = int(os.environ.get("SPARK_BUFFER_SIZE", 1 << 16)) + _SURPLUS
    return [batch] * -(-buffer // pa.ipc.get_record_batch_size(batch))


def kept_awake(
    answers: Generator[T], limit: float, nothing: Callable[[], Sequence[T]]
) -> Generator[T]:
    """``answers``, and ``nothing()`` three times in each ``limit`` seconds without one.

    ``answers`` runs in a thread of its own, which works only while this one waits for it. Closing
    this closes ``answers``; one that waits then is left after 5 s, as Spark ends its process.
    """
    with contextlib.closing(_Apart(answers)) as apart:
        while True:
            apart.begin()
            while not apart.wait(sign_after(limit)):
                yield from nothing()
            made = apart.take()
            if not made:
                return
            yield made[0]


class _Apart(Generic[T]):
    """A generator whose steps are made in another thread, one at a time."""

    def __init__(self, answers: Generator[T]) -> None:
        self._answers = answers
        self._steps: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[tuple[T, ...] | BaseException] = queue.SimpleQueue()
        self._ready: tuple[T, ...] | BaseException | None = None
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._work,), name="aqueduct-answers", daemon=True
        )
        self._thread.start()

    def begin(self) -> None:
        """Lets the next step be made."""
        self._steps.put(True)

    def wait(self, seconds: float | None) -> bool:
        """Whether the step is made, for which ``seconds`` are waited."""
        try:
            self._ready = self._made.get(timeout=seconds)
        except queue.Empty:
            return False
        return True

    def take(self) -> tuple[T, ...]:
        """What the step gave; () at the end. Raises what it raised."""
        made, self._ready = self._ready, None
        if isinstance(made, BaseException):
            raise made
        assert made is not None
        return made

    def close(self) -> None:
        """Closes the generator, if it is not in the middle of a step for long."""
        self._steps.put(False)
        self._thread.join(_LEAVE)
        if self._thread.is_alive():
            log.warning("an answer is still waited for after %.0f s: its thread is left", _LEAVE)

    def _work(self) -> None:
        with contextlib.closing(self._answers):
            while self._steps.get():
                try:
                    self._made.put((next(self._answers),))
                except StopIteration:
                    self._made.put(())
                except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                    self._made.put(error)
