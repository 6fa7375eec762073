"""Origins of web pages (RFC 6454), read as a browser writes them.

A browser sends the origin of its page with each WebSocket. A server compares it byte for byte, so
an origin in another form would never match, and the page would get 403 without a hint.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from aqueduct.errors import ConfigError
from aqueduct.escaping import shown

__all__ = ["web_origin"]

_ORIGIN: Final = re.compile(
    r"(?ai)(?P<scheme>[a-z][a-z0-9+.-]*)://"
    r"(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?"
)
_HOST: Final = re.compile(r"(?ai)[a-z0-9._-]+(?::[0-9]{1,5})?")
_PORTS: Final = {"http": 80, "https": 443}
_PAGES: Final = {"ws": "http", "wss": "https"}
"""The schemes of the pages that ask for WebSockets of these."""


def web_origin(text: str) -> str:
    """The origin as browsers send it: in small letters, without the port that its scheme has.

    Raises ConfigError, with the right form where that can be told, for what is no origin.
    """
    if text == "null":  # what pages from files and sandboxes say
        return text
    found = _ORIGIN.match(text)
    if found is None or "*" in text or not text.isascii():
        raise ConfigError(f"{shown(text)} {_fault_of(text)}")
    scheme, rest = found["scheme"].lower(), text[found.end() :]
    page = _PAGES.get(scheme, scheme)
    right = _written(text, page, found["host"].lower(), found["port"])
    if rest[:1] in ("/", "?", "#"):
        raise ConfigError(
            f"{shown(text)} has a path, and an origin has none, not even a slash: give {right!r}"
        )
    if rest:
        raise ConfigError(f"{shown(text)} goes on behind host and port: give {right!r}")
    if page != scheme:
        raise ConfigError(
            f"{shown(text)} is the address of a WebSocket; the origin is that of the page which "
            f"asks for it: give {right!r}"
        )
    return right


def _written(text: str, scheme: str, host: str, port: str | None) -> str:
    if host.startswith("["):
        try:
            host = f"[{ipaddress.IPv6Address(host[1:-1]).compressed}]"
        except ValueError:
            raise ConfigError(f"{shown(text)} has an IPv6 address that is none") from None
    number = None if port is None else int(port)
    if number is not None and number > 65_535:
        raise ConfigError(f"{shown(text)} has the port {number}; the largest is 65535")
    if number is None or number == _PORTS.get(scheme):
        return f"{scheme}://{host}"
    return f"{scheme}://{host}:{number}"


def _fault_of(text: str) -> str:
    if "*" in text:
        return "has a wildcard, and origins have none: give each origin by itself"
    if not text.isascii():
        return "is not ASCII: give the host as browsers send it, such as https://xn--mnchen-3ya.de"
    if "://" not in text and (host := _HOST.match(text)) is not None:
        return f"has no scheme: give {'https://' + host[0].lower()!r}"
    return "is no origin: give its scheme and its host, such as 'https://app.example.com'"
