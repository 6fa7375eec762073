"""Options as text, as arguments and as settings: what they become, and what their errors say."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from aqueduct.carriers.certificates import ClientTls
from aqueduct.errors import ConfigError
from spark_udfs import options
from spark_udfs.options import OPTIONS, convert, defaults, tls_of

PEM = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("in_flight", "8", 8),
        ("in_flight", " 8 ", 8),
        ("inFlight", "8", 8),
        ("INFLIGHT", 3, 3),
        ("retries", "0", 0),
        ("in_flight_bytes", "32m", 32 << 20),
        ("in_flight_bytes", "1 GiB", 1 << 30),
        ("in_flight_bytes", "2kb", 2048),
        ("in_flight_bytes", "1024", 1024),
        ("in_flight_bytes", "7b", 7),
        ("in_flight_bytes", 5, 5),
        ("deadline", "30s", 30.0),
        ("deadline", "500ms", 0.5),
        ("deadline", "2min", 120.0),
        ("deadline", "1.5 h", 5400.0),
        ("deadline", ".25", 0.25),
        ("deadline", "None", None),
        ("deadline", 7, 7),
        ("ordered", "TRUE", True),
        ("ordered", "off", False),
        ("ordered", False, False),
        ("on_error", "Null", "null"),
        ("compression", "zstd", "zstd"),
        ("columns", "a, b", ("a", "b")),
        ("columns", ["a", "b"], ("a", "b")),
        ("address", "aqueduct://a", ("aqueduct://a",)),
        ("address", "aqueduct://a,aqueduct+tcp://b:1", ("aqueduct://a", "aqueduct+tcp://b:1")),
        ("ca", "/etc/ca.pem", "/etc/ca.pem"),
        ("ca", PEM, PEM.encode()),
        ("ca", PEM.encode(), PEM.encode()),
    ],
)
def test_what_is_given_becomes_a_value(name, given, value):
    (found,) = convert({name: given}, OPTIONS).values()
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("in_flight", "0", "option in_flight is '0'; it must be a whole number above zero"),
        ("in_flight", "8.5", "option in_flight is '8.5'; it must be a whole number above zero"),
        ("in_flight", 2.0, "option in_flight is 2.0; it must be a whole number above zero"),
        ("in_flight", True, "option in_flight is True; it must be a whole number above zero"),
        ("retries", "-1", "option retries is '-1'; it must be a whole number, zero or above"),
        (
            "in_flight_bytes",
            "32 mega",
            "option in_flight_bytes is '32 mega'; it must be a size above zero, such as 32m",
        ),
        (
            "in_flight_bytes",
            "0",
            "option in_flight_bytes is '0'; it must be a size above zero, such as 32m",
        ),
        (
            "deadline",
            "soon",
            "option deadline is 'soon'; it must be seconds above zero, such as 30s, or none",
        ),
        (
            "deadline",
            float("nan"),
            "option deadline is nan; it must be seconds above zero, such as 30s, or none",
        ),
        ("ordered", "yes", "option ordered is 'yes'; it must be true or false"),
        ("ordered", 1, "option ordered is 1; it must be true or false"),
        ("on_error", "drop", "option on_error is 'drop'; it must be fail, null or skip"),
        ("columns", "a,,b", "option columns is 'a,,b'; it must be names of columns"),
        ("columns", [], "option columns is []; it must be names of columns"),
        ("columns", [1], "option columns is [1]; it must be names of columns"),
        (
            "token",
            b"s3cret",
            "option token is of the type bytes; it must be text, or a function without arguments",
        ),
        ("compression", "gzip", "option compression is 'gzip'; it must be one of lz4, zstd, none"),
        (
            "ca",
            "",
            (
                "option ca is ''; it must be PEM text (by value) or the path of a PEM file that "
                "every executor has"
            ),
        ),
        (
            "address",
            "nowhere",
            (
                "option address: 'nowhere' is not an address: write aqueduct://HOST:PORT, "
                "for example aqueduct://localhost:4433"
            ),
        ),
        (
            "address",
            "",
            (
                "option address is ''; it must be an address such as aqueduct://HOST:PORT, several "
                "as a list or as text with commas"
            ),
        ),
    ],
)
def test_what_cannot_be_says_what_it_must_be(name, given, message):
    with pytest.raises(ConfigError) as caught:
        convert({name: given}, OPTIONS)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["deadline", "batch_deadline", "backoff", "backoff_limit"])
def test_durations_of_options_have_the_units_of_arguments(name):
    for given, found in (("2min", 120.0), ("1.5h", 5400.0), (3, 3), (timedelta(seconds=2), 2.0)):
        assert convert({name: given}, OPTIONS) == {name: found}
    with pytest.raises(ConfigError, match=f"option {name}: '5m': m is no unit of time; write 5min"):
        convert({name: "5m"}, OPTIONS)
    wrongs: list[Any] = [0, -1, "-1s", float("nan"), float("inf"), True, "1e3", []]
    for wrong in wrongs:
        with pytest.raises(
            ConfigError, match=f"option {name} is .*; it must be seconds above zero"
        ):
            convert({name: wrong}, OPTIONS)


@pytest.mark.parametrize("name", ["in_flight_bytes", "merge_bytes"])
def test_sizes_of_options_have_the_units_of_arguments(name):
    for given, found in (("64k", 64 << 10), ("1.5 GiB", 3 << 29), ("7", 7), (7, 7)):
        assert convert({name: given}, OPTIONS) == {name: found}
    wrongs: list[Any] = [0, -1, 1.5, True, "5min", "1 month", int, []]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match=f"option {name} is .*; it must be a size above zero"):
            convert({name: wrong}, OPTIONS)


def test_an_unknown_name_names_the_near_miss():
    with pytest.raises(ConfigError) as caught:
        convert({"in_fligth": "8"}, OPTIONS)
    assert str(caught.value).startswith("unknown option in_fligth; did you mean in_flight? there")
    with pytest.raises(ConfigError) as caught:
        convert({"paint": "red"}, OPTIONS)
    assert str(caught.value).startswith("unknown option paint; there are address, ")
    assert all(name in str(caught.value) for name in OPTIONS)


def test_a_name_in_two_spellings_is_given_twice():
    with pytest.raises(ConfigError, match="option in_flight is given twice, once as 'inFlight'"):
        convert({"in_flight": "8", "inFlight": "9"}, OPTIONS)


def test_headers_are_options_with_a_prefix():
    given = {"header.Team-a1b2c3": "x", "connection_header.who": "me", "header.b": "y"}
    assert convert(given, OPTIONS) == {
        "headers": {"Team-a1b2c3": "x", "b": "y"},
        "connection_headers": {"who": "me"},
    }
    with pytest.raises(ConfigError, match=r"unknown option header\."):
        convert({"header.": "x"}, OPTIONS)


def test_none_is_not_given():
    assert convert({"deadline": None, "in_flight": None}, OPTIONS) == {}


def test_tls_by_path_and_by_value():
    values = convert({"ca": PEM, "key": "/k.pem", "keyPassword": "x", "verify": "off"}, OPTIONS)
    values["in_flight"] = 8
    tls = tls_of(values)
    assert tls == ClientTls(ca=PEM.encode(), key="/k.pem", key_password="x", verify=False)
    assert values == {"in_flight": 8}
    assert tls_of(values) is None
    assert set(options.TLS) <= set(OPTIONS)


def test_without_a_session_there_are_no_settings():
    assert defaults("in_flight") == {}


@pytest.fixture
def settings(spark):
    """Sets settings for the test."""
    names = []

    def give(**values):
        for name, value in values.items():
            names.append(options.PREFIX + name)
            spark.conf.set(names[-1], value)

    yield give
    for name in names:
        spark.conf.unset(name)


@pytest.mark.spark
def test_settings_of_the_session_are_defaults(settings):
    settings(address="aqueduct://a,aqueduct://b", inFlight="4", in_flight_bytes="1m", cast="true")
    settings(**{"header.team": "blue", "commitDeadline": "none"})
    assert defaults() == {
        "commit_deadline": None,
        "address": ("aqueduct://a", "aqueduct://b"),
        "in_flight": 4,
        "in_flight_bytes": 1 << 20,
        "cast": True,
        "headers": {"team": "blue"},
    }
    assert defaults("in_flight", "deadline") == {"in_flight": 4}


@pytest.mark.spark
def test_a_setting_that_is_not_known_is_an_error_wherever_it_is_read(settings):
    settings(in_fligth="4")
    with pytest.raises(ConfigError) as caught:
        defaults("deadline")
    assert str(caught.value).startswith(
        "unknown setting spark.aqueduct.in_fligth; did you mean spark.aqueduct.in_flight? there are"
    )


@pytest.mark.spark
def test_a_setting_that_cannot_be_names_itself(settings):
    settings(deadline="soon")
    with pytest.raises(ConfigError) as caught:
        defaults("deadline")
    assert str(caught.value) == (
        "setting spark.aqueduct.deadline is 'soon'; "
        "it must be seconds above zero, such as 30s, or none"
    )


@pytest.mark.spark
@pytest.mark.parametrize("name", ["columns", "write_key", "max_rows"])
def test_what_belongs_to_one_call_is_no_setting(settings, name):
    settings(**{name: "1"})
    with pytest.raises(ConfigError, match=rf"unknown setting spark\.aqueduct\.{name}"):
        defaults()
