"""Settings in force as TOML, and the page of all settings."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from aqueduct.config import Calls, Config, Limits, MiB, Timing, quarter_of_memory
from aqueduct.errors import ConfigError
from aqueduct.settings.in_force import ServiceSettings
from aqueduct.settings.places import read_settings
from aqueduct.settings.table import SECTIONS, SETTINGS
from aqueduct.settings.text import size_text, time_text, toml_lines

ROOT = Path(__file__).parents[2]


def test_what_is_printed_is_taken_back_and_says_where_it_came_from(tmp_path: Path) -> None:
    code = Config(limits=Limits(channels=9), timing=Timing(ack_delay=0.0000012345))
    variables = {
        "AQUEDUCT_SERVE_KEY_PASSWORD": "hush",
        "AQUEDUCT_SERVE_LISTEN": "aqueduct+unix:///a%20b.sock, memory://x",
        "AQUEDUCT_SERVE_CERTIFICATE": 'a"b\\c\x7f\u202e\U000e0001ö.pem',
        "AQUEDUCT_QUIC_DATAGRAM_SIZE": "8k",
        "AQUEDUCT_FLOW_CONTROL_SHARE": "0.3",
        "AQUEDUCT_BYTE_STREAM_POLL": "0",
    }
    given = read_settings({"timing.drain_timeout": 12.5}, environment=variables)
    config = given.config(code)
    lines = toml_lines(given, config, code="app:service")
    text = "\n".join(lines)
    assert "hush" not in text
    assert "# key_password is set, and not shown, from AQUEDUCT_SERVE_KEY_PASSWORD" in lines
    assert "channels = 9  # from the code of app:service" in lines
    assert 'drain_timeout = "12.5s"  # from --drain' in lines
    assert "streams = 1024" in lines
    assert "# workers is not set" in lines
    assert f"work_threads = 0  # on this machine {Calls().threads_at_work}" in lines
    quarter = f"  # on this machine {quarter_of_memory() / MiB:,.0f} MiB"
    for name in ("process_receive_budget", "process_send_budget", "links_bytes"):
        assert f"{name} = 0{quarter}" in lines
    assert sum("on this machine" in line for line in lines) == 4
    assert text.isprintable() or all(line.isprintable() for line in lines)
    file = tmp_path / "again.toml"
    file.write_text(text)
    again = read_settings(file=file)
    assert again.config() == config
    assert again.serve().listen == given.serve().listen
    assert again.serve().certificate == str(Path.cwd() / str(given.serve().certificate))
    keys = {
        f"{section}.{key}" if isinstance(part, dict) else section
        for section, part in tomllib.loads(text).items()
        for key in (part if isinstance(part, dict) else ("",))
    }
    unset = {name for name in SETTINGS if f"# {name.rpartition('.')[2]} is" in text}
    assert keys | unset == set(SETTINGS)
    assert set(tomllib.loads(text)) == {*SECTIONS, "debug"}


def printed(settings: ServiceSettings) -> list[str]:
    return toml_lines(settings, settings.config(), code="app:service")


def test_a_path_that_is_not_utf8_is_refused_wherever_it_comes_from() -> None:
    name = "\udcff.pem"
    variable = read_settings(environment={"AQUEDUCT_SERVE_CERTIFICATE": name})
    option = read_settings({"serve.certificate": name})
    for settings, where in ((variable, "AQUEDUCT_SERVE_CERTIFICATE"), (option, "--certificate")):
        with pytest.raises(ConfigError, match=rf"{where}: .*\\udcff\.pem.*is not UTF-8") as told:
            printed(settings)
        assert str(told.value).isprintable()
    # A password is not shown, and may have any bytes.
    hush = read_settings(environment={"AQUEDUCT_SERVE_KEY_PASSWORD": "\udcff"})
    assert any("is set, and not shown" in line for line in printed(hush))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such folders")
def test_so_is_a_path_below_a_folder_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "\udcff"
    folder.mkdir()
    file = folder / "prod.toml"
    file.write_text('serve.certificate = "a.pem"')
    found = read_settings(file=file)
    with pytest.raises(ConfigError, match=r"prod\.toml: serve\.certificate: .*is not UTF-8"):
        printed(found)
    found = read_settings({"serve.certificate": "a.pem"})
    assert f'certificate = "{Path.cwd()}/a.pem"  # from --certificate' in printed(found)
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"--certificate: .*is not UTF-8"):
        printed(found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0s"),
        (0.025, "25ms"),
        (0.4, "400ms"),
        (2.5, "2.5s"),
        (60.0, "1min"),
        (90, "90s"),
        (86_400, "1d"),
        (1.0000001, "1.0000001"),
        (1e-9, "1e-09"),
    ],
)
def test_a_time_is_written_with_its_unit_and_exactly(value: float, text: str) -> None:
    assert time_text(value) == text


def test_a_size_is_written_in_the_largest_unit() -> None:
    assert [size_text(value) for value in (0, 1, 1025, 2048, 3 << 20, 1 << 40)] == [
        *("0", "1", "1025", "2k", "3m", "1024g"),
    ]


@pytest.mark.checkout
def test_the_page_has_what_the_library_says() -> None:
    command = [sys.executable, str(ROOT / "ci" / "settings_page.py"), "--check"]
    done = subprocess.run(command, check=False, timeout=60)
    assert done.returncode == 0, "python ci/settings_page.py writes it"
    page = (ROOT / "docs" / "guides" / "settings.md").read_text()
    assert page.count("**First.**") == 5
    assert [name for name in SETTINGS if f"`{SETTINGS[name].variable}`" not in page] == []
