"""What a Spark user meets of ``exchange``: settings, columns, schemas, and how it travels."""

from __future__ import annotations

import os
import pickle
import stat
import sys
import threading
from pathlib import Path

import pytest

from aqueduct.carriers.certificates import ClientTls
from aqueduct.errors import (
    ConfigError,
    ConnectFailed,
    Refused,
    SchemaMismatch,
    UnknownHandler,
)
from spark_udfs import exchange, exchange_pandas
from spark_udfs.options import PREFIX
from spark_udfs.worker.pickling import library_version
from tests.spark.services import make

ROOT = Path(__file__).parent.parent.parent
NOBODY = "aqueduct+tcp://127.0.0.1:9"

pytestmark = pytest.mark.spark


@pytest.fixture
def address(service, running):
    with running(service, "aqueduct+tcp://127.0.0.1:0", dev_certificate=False) as address:
        yield address


@pytest.fixture
def settings(spark):
    names = []

    def give(**values):
        for name, value in values.items():
            names.append(PREFIX + name)
            spark.conf.set(names[-1], value)

    yield give
    for name in names:
        spark.conf.unset(name)


@pytest.fixture
def python(spark, tmp_path):
    """Lets the workers of the next jobs be another Python: a program that begins as ours does."""
    context = spark.sparkContext
    usual = context.pythonExec

    def use(*lines):
        program = tmp_path / "python"
        program.write_text("\n".join(["#!/bin/sh", *lines, f'exec "{sys.executable}" "$@"', ""]))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        context.pythonExec = str(program)

    yield use
    context.pythonExec = usual


def failure(frame):
    """The text of the error that the driver gets."""
    from pyspark.errors import PythonException

    with pytest.raises(PythonException) as caught:
        frame.collect()
    return str(caught.value)


def rows(spark, count=1000, partitions=3):
    return spark.range(0, count, 1, partitions).selectExpr("id as key", "id", "'x' as more")


# Arguments and settings


def test_settings_are_the_arguments_that_are_not_given(spark, address, settings):
    settings(address=address, inFlight="3", deadline="30s", **{"header.team": "blue"})
    call = exchange(handler="double", headers={"who": "me"})
    assert call.calling.addresses == (address,)
    assert (call.calling.in_flight, call.calling.deadline) == (3, 30.0)
    assert dict(call.calling.headers) == {"team": "blue", "who": "me"}
    assert spark.range(10).mapInArrow(call, "id long").count() == 10
    call = exchange(NOBODY, "double", in_flight=5, deadline="none")
    assert call.calling.addresses == (NOBODY,)
    assert (call.calling.in_flight, call.calling.deadline) == (5, None)


def test_certificates_are_taken_as_a_whole(settings):
    settings(ca="/set/ca.pem", server_name="set")
    assert exchange(NOBODY, "x").calling.tls == ClientTls(ca="/set/ca.pem", server_name="set")
    assert exchange(NOBODY, "x", ca="/given.pem").calling.tls == ClientTls(ca="/given.pem")
    given = ClientTls(verify=False)
    assert exchange(NOBODY, "x", tls=given).calling.tls == given
    with pytest.raises(ConfigError, match="tls and ca are both given"):
        exchange(NOBODY, "x", tls=given, ca="/given.pem")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"in_fligth": 3},
            "unknown option in_fligth; did you mean in_flight? there are address, backoff, ",
        ),
        (
            {"address": None},
            (
                "no address: give exchange(ADDRESS, HANDLER), or set spark.aqueduct.address on the "
                "session; for example aqueduct://scores.example:4433"
            ),
        ),
        ({"handler": None}, "no handler: give its name, exchange(ADDRESS, HANDLER)"),
        ({"handler": ""}, "option handler is ''; it must be the name of a handler"),
    ],
)
def test_what_cannot_be_called_fails_on_the_driver(spark, arguments, message):
    with pytest.raises(ConfigError) as caught:
        exchange(**{"address": NOBODY, "handler": "x", **arguments})
    assert str(caught.value).startswith(message)


