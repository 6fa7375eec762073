"""Addresses: what is understood, what is refused with which words, and the way back to text."""

from __future__ import annotations

import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduct import connect, serve
from aqueduct.address import DEFAULT_PORT, REACTIVE_PORT, Address
from aqueduct.errors import ConfigError

PIN = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("text", "scheme", "host", "port", "path", "options"),
    [
        ("aqueduct://localhost", "aqueduct", "localhost", DEFAULT_PORT, "", {}),
        ("AQUEDUCT+TCP://Example.org:1/", "aqueduct+tcp", "example.org", 1, "", {}),
        ("aqueduct+tcp://[::1]:0", "aqueduct+tcp", "::1", 0, "", {}),
        ("aqueduct+tcp://[fe80::1%25lo]:7", "aqueduct+tcp", "fe80::1%lo", 7, "", {}),
        ("aqueduct+tls://10.0.0.1", "aqueduct+tls", "10.0.0.1", DEFAULT_PORT, "", {}),
        (
            f"aqueduct+tls://h:9?verify=off&server_name=a.b&ca=/x%20y&fingerprint={PIN.upper()}",
            "aqueduct+tls",
            "h",
            9,
            "",
            {"verify": "off", "server_name": "a.b", "ca": "/x y", "fingerprint": PIN},
        ),
        ("aqueduct+unix:///run/a.sock", "aqueduct+unix", "", 0, "/run/a.sock", {}),
        (
            "aqueduct+unix:///tmp/a%20b%23c%3Fd?mode=0660",
            "aqueduct+unix",
            "",
            0,
            "/tmp/a b#c?d",
            {"mode": "0660"},
        ),
        ("aqueduct+unix:///t%FF", "aqueduct+unix", "", 0, os.fsdecode(b"/t\xff"), {}),
        ("memory://name", "memory", "name", DEFAULT_PORT, "", {}),
        ("reactivesocket+tcp://h", "reactivesocket+tcp", "h", REACTIVE_PORT, "", {}),
        (
            f"reactivesocket+tls://h:9/?ca=/x&fingerprint={PIN}",
            "reactivesocket+tls",
            "h",
            9,
            "",
            {"ca": "/x", "fingerprint": PIN},
        ),
        (
            "reactivesocket+unix:///run/a%20b?mode=0666",
            "reactivesocket+unix",
            "",
            0,
            "/run/a b",
            {"mode": "0666"},
        ),
        ("reactivesocket+ws://h", "reactivesocket+ws", "h", REACTIVE_PORT, "/", {}),
        ("reactivesocket+ws://h:1/a b", "reactivesocket+ws", "h", 1, "/a%20b", {}),
        (
            "reactivesocket+wss://[::1]:443/live/%C3%BC?verify=off",
            "reactivesocket+wss",
            "::1",
            443,
            "/live/%C3%BC",
            {"verify": "off"},
        ),
    ],
)
def test_what_is_understood(
    text: str, scheme: str, host: str, port: int, path: str, options: dict[str, str]
) -> None:
    address = Address.parse(text)
    assert (address.scheme, address.host, address.port) == (scheme, host, port)
    assert address.path == path
    assert dict(address.options) == options
    assert Address.parse(str(address)) == address
    assert pickle.loads(pickle.dumps(address)) == address
    assert address.with_port(5).port == 5
    assert address.with_port(5).path == path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("localhost:4433", "is not an address: write aqueduct://HOST:PORT"),
        ("http://h", "known: aqueduct://, aqueduct+tls://, aqueduct+tcp://, aqueduct+unix://"),
        ("aqueduct://", "names no host"),
        ("aqueduct+tcp://:80", "names no host"),
        ("aqueduct+tcp://h:99999", "Port out of range"),
        ("aqueduct://h:80:90", "a port is a number from 0 to 65535"),
        ("aqueduct+tcp://h:http", "a port is a number from 0 to 65535"),
        ("aqueduct+tcp://::1:80", "an IPv6 address has brackets, as in aqueduct+tcp://[::1]:4433"),
        ("80:90", "is not an address: write aqueduct://HOST:PORT"),
        ("aqueduct+unix:///\udcff.sock", r"\udcff.sock' is not UTF-8; write other bytes"),
        ("aqueduct+tcp://\udcff:1", r"'aqueduct+tcp://\udcff:1' is not UTF-8"),
        ("aqueduct://h?datagram_size=1k", "it must be auto or 1200 to 16383 bytes"),
        ("aqueduct://h?datagram_size=5min", "datagram_size is '5min'"),
        ("aqueduct://h?datagram_size=\u00b3", "datagram_size is"),
        ("aqueduct+tcp://h/path", "only a host, a port and options"),
        ("reactivesocket+tcp://h/path", "only a host, a port and options"),
        ("reactivesocket+ws://h/path#there", "only a host, a port, a path and options"),
        ("reactivesocket+tcp://h?verify=off", "unknown option 'verify'; known here: none"),
        ("reactivesocket+unix://h", "write reactivesocket+unix:///PATH with three slashes"),
        ("reactivesocket://h", "reactivesocket+tcp://, reactivesocket+tls://"),
        ("aqueduct+tcp://me@h", "only a host, a port and options"),
        ("aqueduct+tcp://h?verify=off", "unknown option 'verify'; known here: compression"),
        (
            "aqueduct+tls://h?datagram_size=1200",
            (
                "known here: ca, compression, dialect, fingerprint, resolve, resume, "
                "server_name, verify"
            ),
        ),
        ("aqueduct+tls://h?verify=no", "it must be on or off"),
        ("aqueduct+tls://h?verify=off&verify=off", "given twice"),
        ("aqueduct+tls://h?fingerprint=sha1:00", "sha256: and 64 hexadecimal digits"),
        ("aqueduct://h?datagram_size=20000", "auto or 1200 to 16383"),
        (
            "aqueduct://h?early_data=yes&dialect=control-streams",
            "early_data is 'yes'; it must be on or off",
        ),
        (
            "aqueduct://h?early_data=on",
            "early_data=on is for connections of the control-stream draft alone; add dialect=",
        ),
        ("aqueduct+tls://h?dialect=control-streams&early_data=on", "unknown option 'early_data'"),
        ("memory://h?dialect=control-streams&early_data=on", "unknown option 'early_data'"),
        ("aqueduct+unix://run/a.sock", "with three slashes"),
        ("aqueduct+unix://localhost:80/a", "a path and no host"),
        ("aqueduct+unix:///", "names no file"),
        ("aqueduct+unix://", "names no file"),
        ("aqueduct+unix:///run/", "names no file"),
        ("aqueduct+unix:///a#b", "write %23"),
        ("aqueduct+unix:///a%00b", "no zero byte"),
        ("aqueduct+unix:///a?mode=0999", "three octal digits"),
        ("aqueduct+unix:///a?mode=rw", "three octal digits"),
        ("aqueduct+unix:///a?mode=4600", "three octal digits"),
        ("aqueduct+unix:///a?ca=x", "known here: compression, dialect, mode"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.parse(text)
    assert words in str(caught.value)
    assert repr(text) in str(caught.value)


NAMES = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(NAMES, min_size=1, max_size=4).map(lambda names: "/" + "/".join(names)))
def test_any_path_survives_the_way_to_text_and_back(path: str) -> None:
    address = Address("aqueduct+unix", "", 0, {"mode": "0600"}, path)
    assert Address.parse(str(address)) == address


