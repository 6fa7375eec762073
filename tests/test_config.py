"""Settings travel to the tasks of Spark."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from aqueduct.config import DEFAULT, Bpmux, ByteStream, Calls, Config, Limits, Quic, Sinks, Timing
from aqueduct.errors import ConfigError


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_default_is_one_object_wherever_it_is_unpickled(protocol):
    assert pickle.loads(pickle.dumps(DEFAULT, protocol)) is DEFAULT
    assert copy.copy(DEFAULT) is DEFAULT


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_other_settings_travel_by_value(protocol):
    other = replace(DEFAULT, timing=replace(DEFAULT.timing, connect_timeout=3.5))
    found = pickle.loads(pickle.dumps(other, protocol))
    assert found == other
    assert found.timing.connect_timeout == 3.5


@pytest.mark.parametrize(("name", "value"), [("small_batches", 0), ("small_bytes", -1)])
def test_limits_of_small_batches_that_cannot_work(name, value):
    with pytest.raises(ConfigError, match=rf"Calls\.{name} is {value}"):
        Calls(**{name: value})


@pytest.mark.parametrize("name", ["notsent_lowat", "unix_buffer"])
def test_buffers_that_no_socket_takes(name):
    make: Callable[..., ByteStream] = ByteStream
    with pytest.raises(ConfigError, match=rf"Stream\.{name} is 1073741825; a socket takes at most"):
        make(**{name: (1 << 30) + 1})
    assert getattr(make(**{name: 1 << 30}), name) == 1 << 30


@pytest.mark.parametrize("size", [1, 32 << 10, (64 << 10) + 1, (1 << 30) + 4096])
def test_memory_that_cannot_be_shared(size):
    with pytest.raises(ConfigError, match=rf"Stream\.shared_memory is {size}; whole pages of 4096"):
        ByteStream(shared_memory=size)


@pytest.mark.parametrize("name", ["sixteen-letters-", "größer", "a\0b", None, 5])
def test_names_that_no_congestion_control_has(name):
    said = re.escape(f"ByteStream.loopback_congestion is {name!r}; a congestion")
    with pytest.raises(ConfigError, match=said):
        ByteStream(loopback_congestion=name)


def test_tickets_of_a_day_at_most() -> None:
    day: Any = "1d"
    assert Quic(ticket_lifetime=day).ticket_lifetime == 86_400
    with pytest.raises(ConfigError, match=r"Quic\.ticket_lifetime is 86401; .* 86400 s, a day"):
        Quic(ticket_lifetime=86_401)
    for name in ("tickets", "ticket_lifetime"):
        none: dict[str, Any] = {name: 0}
        with pytest.raises(ConfigError, match=rf"Quic\.{name} is 0"):
            Quic(**none)


def test_memory_that_can_be_shared_and_none():
    assert [ByteStream(shared_memory=size).shared_memory for size in (0, 64 << 10)] == [0, 64 << 10]
    with pytest.raises(ConfigError, match=r"Stream\.shared_memory_after"):
        ByteStream(shared_memory_after=-1)


PARTS: list[Any] = [getattr(DEFAULT, entry.name) for entry in fields(DEFAULT)]
SETTINGS = [(type(part), entry) for part in PARTS if is_dataclass(part) for entry in fields(part)]
NAMES = [f"{kind.__name__}.{entry.name}" for kind, entry in SETTINGS]


@pytest.mark.parametrize(("kind", "entry"), SETTINGS, ids=NAMES)
def test_every_setting_says_its_unit_and_refuses_what_is_none(kind: Any, entry: Any) -> None:
    """A plain int or float would not say whether it is bytes, seconds or a count."""
    assert entry.type not in ("int", "float")
    wrong: list[Any] = [[], {}, object(), b"1", float("nan"), float("inf"), True]
    if entry.type in ("Bytes", "Count", "Seconds", "Share"):
        wrong += [-1, "many", None]
    for value in wrong:
        if (entry.type, value) == ("tuple[str, ...]", []):
            continue  # none of them
        with pytest.raises(ConfigError, match=rf"^{kind.__name__}\.{entry.name}\b"):
            kind(**{entry.name: value})
    given = {"Bytes": "{}b", "Seconds": "{:f}s"}.get(entry.type)
    if given is not None:
        value = getattr(kind(), entry.name)
        assert getattr(kind(**{entry.name: given.format(value)}), entry.name) == value


def test_settings_are_durations_and_sizes() -> None:
    make: Any = Timing
    timing = make(idle_timeout="2min", ping_interval=timedelta(seconds=7), connect_timeout="500ms")
    assert (timing.idle_timeout, timing.ping_interval, timing.connect_timeout) == (120.0, 7.0, 0.5)
    limits: Any = Limits
    assert limits(frame_bytes="32m", header_bytes="64k").frame_bytes == 32 << 20
    sinks: Any = Sinks
    assert sinks(time_to_live="1d").time_to_live == 86_400.0
    mux: Any = Bpmux
    assert mux(chunk="128k").chunk == 128 << 10
    quic: Any = Quic
    assert quic(datagram_size="8k").datagram_size == 8192
    calls: Any = Calls
    assert calls(compressions="zstd, lz4").compressions == ("zstd", "lz4")
    assert calls(compressions=[]).compressions == ()
    with pytest.raises(ConfigError, match=r"^Timing\.idle_timeout: '30m': m is no unit .* 30min"):
        make(idle_timeout="30m")
    with pytest.raises(ConfigError, match="must be below"):
        make(idle_timeout="5s")


def test_what_a_kernel_cannot_take_is_refused() -> None:
    cases: list[tuple[Any, str]] = [(ByteStream, "backlog"), (ByteStream, "unix_buffer")]
    for kind, name in (*cases, (Quic, "socket_buffer")):
        with pytest.raises(ConfigError, match=f"{name} is 1099511627776; .* takes at most"):
            kind(**{name: 1 << 40})
    with pytest.raises(ConfigError, match="the most that is possible"):
        Limits(channels=1 << 64)


def test_a_part_of_the_settings_is_of_its_class() -> None:
    make: Any = Config
    for name, value in (("limits", {}), ("timing", None), ("flow", Limits()), ("calls", "fast")):
        with pytest.raises(ConfigError, match=rf"^Config\.{name} is .*an aqueduct\.config\."):
            make(**{name: value})
    with pytest.raises(ConfigError, match=r"^Config\.debug is 1; it must be True or False"):
        make(debug=1)


def test_threads_that_work_beside_the_event_loop():
    assert 2 <= Calls().threads_at_work <= 8
    assert Calls(work_threads=23).threads_at_work == 23
    with pytest.raises(ConfigError, match=r"Calls\.work_threads is -1"):
        Calls(work_threads=-1)
    with pytest.raises(ConfigError, match=r"Calls\.spark_tasks is -1"):
        Calls(spark_tasks=-1)
