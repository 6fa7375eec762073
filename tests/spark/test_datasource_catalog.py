"""Tables of Spark's catalog and views over ``aqueduct``: what SQL can do by a name."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.errors import ConfigError
from spark_udfs import register
from spark_udfs.datasource.options import settings_of
from tests.sinks.shelf import Shelf
from tests.support.selection import mostly_long

pytestmark = pytest.mark.spark

ROWS = pa.schema([("id", pa.int64())])
MODES = ("append", "overwrite", "ignore", "error")


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def address(spark: Any, shelf: Shelf, running: Any) -> Any:
    """A service with a table and a sink, both called ``words``."""
    register(spark)
    service = aqueduct.Service("test")
    batch = pa.record_batch([pa.array([1, 2])], schema=ROWS)
    service.table("words", schema=ROWS)(lambda: (yield batch))
    service.sink("words", shelf, schema=ROWS)
    with running(service, "aqueduct+tcp://127.0.0.1:0", dev_certificate=False) as found:
        yield found


@pytest.fixture
def name(spark: Any, request: pytest.FixtureRequest) -> Any:
    """A name in the catalog, free before and after."""
    found = "table_of_" + "".join(each if each.isalnum() else "_" for each in request.node.name)
    yield found
    spark.catalog.dropTempView(found)
    spark.sql(f"drop table if exists {found}")


def options(address: str) -> str:
    return f"(address '{address}', handler 'words')"


def beside(address: str) -> str:
    return f"with (address = '{address}', handler = 'words')"


def nothing_came(action: Any) -> None:
    """The error says what Spark does not do, and names ways that work."""
    with pytest.raises(Exception, match="ConfigError: no options came") as caught:
        action()
    for part in ("hands none of them", "WITH (address", "CREATE TEMPORARY VIEW", ".table(NAME)"):
        assert part in str(caught.value)


@pytest.mark.parametrize("columns", ["", "(id bigint)"])
def test_a_catalog_table_is_made_and_used_with_its_options_beside(
    spark: Any, address: str, shelf: Shelf, name: str, columns: str
) -> None:
    spark.sql(
        f"create table {name} {columns} using aqueduct options {options(address)} "
        "comment 'words' tblproperties ('owner of it' = 'me', 'handler' = 'other')"
    )
    described = spark.sql(f"describe table {name}").collect()
    assert [(row.col_name, row.data_type) for row in described] == [("id", "bigint")]

    found = spark.sql(f"select sum(id) from {name} {beside(address)}").first()
    assert found[0] == 3
    given = {"address": address, "handler": "words"}
    assert spark.read.options(**given).table(name).count() == 2
    spark.sql(f"insert into {name} {beside(address)} values (5)")
    spark.range(7, 8).writeTo(name).options(**given).append()
    assert shelf.rows == [5, 7]
    spark.sql(f"insert overwrite {name} {beside(address)} values (6)")
    assert shelf.rows == [6]

    nothing_came(lambda: spark.sql(f"select * from {name}").collect())
    nothing_came(lambda: spark.table(name).collect())
    nothing_came(lambda: spark.sql(f"insert into {name} values (5)"))
    nothing_came(lambda: spark.range(1).write.insertInto(name))
    spark.sql(f"drop table {name}")
    assert not spark.catalog.tableExists(name)


def test_a_catalog_table_takes_its_handler_from_the_path(
    spark: Any, address: str, name: str
) -> None:
    spark.sql(f"create table {name} using aqueduct options (address '{address}', path 'words')")
    assert spark.sql(f"describe table {name}").first().col_name == "id"


def test_a_catalog_table_with_a_wrong_option_is_not_made(
    spark: Any, address: str, name: str
) -> None:
    with pytest.raises(Exception, match="unknown option hanlder; did you mean handler"):
        spark.sql(
            f"create table {name} using aqueduct options (address '{address}', hanlder 'words')"
        )
    assert not spark.catalog.tableExists(name)
    nothing_came(lambda: spark.sql(f"create table {name} using aqueduct"))
    nothing_came(
        lambda: spark.sql(
            f"create table {name} using aqueduct options {options(address)} as select 1L as id"
        )
    )
    assert not spark.catalog.tableExists(name)


def test_save_as_table_writes_in_every_mode_and_says_how_it_is_read(
    spark: Any, address: str, shelf: Shelf, name: str
) -> None:
    frame = spark.range(2)

    def save(mode: str) -> None:
        writer = frame.write.format("aqueduct").options(address=address, handler="words")
        writer.mode(mode).saveAsTable(name)

    for number, mode in enumerate(MODES, 1):
        save(mode)
        assert len(shelf.asked_for("commit")) == number
        nothing_came(lambda: spark.table(name).collect())
        assert spark.sql(f"select * from {name} {beside(address)}").count() == 2
        spark.sql(f"drop table {name}")
    save("append")
    commits = len(shelf.asked_for("commit"))
    save("append")
    save("overwrite")
    save("ignore")
    with pytest.raises(Exception, match="TABLE_OR_VIEW_ALREADY_EXISTS"):
        save("error")
    assert len(shelf.asked_for("commit")) == commits + 2


@pytest.mark.parametrize(
    ("columns", "handler"),
    mostly_long(
        itertools.product(("", "(id bigint)"), ("handler", "path")),
        *(("", "path"), ("(id bigint)", "handler")),
    ),
)
def test_a_temporary_view_is_read_and_written_by_its_name(
    spark: Any, address: str, shelf: Shelf, name: str, columns: str, handler: str
) -> None:
    spark.sql(
        f"create temporary view {name} {columns} using aqueduct "
        f"options (address '{address}', {handler} 'words')"
    )
    assert [row.id for row in spark.sql(f"select id from {name} order by id").collect()] == [1, 2]
    spark.sql(f"insert into {name} values (7)")
    assert shelf.rows == [7]


def test_a_catalog_table_has_what_the_settings_of_the_session_give(
    spark: Any, address: str, name: str
) -> None:
    spark.conf.set("spark.aqueduct.address", address)
    try:
        register(spark)
        spark.sql(f"create table {name} using aqueduct options (handler 'words')")
        assert spark.sql(f"select * from {name} with (handler = 'words')").count() == 2
        nothing_came(lambda: spark.table(name).collect())
    finally:
        spark.conf.unset("spark.aqueduct.address")
        register(spark)


# What is passed by, without Spark


def test_what_spark_adds_to_options_is_passed_by() -> None:
    own = {"provider": "aqueduct", "owner": "root", "location": "file:/x", "external": "true"}
    given = {"address": "aqueduct://a", "handler": "words", "header.Team": "blue"}
    properties = {f"option.{name}": value for name, value in given.items()}
    table = {**own, **given, **properties, "path": "file:/warehouse/words", "comment": "mine"}
    found = settings_of(table, {})
    assert (found.handler, found.addresses) == ("words", ("aqueduct://a",))
    assert found.headers == (("Team", "blue"),)
    assert settings_of(
        {**given, "serialization.format": "1", "checkpointLocation": "/c", "queryName": "q"}, {}
    )
    assert settings_of({**given, "option.address": "aqueduct://a"}, {}).handler == "words"
    by_path = {**own, "option.address": "aqueduct://a", "path": "words"}
    assert settings_of(by_path, {}).handler == "words"
    with pytest.raises(ConfigError, match=r"unknown option option\.address"):
        settings_of({"option.address": "aqueduct://a", "handler": "words"}, {})


@pytest.mark.parametrize("given", [{}, {"serialization.format": "1"}])
def test_no_options_at_all_are_told_apart_from_one_that_is_missing(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"no options came\. If this is a table of Spark's cata"):
        settings_of(given, {"address": ("aqueduct://a",)})
    with pytest.raises(ConfigError, match="no handler: give"):
        settings_of({"address": "aqueduct://a"}, {})
