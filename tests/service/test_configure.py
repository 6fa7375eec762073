"""Settings that a service gets after its sinks and tables, and those of its operator."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from aqueduct.carriers.certificates import ServerTls
from aqueduct.config import Config, Sinks, Tables, Timing
from aqueduct.errors import ConfigError, LocalProtocolError
from aqueduct.rpc.benchmark import BENCHMARK
from aqueduct.service.operated import as_operated
from aqueduct.service.service import Service
from aqueduct.settings.places import read_settings

ROWS = pa.schema([pa.field("row", pa.int64())])


class Shelf:
    def open(self, attempt: Any, call: Any) -> Any: ...

    def commit(self, write_key: Any, attempts: Any) -> Any: ...

    def abort(self, write_key: Any, attempts: Any) -> Any: ...


async def test_other_settings_hold_for_all_that_is_registered() -> None:
    service = Service("shelf")
    own = service.sink("own", Shelf(), schema=ROWS, time_to_live="5s")
    sink = service.sink("shelf", Shelf(), schema=ROWS)

    @service.table(schema=ROWS)
    def numbers(call: Any) -> Any:
        yield

    config = Config(
        sinks=Sinks(attempts=3, time_to_live=9),
        tables=Tables(splits=4),
        timing=Timing(stop_timeout=0.5),
    )
    service.on_stop(lambda: None)
    service.configure(config)
    assert service.config is config
    assert (sink.limits, sink.attempts.limit, sink.time_to_live) == (config.sinks, 3, 9)
    assert own.time_to_live == 5
    assert service._tables["numbers"].limits is config.tables
    assert service._lifetime.kept(25) == 0.5
    with pytest.raises(ConfigError, match=r"^Service\.configure: config is {}; it must be an"):
        service.configure({})  # type: ignore[arg-type]
    async with service.serving("memory://configure"):
        with pytest.raises(LocalProtocolError, match="'shelf' is served, and its settings are"):
            service.configure(Config())
    service.configure(Config())


def test_the_benchmark_handler_comes_and_goes_by_settings() -> None:
    plain, measured = Service("plain"), Service("measured", benchmark=True)
    for service, given, there in (
        (plain, None, False),
        (plain, True, True),
        (plain, None, True),
        (plain, False, False),
        (measured, None, True),
        (measured, False, False),
    ):
        service.configure(Config(), benchmark=given)
        assert (BENCHMARK in service.handlers) is there


NOTHING: dict[str, Any] = {
    "certificate": None,
    "key": None,
    "key_password": None,
    "client_ca": None,
    "dev_certificate": False,
    "tls": None,
    "origins": (),
    "drain": 9.0,
}


def operated(variables: dict[str, str], **given: Any) -> tuple[Any, dict[str, Any]]:
    found = read_settings(environment={f"AQUEDUCT_SERVE_{k}": v for k, v in variables.items()})
    return as_operated(found, ("memory://x",), {**NOTHING, **given})


def test_a_program_serves_as_it_says_where_its_operator_says_nothing() -> None:
    assert operated({}, certificate="c") == (("memory://x",), {**NOTHING, "certificate": "c"})


def test_what_the_operator_says_counts_more_than_arguments() -> None:
    places, options = operated(
        {"LISTEN": "memory://y, memory://z", "ORIGINS": "https://a.example"}, origins=("null",)
    )
    assert places == ("memory://y", "memory://z")
    assert options == {**NOTHING, "origins": ("https://a.example",)}
    found = read_settings(environment={"AQUEDUCT_TIMING_DRAIN_TIMEOUT": "3s"})
    assert as_operated(found, ("memory://x",), NOTHING)[1] == {**NOTHING, "drain": None}


def test_the_certificate_of_an_operator_takes_the_place_of_the_program_s() -> None:
    _, options = operated(
        {"CERTIFICATE": "theirs", "KEY": "k"},
        certificate=b"ours",
        key=b"our key",
        key_password="ours",
        client_ca="ca",
    )
    wanted = {"certificate": "theirs", "key": "k", "client_ca": "ca"}
    assert options == {**NOTHING, **wanted}
    _, options = operated({"CERTIFICATE": "theirs"}, dev_certificate=True, client_ca="ca")
    assert options == {**NOTHING, "certificate": "theirs", "client_ca": "ca"}
    tls = ServerTls(b"ours", b"our key", "ours", "ca")
    _, options = operated({"CERTIFICATE": "theirs", "KEY": "k"}, tls=tls)
    assert options == {**NOTHING, **wanted}  # who may connect does not change by this
    _, options = operated({"DEV_CERTIFICATE": "true"}, tls=tls)
    assert options == {**NOTHING, "dev_certificate": True, "client_ca": "ca"}
    _, options = operated({"CLIENT_CA": "theirs"}, tls=tls)
    assert options == {**NOTHING, "tls": ServerTls(b"ours", b"our key", "ours", "theirs")}


def test_run_has_no_workers() -> None:
    assert operated({"WORKERS": "1"})[0] == ("memory://x",)
    with pytest.raises(ConfigError, match=r"^AQUEDUCT_SERVE_WORKERS is 2, but Service\.run serves"):
        operated({"WORKERS": "2"})


@pytest.mark.parametrize("name", ["KEY", "KEY_PASSWORD", "CLIENT_CA"])
def test_what_belongs_to_a_certificate_needs_one(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^AQUEDUCT_SERVE_{name} was given without a cert"):
        operated({name: "hush"})