def test_a_token_that_cannot_be_pickled_is_named_on_the_driver(spark):
    lock = threading.Lock()

    def token():
        with lock:
            return "secret"

    with pytest.raises(ConfigError) as caught:
        exchange(NOBODY, "x", token=token)
    assert str(caught.value) == (
        "token cannot be sent to the executors: TypeError: cannot pickle '_thread.lock' object. "
        "It is pickled, and must hold no lock, file, connection or Spark session: hold plain "
        "values, and open what you need inside the function"
    )


def test_a_session_in_a_token_is_named_on_the_driver(spark):
    with pytest.raises(ConfigError, match=r"^token cannot be sent to the executors: "):
        exchange(NOBODY, "x", token=lambda: spark.conf.get("my.token"))


def test_a_token_is_asked_for_in_the_executor(spark, running):
    pid = os.getpid()

    def authorize(call):
        if call.token != "open sesame":
            raise Refused("no entry")

    def token():
        return "open sesame" if os.getpid() != pid else "the driver's"

    service = make(authorize=authorize)
    with running(service, "aqueduct+tcp://127.0.0.1:0", dev_certificate=False) as address:
        call = exchange(address, "double", token=token)
        assert spark.range(0, 10, 1, 2).mapInArrow(call, "id long").count() == 10

        def broken():
            raise OSError("the vault is shut")

        frame = spark.range(1).mapInArrow(exchange(address, "double", token=broken), "id long")
        text = failure(frame)
        assert "ConfigError: token, which is asked for each call, raised OSError: the vault" in text


def test_secrets_stay_out_of_what_is_shown(spark):
    pem = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"
    call = exchange(NOBODY, "x", token="s3cret", certificate="/c.pem", key=pem, key_password="pa55")
    frame = spark.range(1).mapInArrow(call, "id long")
    plan = frame._jdf.queryExecution().toString()
    assert "exchange_x" in plan
    for shown in (repr(call), repr(call.calling), str(call), plan):
        for secret in ("s3cret", "c2VjcmV0", "pa55"):
            assert secret not in shown


# Columns and schemas


def test_rows_are_joined_in_every_partition(spark, address, service):
    call = exchange(address, "double", columns=["id"], columns_mode="replace")
    found = rows(spark).transform(call.apply)
    assert found.schema.simpleString() == "struct<key:bigint,id:bigint,more:string>"
    assert all(row.id == 2 * row.key and row.more == "x" for row in found.collect())
    assert found.count() == 1000
    empty = rows(spark).where("id < 0").transform(call.apply)
    assert empty.collect() == []
    assert service.counters()["rows_in"] == 2000


def test_the_schema_to_declare_is_asked_for(spark, address):
    frame = rows(spark)
    append = exchange(address, "hundredfold", columns=["id"])
    with pytest.raises(ConfigError, match="'id' has the name of a column of the rows"):
        append.output_schema(frame)
    mode: dict = {"columns": ["id"], "columns_mode": "replace"}
    call = exchange(address, "certain", **mode, on_error="null", error_column="why")
    wanted = "struct<key:bigint,id:bigint,more:string,why:string>"
    assert call.output_schema(frame).simpleString() == wanted
    assert call.output_schema(frame.schema) == call.output_schema(frame)
    ddl = "key bigint not null, id bigint not null, more string not null"
    assert call.output_schema(ddl) == call.output_schema(frame)
    nullable = {field.name: field.nullable for field in call.output_schema(frame)}
    assert nullable == {"key": False, "id": True, "more": False, "why": True}
    echo = exchange(address, "echo")  # whose answer depends on what is sent
    assert echo.output_schema(frame) == frame.schema
    told = exchange(NOBODY, "x", schema="points double", columns=["id"])  # asks nobody
    wanted = "struct<key:bigint,id:bigint,more:string,points:double>"
    assert told.output_schema(frame).simpleString() == wanted


