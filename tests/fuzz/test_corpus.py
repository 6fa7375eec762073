"""Every known input of the fuzzers once more, by the modules as they are installed.

So what was found once stays mended, and the corpus stays valid, without a fuzzer or a sanitizer.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz import codec
from tests.fuzz.seeds import SEEDS
from tests.fuzz.source import EDGES, Source
from tests.speedups.strategies import as_tuple

HERE = Path(__file__).parent
TARGETS = (
    *("arrow", "bpmux", "codec", "control-streams"),
    *("operations", "reactivesocket", "relink", "wire"),
)


def target(name: str) -> Callable[[bytes], None]:
    module = importlib.import_module(f"tests.fuzz.{name.replace('-', '_')}")
    found: Callable[[bytes], None] = module.target
    return found


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("kind", ["corpus", "regressions"])
def test_known_inputs(name: str, kind: str) -> None:
    run = target(name)
    failed = []
    paths = [path for path in sorted((HERE / kind / name).glob("*")) if path.suffix != ".md"]
    for path in paths:
        try:
            run(path.read_bytes())
        except Exception as error:  # noqa: BLE001 - any is a finding, and all are told
            failed.append(f"{path}: {''.join(traceback.format_exception(error, limit=-3))}")
    assert not failed, "\n".join(failed)
    assert kind != "corpus" or len(paths) > 50


@pytest.mark.parametrize("name", TARGETS)
def test_what_the_fuzzers_begin_with(name: str) -> None:
    """A sample: `ci/fuzz.sh merge` makes the corpus of all of them."""
    seeds = list(SEEDS[name]())
    assert len(set(seeds)) > 100
    run = target(name)
    for seed in seeds[:: len(seeds) // 30]:
        run(seed)


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in HERE.glob("*/*/*")) < 1 << 20


@pytest.mark.parametrize("name", TARGETS)
def test_an_empty_input_is_one(name: str) -> None:
    target(name)(b"")


# The targets can fail


def test_a_decoder_that_loses_a_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    route_and_message = b"\x00\x00\x03\x00\x04\x00\x00\x00\x01x"
    codec.target(route_and_message)
    monkeypatch.setattr(
        codec, "as_tuple", lambda frame: tuple(v[:-1] if v == b"x" else v for v in as_tuple(frame))
    )
    with pytest.raises(AssertionError):
        codec.target(route_and_message)


# Decisions


def test_decisions_end_with_their_bytes() -> None:
    source = Source(bytes([7, 255, 3, 1, 2]))
    assert (source.below(4), source.byte(), source.flag()) == (3, 255, True)
    assert not source.empty
    assert source.take(9) == b"\x01\x02"
    assert source.empty
    assert (source.byte(), source.below(9), source.flag(), source.number()) == (0, 0, False, 0)
    assert source.rest() == b""


def test_numbers_are_small_or_at_an_edge() -> None:
    assert Source(bytes([223])).number() == 223
    assert Source(bytes([224, 1, 2])).number() == 0x201
    assert [Source(bytes([248 + n])).number() for n in range(8)] == list(EDGES)
