"""Options of ``aqueduct serve`` that are settings."""

from __future__ import annotations

import argparse

import pytest

from aqueduct.settings.options import add_options, options_of
from aqueduct.settings.places import read_settings
from aqueduct.settings.table import SETTINGS


def parsed(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return options_of(parser.parse_args(arguments))


def test_what_is_not_given_is_no_setting() -> None:
    assert parsed() == {}


def test_the_debug_of_the_command_is_no_setting() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.add_argument("--debug", action="store_true")
    for arguments in ([], ["--debug"]):
        found = read_settings(
            options_of(parser.parse_args(arguments)), environment={"AQUEDUCT_DEBUG": "1"}
        )
        assert found.config().debug
        assert found.given["debug"].source == "AQUEDUCT_DEBUG"


def test_each_setting_of_serve_is_an_option() -> None:
    listen = ("--listen", "memory://a,b", "--listen", "memory://c")
    more = ("--restarts", "0", "--start-timeout", "5min", "--drain", "0", "--workers", "3")
    files = ("--certificate", "c", "--key", "k", "--key-password-file", "p", "--client-ca", "a")
    origins = ("--origin", "https://A.example", "--origin", "https://b.example:443")
    logs = ("--log-format", "json", "--log-level", "debug", "--admin", "127.0.0.1:0")
    found = parsed(*listen, *more, *files, *origins, *logs, "--benchmark", "--dev-certificate")
    served = {name for name, setting in SETTINGS.items() if setting.section == "serve"}
    assert set(found) == {*served, "timing.drain_timeout"} - {"serve.key_password"}
    assert parsed("--key-password", "hush") == {"serve.key_password": "hush"}
    del found["serve.key_password_file"]  # it would be read
    serve = read_settings(found).serve()
    assert serve.listen == ("memory://a,b", "memory://c")
    assert serve.origins == ("https://a.example", "https://b.example")
    assert (serve.restarts, serve.start_timeout, serve.workers) == (0, 300, 3)
    assert serve.benchmark is True
    assert read_settings(found).config().timing.drain_timeout == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workers", "0"), "argument --workers: the value is '0'; it must be above zero"),
        (("--log-level", "loud"), "is 'loud'; it must be debug, info, warning or error"),
        (("--drain", "5m"), "m is no unit of time; write 5min"),
        (("--origin", "https://a.example/x"), "argument --origin: the value: "),
        (("--key", "-----BEGIN KEY-----12345"), "has the text of a PEM file"),
    ],
)
def test_a_wrong_value_names_its_option(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert "12345" not in error
