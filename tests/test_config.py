"""Settings travel to the tasks of Spark."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from aqueduct.config import DEFAULT, Calls, Stream
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
    make: Callable[..., Stream] = Stream
    with pytest.raises(ConfigError, match=rf"Stream\.{name} is 1073741825; a socket takes at most"):
        make(**{name: (1 << 30) + 1})
    assert getattr(make(**{name: 1 << 30}), name) == 1 << 30


@pytest.mark.parametrize("size", [1, 32 << 10, (64 << 10) + 1, (1 << 30) + 4096])
def test_memory_that_cannot_be_shared(size):
    with pytest.raises(ConfigError, match=rf"Stream\.shared_memory is {size}; whole pages of 4096"):
        Stream(shared_memory=size)


@pytest.mark.parametrize("name", ["sixteen-letters-", "größer", "a\0b", None, 5])
def test_names_that_no_congestion_control_has(name):
    said = re.escape(f"Stream.loopback_congestion is {name!r}; a congestion")
    with pytest.raises(ConfigError, match=said):
        Stream(loopback_congestion=name)


def test_memory_that_can_be_shared_and_none():
    assert [Stream(shared_memory=size).shared_memory for size in (0, 64 << 10)] == [0, 64 << 10]
    with pytest.raises(ConfigError, match=r"Stream\.shared_memory_after"):
        Stream(shared_memory_after=-1)