def test_what_does_not_fit_is_seen_on_the_driver(spark, address, service):
    frame = rows(spark)
    with pytest.raises(SchemaMismatch, match="handler 'words': column 'word' is missing"):
        exchange(address, "words", columns=["id"]).output_schema(frame)
    with pytest.raises(UnknownHandler) as caught:
        exchange(address, "duoble").output_schema(frame)
    assert str(caught.value).startswith(
        "the service 'test' has no handler 'duoble' of the kind exchange; did you mean 'double'? "
        "it has 'echo', 'double', "
    )
    with pytest.raises(ConnectFailed, match=r"127\.0\.0\.1:9"):
        exchange(NOBODY, "x").output_schema(frame)
    with pytest.raises(ConfigError, match=r"columns names 'kee', .* did you mean 'key'"):
        exchange(address, "double", columns="kee").output_schema(frame)
    assert service.counters()["rows_in"] == 0


def test_an_answer_that_spark_has_no_type_for(spark, running):
    import pyarrow as pa

    service = make()
    wide = pa.schema([("half", pa.float16()), ("big", pa.decimal256(50, 2))])
    service.handler("wide", output=wide)(lambda batch: batch)
    with running(service, "aqueduct+tcp://127.0.0.1:0", dev_certificate=False) as address:
        with pytest.raises(ConfigError) as caught:
            exchange(address, "wide").output_schema("id long")
        assert str(caught.value) == (
            "the answer of 'wide': column 'big' is decimal256(50, 2), and Spark has no such type; "
            "Spark has 38 digits: give decimal128(38, s), or text, or name another in schema= and "
            "let cast=True make it"
        )


def test_frames_are_cast_to_what_the_handler_declares(spark, address):
    frame = spark.sql("select 'a' as WORD, cast(id as int) as id from range(5)")
    found = frame.transform(exchange(address, "words", cast=True).apply)
    assert found.schema.simpleString() == "struct<id:bigint,word:string>"
    assert [(row.id, row.word) for row in found.collect()] == [(n, "a") for n in range(5)]


# Travelling


def test_a_worker_without_the_package_says_so(spark, python):
    site = next(path for path in sys.path if path.endswith("site-packages"))
    # Without site packages there is no hook of an editable installation.
    python("cd /", f'export PYTHONPATH="{site}"', 'set -- -S "$@"')
    frame = spark.range(1)
    text = failure(frame.mapInArrow(exchange(NOBODY, "x"), "id long"))
    pandas = failure(frame.mapInPandas(exchange_pandas(NOBODY, "x"), "id long"))
    assert "ModuleNotFoundError: the Python worker of this executor cannot import" in pandas
    assert (
        "ModuleNotFoundError: the Python worker of this executor cannot import aqueduct-arrow "
        "(No module named 'spark_udfs'). It is "
    ) in text
    for part in (sys.executable, f"pip install aqueduct-arrow=={library_version()}", "venv-pack"):
        assert part in text


def test_a_worker_of_another_version_says_so(spark, python, tmp_path):
    folder = tmp_path / "aqueduct_arrow-7.5.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: aqueduct-arrow\nVersion: 7.5.1")
    # A build leaves metadata in the project's folder, where a worker would look first.
    python(f'cd "{tmp_path}"; export PYTHONPATH="{tmp_path}:$PYTHONPATH"')
    text = failure(spark.range(1).mapInArrow(exchange(NOBODY, "x"), "id long"))
    assert (
        f"ConfigError: the driver has aqueduct-arrow {library_version()}, and this executor's "
        f"Python ({sys.executable}) has 7.5.1; the first two numbers must be the same: "
        f"pip install aqueduct-arrow=={library_version()} there"
    ) in text


def test_the_function_pickles_without_spark_too():
    call = exchange(NOBODY, "x", token="secret", columns=["a"])
    copy = pickle.loads(pickle.dumps(call))
    assert copy == call
    assert (copy.write_key, copy.shape.columns) == (call.write_key, ("a",))
