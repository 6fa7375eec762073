"""Origins of web pages: what is read as what browsers send, and what is refused, and how."""

from __future__ import annotations

import re

import pytest

from aqueduct import reactivesocket
from aqueduct.errors import ConfigError, WrongType
from aqueduct.origins import web_origin
from aqueduct.service.service import Service


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("https://app.example", "https://app.example"),
        ("HTTPS://App.Example", "https://app.example"),
        ("https://app.example:443", "https://app.example"),
        ("http://app.example:80", "http://app.example"),
        ("http://app.example:443", "http://app.example:443"),
        ("https://app.example:0443", "https://app.example"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://[0:0::1]:8080", "http://[::1]:8080"),
        ("chrome-extension://AbCd", "chrome-extension://abcd"),
        ("null", "null"),
    ],
)
def test_an_origin_is_read_as_browsers_send_it(given: str, sent: str) -> None:
    assert web_origin(given) == sent == web_origin(sent)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("https://a.example/", "has a path, and .* not even a slash: give 'https://a.example'"),
        ("https://A.example:443/x?y", "has a path.*: give 'https://a.example'"),
        ("https://a.example#x", "give 'https://a.example'"),
        ("a.example", "has no scheme: give 'https://a.example'"),
        ("a.example:8080/x", "has no scheme: give 'https://a.example:8080'"),
        ("//a.example", "is no origin"),
        ("wss://a.example:443", "WebSocket; .*: give 'https://a.example'"),
        ("ws://a.example:8080", "give 'http://a.example:8080'"),
        ("https://*.example", "has a wildcard"),
        ("*", "has a wildcard"),
        ("https://münchen.example", "as browsers send it"),
        ("https://a.example:65536", "the port 65536; the largest is 65535"),
        ("https://a.example:x", "goes on behind host and port"),
        ("https://user@a.example", "goes on behind host and port"),
        ("https://a.example https://b.example", "goes on behind host and port"),
        ("https://[1::2::3]", "IPv6 address that is none"),
        ("https://", "is no origin: give its scheme and its host"),
        (" https://a.example", "is no origin"),
        ("", "is no origin"),
    ],
)
def test_what_would_never_match_is_refused(given: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(given)) + " .*" + text):
        web_origin(given)


async def test_it_is_refused_where_it_enters() -> None:
    text = "origins: 'https://a.example/' has a path.*give 'https://a.example'"
    address = "reactivesocket+ws://127.0.0.1:0"
    with pytest.raises(ConfigError, match=text):
        await reactivesocket.serve(None, address, origins=["https://a.example/"])
    with pytest.raises(ConfigError, match=text):
        async with Service("s").serving(address, origins=["https://a.example/"]):
            pass
    with pytest.raises(WrongType, match=r"origins is 'https://a.example'; .* as a list"):
        await reactivesocket.serve(None, address, origins="https://a.example")
