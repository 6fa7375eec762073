"""Settings of an operator: where they may stand, which place counts, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from aqueduct.config import DEFAULT, Config, Limits, Timing
from aqueduct.errors import ConfigError
from aqueduct.settings.in_force import ServiceSettings
from aqueduct.settings.places import read_settings
from aqueduct.settings.table import SETTINGS, Serve, Setting
from aqueduct.settings.text import default_text


def written(folder: Path, text: str) -> Path:
    path = folder / "prod.toml"
    path.write_text(text)
    return path


def another(setting: Setting) -> tuple[str, Any]:
    """A value that is not the default and fits the other defaults, as text and as it is read."""
    if choices := setting.entry.metadata.get("choices"):
        return choices[-1], "error" if setting.key == "log_level" else "json"
    if setting.base in ("Bytes", "Count", "Seconds", "Share"):
        value = (setting.default or (2 if setting.base == "Seconds" else 2048)) * 2
        return f"{value}", value
    given: dict[str, tuple[str, Any]] = {
        "bool": ("true", True),
        "str": ("cubic", "cubic"),
        "Pem": ("/a.pem", "/a.pem"),
        "FilePath": ("/a", "/a"),
        "Addresses": ("memory://x", ("memory://x",)),
        "Origins": ("https://a.example", ("https://a.example",)),
        "HostPort": ("127.0.0.1:9464", "127.0.0.1:9464"),
        "tuple[str, ...]": ("zstd", ("zstd",)),
        "int | str": ("1300", 1300),
    }
    return given[setting.base]


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_is_read_from_a_variable_and_from_a_file(name: str, tmp_path: Path) -> None:
    setting = SETTINGS[name]
    text, value = another(setting)
    if setting.key == "key_password_file":  # it is read
        text = value = str(tmp_path / "secret")
        (tmp_path / "secret").write_text("hush")
    literal = json.dumps(value)
    head = f"[{setting.section}]\n" if setting.section else ""
    file = written(tmp_path, f"{head}{setting.key} = {literal}\n")
    for found in (read_settings(environment={setting.variable: text}), read_settings(file=file)):
        made: Any = found.serve() if setting.section == "serve" else found.config()
        if setting.section not in ("serve", ""):
            made = getattr(made, setting.section)
        assert getattr(made, setting.key) == value


def test_an_option_counts_before_a_variable_a_file_the_code_and_the_default(tmp_path: Path) -> None:
    file = written(
        tmp_path, '[timing]\ndrain_timeout = 1\nidle_timeout = "2min"\nstop_timeout = 2\n'
    )
    variables = {"AQUEDUCT_TIMING_DRAIN_TIMEOUT": "3s", "AQUEDUCT_TIMING_IDLE_TIMEOUT": "4min"}
    code = Config(timing=Timing(idle_timeout=77, stop_timeout=7, start_timeout=9))
    found = read_settings({"timing.drain_timeout": 5.0}, environment=variables, file=file)
    timing = found.config(code).timing
    assert (timing.drain_timeout, timing.idle_timeout, timing.stop_timeout) == (5, 240, 2)
    assert (timing.start_timeout, timing.close_linger) == (9, DEFAULT.timing.close_linger)
    sources = {name: Path(given.source).name for name, given in found.given.items()}
    assert sources == {
        "timing.drain_timeout": "--drain",
        "timing.idle_timeout": "AQUEDUCT_TIMING_IDLE_TIMEOUT",
        "timing.stop_timeout": "prod.toml",
    }


def test_nothing_set_leaves_the_settings_of_the_code_as_they_are() -> None:
    code = Config(limits=Limits(channels=9))
    assert read_settings(environment={}).config(code) is code
    assert read_settings().serve() == Serve()


def test_a_variable_names_the_file_and_an_option_names_another(tmp_path: Path) -> None:
    one = written(tmp_path, "[calls]\nqueue = 1\n")
    two = tmp_path / "two.toml"
    two.write_text("[calls]\nqueue = 2\n")
    variables = {"AQUEDUCT_CONFIG": str(one)}
    assert read_settings(environment=variables).value("calls.queue") == 1
    assert read_settings(environment=variables, file=two).value("calls.queue") == 2


def test_an_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    file = written(tmp_path, "[serve]\nworkers = 3\n")
    for empty in ("", "  "):
        variables = {"AQUEDUCT_SERVE_WORKERS": empty, "AQUEDUCT_CONFIG": empty}
        assert read_settings(environment=variables, file=file).value("serve.workers") == 3
    assert read_settings(environment={"AQUEDUCT_CONFIG": ""}).given == {}


def test_paths_in_a_file_start_at_its_folder(tmp_path: Path, monkeypatch: Any) -> None:
    file = written(tmp_path, '[serve]\ncertificate = "a.pem"\nkey = "/keys/b.pem"\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = read_settings(environment={"AQUEDUCT_SERVE_CLIENT_CA": "c.pem"}, file=f"../{file.name}")
    serve = found.serve()
    assert serve.certificate == str(tmp_path / "a.pem")
    assert (serve.key, serve.client_ca) == ("/keys/b.pem", "c.pem")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[timing]\nidle_timout = 5\n",
            "timing has no setting idle_timout; did you mean idle_",
        ),
        ("[timing]\nIdle-Timeout = 5\n", "did you mean idle_timeout?"),
        ("[timings]\nidle_timeout = 5\n", "there is no section timings; did you mean timing?"),
        ("[weather]\nrain = 5\n", "there is no section weather; there are serve, limits, "),
        ("idle_timeout = 5\n", "outside of its section; write timing.idle_timeout"),
        ("[limits]\nworkers = 4\n", "limits has no setting workers; did you mean serve.workers?"),
        ("[limits]\nqqqqqq = 4\n", "limits has no setting qqqqqq"),
        ("timing = 5\n", "timing is a section: write [timing]"),
        ("[[timing]]\nidle_timeout = 5\n", "timing is a section"),
        ('[timing]\nidle_timeout = "soon"\n', "timing.idle_timeout is 'soon'; it must be above "),
        ('[timing]\nidle_timeout = "5m"\n', "timing.idle_timeout: '5m': m is no unit of time; wri"),
        ("[timing]\nidle_timeout = nan\n", "timing.idle_timeout is nan; it must be above zero"),
        ("[timing]\nidle_timeout = 2026-01-01\n", "timing.idle_timeout is datetime.date(2026, 1"),
        ("[timing]\nidle_timeout.x = 5\n", "timing.idle_timeout is {'x': 5}; it must be"),
        ("[limits]\nchannels = true\n", "limits.channels is True; it must be above zero: a whole"),
        ("[limits]\nchannels = 0\n", "limits.channels is 0; it must be above zero"),
        ("[limits]\nchannels = 99999999999999999999\n", "limits.channels: 99999999999999999999 is"),
        ("[serve]\ndev_certificate = 1\n", "serve.dev_certificate is 1; it must be True or False"),
        ('[serve]\norigins = ["https://*.a"]\n', "serve.origins: 'https://*.a'"),
        ('[serve]\nlisten = ["http://x"]\n', "serve.listen: 'http://x': unknown scheme 'http'"),
        ("[serve]\nlisten = [5]\n", "serve.listen is [5]; it must be a list of addresses"),
        ("[serve]\nkey_password = 12345\n", "serve.key_password is of the type int; it must be te"),
        ('[serve]\nkey_password_file = ""\n', "serve.key_password_file is ''; it must be the path"),
        ('[serve]\nkey_password_file = "a\\u0000b"\n', "it must be the path of a file"),
        ('[serve]\nlog_level = "loud"\n', "it must be debug, info, warning or error"),
        ('debug = "yes"\n', "debug is 'yes'; it must be True or False"),
        ("[serve\n", "is no TOML that can be read: Expected ']'"),
        ("a = 1\na = 2\n", "is no TOML that can be read: Cannot overwrite a value"),
        ("a = " + "[" * 3000, "is no TOML that can be read"),
        ("a = " + "1" * 5000, "is no TOML that can be read"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_place(
    text: str, said: str, tmp_path: Path
) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(file))}\b") as caught:
        read_settings(file=file)
    assert said in str(caught.value)
    assert "12345" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=r"none\.toml, the file of --config or AQUEDUCT_CONF"):
        read_settings(environment={"AQUEDUCT_CONFIG": str(missing)})
    with pytest.raises(ConfigError, match="Is a directory"):
        read_settings(file=tmp_path)
    missing.write_bytes(b"# \xff\n")
    with pytest.raises(ConfigError, match=r"none\.toml: byte 2 is not UTF-8"):
        read_settings(file=missing)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("AQUEDUCT_TIMING_IDLE_TIMOUT", "5s", "did you mean AQUEDUCT_TIMING_IDLE_TIMEOUT?"),
        ("AQUEDUCT_TIMNG_IDLE_TIMEOUT", "5s", "did you mean AQUEDUCT_TIMING_IDLE_TIMEOUT?"),
        ("AQUEDUCT_timing_idle_timeout", "5s", "did you mean AQUEDUCT_TIMING_IDLE_TIMEOUT?"),
        ("AQUEDUCT_IDLE_TIMEOUT", "5s", "did you mean AQUEDUCT_TIMING_IDLE_TIMEOUT?"),
        ("AQUEDUCT_WORKERS", "5", "did you mean AQUEDUCT_SERVE_WORKERS?"),
        ("AQUEDUCT_BACKLOG", "5", "did you mean AQUEDUCT_QUIC_BACKLOG or AQUEDUCT_BYTE_STREAM_B"),
        ("AQUEDUCT_SERVE_PORT", "9464", "is no setting"),
        ("AQUEDUCT_ADMIN_PORT", "9464", "is no setting"),
        ("AQUEDUCT_TIMING_RAIN", "5", "is no setting: timing has none of that name"),
        ("AQUEDUCT_DEBUG", "perhaps", "is 'perhaps'; it must be true or false, or 1 or 0"),
        ("AQUEDUCT_CALLS_SMALL_BYTES", "-1", "is '-1'; it must be zero or above: a size in bytes"),
        ("AQUEDUCT_SERVE_LISTEN", "memory://a,http://x", ": 'http://x': unknown scheme 'http'"),
        ("AQUEDUCT_SERVE_KEY", "-----BEGIN KEY-----12345", "has the text of a PEM file; it must"),
        ("AQUEDUCT_SERVE_START_TIMEOUT", "5m", ": '5m': m is no unit of time; write 5min for min"),
    ],
)
def test_what_is_wrong_in_a_variable_is_named(variable: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{variable}\b") as caught:
        read_settings(environment={variable: value})
    assert said in str(caught.value)
    assert "12345" not in str(caught.value)


@pytest.mark.parametrize(
    "variable",
    [
        # Kubernetes makes these for a Service of the name "aqueduct", and of "aqueduct-serve".
        "AQUEDUCT_SERVICE_HOST",
        "AQUEDUCT_SERVICE_PORT",
        "AQUEDUCT_SERVICE_PORT_QUIC",
        "AQUEDUCT_PORT",
        "AQUEDUCT_PORT_4433_TCP",
        "AQUEDUCT_PORT_4433_UDP_ADDR",
        "AQUEDUCT_SERVE_SERVICE_HOST",
        "AQUEDUCT_SERVE_PORT",
        "AQUEDUCT_SERVE_PORT_4433_TCP_PROTO",
        # Those of a program, and of this project's own tools.
        "AQUEDUCT_TEAM",
        "AQUEDUCT_TOKEN",
        "AQUEDUCT_PGO",
        "AQUEDUCT_NO_SKIPS",
        "AQUEDUCT_NO_INSTALL",
        "AQUEDUCT_EXAMPLES",
        "AQUEDUCT_CONTESTANT",
        "AQUEDUCT_IMAGE",
        "AQUEDUCT_PYTHONS",
        "AQUEDUCT_RAY_PYTHON",
        "AQUEDUCT_SABOTAGE_REPORT",
        "MYAQUEDUCT_TIMING_IDLE_TIMEOUT",
    ],
)
def test_variables_of_others_are_left_alone(variable: str) -> None:
    assert read_settings(environment={variable: "tcp://10.0.0.1:4433"}).given == {}


def test_no_setting_has_the_name_of_a_variable_of_kubernetes() -> None:
    from aqueduct.settings.places import _KUBERNETES

    rests = [each.variable.removeprefix("AQUEDUCT_") for each in SETTINGS.values()]
    assert [rest for rest in rests if _KUBERNETES.fullmatch(rest)] == []


def test_settings_that_do_not_fit_name_the_places_of_those_that_were_set(tmp_path: Path) -> None:
    file = written(tmp_path, '[timing]\nping_interval = "40s"\n')
    variables = {"AQUEDUCT_TIMING_IDLE_TIMEOUT": "35s"}
    found = read_settings(environment=variables, file=file)
    with pytest.raises(ConfigError) as caught:
        found.config()
    said = f"{file}: timing.ping_interval, AQUEDUCT_TIMING_IDLE_TIMEOUT: Timing.ping_interval (40"
    assert str(caught.value).startswith(said)
    with pytest.raises(ConfigError, match=r"^AQUEDUCT_LIMITS_FRAME_BYTES: Calls\.fragment_"):
        read_settings(environment={"AQUEDUCT_LIMITS_FRAME_BYTES": "1m"}).config()
    with pytest.raises(ConfigError, match=r"^AQUEDUCT_QUIC_CONGESTION_CONTROL: Quic\.congestion_"):
        read_settings(environment={"AQUEDUCT_QUIC_CONGESTION_CONTROL": "warp"}).config()
    longer = Config(timing=Timing(idle_timeout=120))
    found = read_settings(environment={"AQUEDUCT_TIMING_PING_INTERVAL": "1min"})
    assert found.config(longer).timing.ping_interval == 60  # what the code gave makes it fit


def test_the_password_of_a_key_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"h\xf6sh\r\n")
    file = written(
        tmp_path, '[serve]\ncertificate = "/c"\nkey = "/k"\nkey_password_file = "secret"\n'
    )
    found = read_settings(file=file)
    assert found.serve().key_password == "h\udcf6sh"  # beside the file that names it
    assert found.given["serve.key_password"].where.endswith(": serve.key_password_file")
    assert "serve.key_password" not in found.to_json()
    name = "AQUEDUCT_SERVE_KEY_PASSWORD"
    assert read_settings(environment={name: "x"}, file=file).serve().key_password == "x"
    (tmp_path / "other").write_text("two words")
    files = {f"{name}_FILE": str(tmp_path / "other")}
    assert read_settings(environment=files, file=file).serve().key_password == "two words"
    plain = read_settings({"serve.key_password": "x"}, environment=files).serve()
    assert (plain.key_password, plain.key_password_file) == ("x", None)
    made = read_settings({"serve.dev_certificate": True}, environment=files, file=file).serve()
    assert (made.key_password, made.key_password_file) == (None, None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "secret must hold one line, the password, and nothing else"),
        (b"two\nlines\n", "secret must hold one line, the password, and nothing else"),
        (b"a" * 65_537, "secret is above 65536 bytes: that is no password"),
        (None, "secret: No such file or directory"),
    ],
)
def test_a_file_that_holds_no_password(tmp_path: Path, content: bytes | None, said: str) -> None:
    name = "AQUEDUCT_SERVE_KEY_PASSWORD"
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
    environment = {f"{name}_FILE": str(tmp_path / "secret")}
    with pytest.raises(ConfigError) as caught:
        read_settings(environment=environment)
    assert str(caught.value) == f"{name}_FILE: {tmp_path}/{said}"
    with pytest.raises(ConfigError, match=f"{name} and {name}_FILE exclude each other"):
        read_settings(environment={**environment, name: "x"})


def test_one_certificate_counts_that_of_the_highest_place(tmp_path: Path) -> None:
    file = written(tmp_path, '[serve]\ncertificate = "/c"\nkey = "/k"\nkey_password = "hush"\n')
    made = read_settings({"serve.dev_certificate": True}, file=file).serve()
    assert (made.certificate, made.key, made.key_password) == (None, None, None)
    assert made.dev_certificate
    plain = {"AQUEDUCT_SERVE_DEV_CERTIFICATE": "false", "AQUEDUCT_SERVE_KEY": "/other"}
    own = read_settings(environment=plain, file=file).serve(Serve(dev_certificate=True))
    assert (own.certificate, own.key, own.dev_certificate) == ("/c", "/other", False)
    file = written(tmp_path, "[serve]\ndev_certificate = true\n")
    given = read_settings({"serve.certificate": "/c"}, file=file).serve()
    assert (given.certificate, given.dev_certificate) == ("/c", False)
    program = read_settings(file=file).serve(Serve(certificate="/c", key="/k", client_ca="/ca"))
    assert (program.certificate, program.key, program.client_ca) == (None, None, "/ca")


def test_they_travel_to_workers_without_secrets() -> None:
    variables = {
        "AQUEDUCT_SERVE_KEY_PASSWORD": "hush",
        "AQUEDUCT_CALLS_COMPRESSIONS": "zstd",
        "AQUEDUCT_TIMING_IDLE_TIMEOUT": "2min",
        "AQUEDUCT_DEBUG": "1",
    }
    given = read_settings(environment=variables)
    text = json.dumps(given.to_json())
    assert "hush" not in text + repr(given) + repr(given.serve())
    found = ServiceSettings.from_json(json.loads(text)).config()
    assert (found.calls.compressions, found.timing.idle_timeout) == (("zstd",), 120)
    assert found.debug


def test_every_default_is_text_that_is_read_as_it() -> None:
    for setting in SETTINGS.values():
        text = default_text(setting)
        if text and setting.default != ():
            strings = isinstance(setting.default, tuple)
            given = [part.strip(' "') for part in text.strip("[]").split(",")] if strings else text
            given = setting.default if setting.base == "bool" else given
            assert setting.read(given, setting.name) == setting.default, setting.name


def test_a_choice_is_one_of_its_values() -> None:
    assert Serve(log_format="json").log_format == "json"
    with pytest.raises(ConfigError, match=r"^Serve\.log_format is 'xml'; it must be text or json"):
        Serve(log_format="xml")
