"""Keys of TLS for Wireshark: written for its owner alone, only where the variable asks for it."""

from __future__ import annotations

import logging
import stat
from pathlib import Path
from types import ModuleType

import pytest

from aqueduct.carriers import tls_openssl, tls_stdlib
from aqueduct.carriers.certificates import ClientTls
from aqueduct.carriers.key_log import KEY_LOG, key_log_file, write_key
from aqueduct.errors import ConfigError

LIBRARIES = pytest.mark.parametrize("library", [tls_openssl, tls_stdlib], ids=["openssl", "ssl"])


def test_without_the_variable_there_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_LOG, raising=False)
    assert key_log_file() is None
    monkeypatch.setenv(KEY_LOG, "")
    assert key_log_file() is None


def test_the_file_is_its_owner_s_and_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    monkeypatch.setenv(KEY_LOG, str(path))
    with caplog.at_level(logging.WARNING, "aqueduct"):
        assert [key_log_file(), key_log_file()] == [str(path)] * 2
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_key(str(path), b"one")
    write_key(str(path), b"two")
    assert path.read_bytes() == b"one\ntwo\n"


@LIBRARIES
def test_a_file_that_cannot_be_written_is_an_error(
    library: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_LOG, str(tmp_path))
    with pytest.raises(ConfigError, match=r"SSLKEYLOGFILE names .* cannot be written"):
        library.client_context(ClientTls(verify=False), "", "aqueduct-bpmux")


@LIBRARIES
def test_each_library_gets_the_file(
    library: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_LOG, str(tmp_path / "keys"))
    library.client_context(ClientTls(verify=False), "", "aqueduct-bpmux")
    assert (tmp_path / "keys").exists()
