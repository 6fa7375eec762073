"""Versions that differ: of the service's convention, and of the library on driver and executor."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from aqueduct.errors import BadCall, ConfigError
from spark_udfs import exchange
from spark_udfs.versions import younger
from spark_udfs.worker.pickling import library_version, unpacked

ROOT = Path(__file__).parent.parent.parent

NEWER = """
from aqueduct.rpc import keys
keys.VERSION = 2
from tests.spark.services import make
make().run("aqueduct+tcp://127.0.0.1:0")
"""


@pytest.fixture
def newer():
    """The address of a service that speaks another version of the Arrow call convention."""
    command = [sys.executable, "-u", "-c", NEWER]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_service_of_another_convention_says_which_side_is_older(newer):
    with pytest.raises(BadCall) as caught:
        list(exchange(newer, "echo")(iter([pa.record_batch({"a": [1]})])))
    assert str(caught.value).startswith(
        f"handler 'echo' at {newer}: the call follows version 1 of the Arrow call convention, and "
        "the service knows version 2 only; update the aqueduct-arrow of the caller ["
    )


def test_versions_that_differ_at_the_end_are_a_line_in_the_log(caplog):
    own = library_version()
    data = pickle.dumps((list, ()))
    near = ".".join([*own.split(".")[:2], "999"])
    assert unpacked(near, data) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"aqueduct-arrow is {near} on the driver and {own} here"
    ]


def test_versions_that_differ_at_the_front_do_not_work_together():
    with pytest.raises(ConfigError, match=r"the driver has aqueduct-arrow 99\.0\.0, and"):
        unpacked("99.0.0", pickle.dumps((list, ())))


def test_where_nothing_is_installed_nothing_is_compared():
    assert unpacked("", pickle.dumps((list, ()))) == []


def test_what_pyspark_lacks_is_named_with_its_version():
    pyspark = pytest.importorskip("pyspark")
    with pytest.raises(ConfigError) as caught:
        younger("pyspark.sql.functions.not_yet", "9.1", "exchange_more")
    assert str(caught.value) == (
        f"exchange_more needs PySpark 9.1 or newer, for not_yet; here is PySpark "
        f"{pyspark.__version__}. Install the newer version on the driver and the executors"
    )
    with pytest.raises(ConfigError, match=r"needs PySpark 9\.2 or newer, for Nothing"):
        younger("pyspark.sql.no_such_module.Nothing", "9.2", "reading")
    assert younger("pyspark.sql.types.StructType", "4.0", "all").__name__ == "StructType"


def test_what_a_module_of_pyspark_lacks_is_not_its_version(tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text("import a_module_that_is_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_installed"):
        younger("needy.Anything", "9.1", "exchange_more")