def test_a_size_in_an_address_has_units() -> None:
    address = Address.parse("aqueduct://h?datagram_size=8k")
    assert address.options["datagram_size"] == "8192"
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    ("options", "early"),
    [
        ("dialect=control-streams&early_data=on", True),
        ("dialect=control-streams&early_data=off", False),
        ("dialect=control-streams", False),
        ("early_data=off", False),
        ("", False),
    ],
)
def test_early_data_is_off_if_the_address_does_not_say_on(options: str, early: bool) -> None:
    address = Address.parse(f"aqueduct://h?{options}")
    assert address.early_data is early
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize("given", [4433, None, b"aqueduct://h", ["aqueduct://h"]])
def test_what_is_no_text_is_no_address(given: object) -> None:
    with pytest.raises(ConfigError, match=r"text is .*; it must be an address such as aqueduct://"):
        Address.parse(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["tcp", "tls", "ws", "wss", "unix"])
async def test_reactivesocket_has_an_interface_of_its_own(scheme: str) -> None:
    where = "/x" if scheme == "unix" else "h:1"
    text = "ReactiveSocket has requests and no message channels; aqueduct.reactivesocket has"
    with pytest.raises(ConfigError, match=text):
        await connect(f"reactivesocket+{scheme}://{where}")
    with pytest.raises(ConfigError, match=text):
        await serve(lambda connection: None, f"reactivesocket+{scheme}://{where}")
