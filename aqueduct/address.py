"""Addresses: ``aqueduct://host:port?option=value`` and its relatives, parsed once and checked.

| scheme | carrier |
|---|---|
| ``aqueduct://host:port`` | QUIC |
| ``aqueduct+tls://host:port`` | TLS over TCP |
| ``aqueduct+tcp://host:port`` | TCP, without encryption |
| ``aqueduct+unix:///path`` | a Unix socket |
| ``memory://name`` | inside one process, for tests |
| ``reactivesocket+tcp://host:port`` | ReactiveSocket over TCP, without encryption |
| ``reactivesocket+tls://host:port`` | ReactiveSocket over TLS |
| ``reactivesocket+unix:///path`` | ReactiveSocket over a Unix socket |
| ``reactivesocket+ws://host:port/path`` | ReactiveSocket over a WebSocket, without encryption |
| ``reactivesocket+wss://host:port/path`` | ReactiveSocket over a WebSocket within TLS |

Options of ``aqueduct://`` and of addresses with TLS: ``verify=off`` (no certificate check),
``fingerprint=sha256:HEX`` (pin the server's certificate), ``ca=FILE``, ``server_name=NAME``. Of
``aqueduct://`` alone: ``datagram_size=BYTES``, such as 1200 or 8k, and ``early_data=on``: a client
sends before the handshake is complete, and a listener takes that. Of Unix sockets: ``mode=OCTAL``,
the rights of the socket file that a listener makes.

Of ``aqueduct+tls://`` and ``aqueduct+tcp://``: ``resume=DURATION``, such as ``60s``: a connection
that breaks is made again, and its calls go on, if that succeeds within so long. ``resume=require``
is the same for 60 s, and a peer that cannot do it is an error; ``resume=require,5min`` has both.

Of these and ``aqueduct://``: ``resolve=DURATION``, such as ``30s``: a client takes all records of
the name for addresses of the service, and resolves it again so often.

Of those with ``aqueduct`` and ``memory``: ``compression=lz4`` or ``zstd``, which clients ask for in
their calls; ``dialect=control-streams``: a client speaks the control-stream draft of the protocol,
and a listener also serves clients that do.

What is no plain letter in a name, a path or an option is written as in any URL: ``%20``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final
from urllib.parse import SplitResult, parse_qsl, quote, unquote, unquote_to_bytes, urlsplit

from aqueduct.arguments import Kind, above_zero, checked, duration, size, whole
from aqueduct.config import COMPRESSIONS
from aqueduct.errors import ConfigError

__all__ = ["DEFAULT_PORT", "REACTIVE_PORT", "Address", "Resumption"]

DEFAULT_PORT: Final = 4433
UNIX: Final = "aqueduct+unix"
REACTIVE_PORT: Final = 7878
REACTIVE: Final = "reactivesocket+"
"""How the schemes of ReactiveSocket begin."""
_COMPRESSION: Final = frozenset({"compression"})
_TLS: Final = frozenset({"verify", "fingerprint", "ca", "server_name"})
_CHANNELS: Final = _COMPRESSION | {"dialect"}
_CERTIFICATE: Final = _CHANNELS | _TLS
DIALECT: Final = "control-streams"
"""The dialect of the protocol that an address may name beside Aqueduct itself."""
_OPTIONS: Final = {
    "aqueduct": _CERTIFICATE | {"datagram_size", "early_data", "resolve"},
    "aqueduct+tls": _CERTIFICATE | {"resolve", "resume"},
    "aqueduct+tcp": _CHANNELS | {"resolve", "resume"},
    UNIX: _CHANNELS | {"mode"},
    "memory": _CHANNELS,
    f"{REACTIVE}tcp": frozenset(),
    f"{REACTIVE}tls": _TLS,
    f"{REACTIVE}unix": frozenset({"mode"}),
    f"{REACTIVE}ws": frozenset(),
    f"{REACTIVE}wss": _TLS,
}
_WEB: Final = (f"{REACTIVE}ws", f"{REACTIVE}wss")
_IN_A_PATH: Final = "/%:@!$&'()*+,;=~"  # beside letters, digits and _.-
_FINGERPRINT: Final = re.compile(r"sha256:[0-9a-f]{64}\Z")
_MODE: Final = re.compile(r"0?[0-7]{3}\Z")


@dataclass(frozen=True, slots=True)
class Resumption:
    """``resume`` of an address. ``seconds`` without a connection, then its calls fail.

    ``required``: a peer that cannot resume is an error.
    """

    seconds: float = 60.0
    required: bool = False


@dataclass(frozen=True, slots=True)
class Address:
    """One parsed address. ``str(address)`` gives it back."""

    scheme: str
    host: str
    """A name or an IP address; empty for a Unix socket."""
    port: int
    """0 for a Unix socket."""
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    path: str = ""
    """The file of a Unix socket, or the path of a WebSocket as it is written; else empty."""

    @classmethod
    @checked()
    def parse(cls, text: str) -> Address:
        """Parses ``text``. Raises ConfigError that names what is wrong and what would do."""
        if not text.isascii():
            _check_text(text)
        scheme, separator, _ = text.partition("://")
        if not separator:
            raise ConfigError(
                f"{text!r} is not an address: write aqueduct://HOST:PORT, "
                f"for example aqueduct://localhost:{DEFAULT_PORT}"
            )
        scheme = scheme.lower()
        if scheme not in _OPTIONS:
            known = ", ".join(f"{name}://" for name in _OPTIONS if name != "memory")
            raise ConfigError(f"{text!r}: unknown scheme {scheme!r}; known: {known}")
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ConfigError(
                f"{text!r}: {error}; a port is a number from 0 to 65535, and an IPv6 address has "
                f"brackets, as in {scheme}://[::1]:{DEFAULT_PORT}"
            ) from error
        options: dict[str, str] = {}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name not in _OPTIONS[scheme]:
                known = ", ".join(sorted(_OPTIONS[scheme])) or "none"
                raise ConfigError(f"{text!r}: unknown option {name!r}; known here: {known}")
            if name in options:
                raise ConfigError(f"{text!r}: option {name!r} is given twice")
            options[name] = value
        _check_options(text, options)
        if scheme.endswith("+unix"):
            path = _path_of(text, parts, scheme)
            return cls(scheme, "", 0, MappingProxyType(options), path)
        if not parts.hostname:
            raise ConfigError(f"{text!r} names no host")
        web = scheme in _WEB
        deep = not web and parts.path not in ("", "/")
        if deep or parts.fragment or parts.username is not None:
            known = "a host, a port, a path and options" if web else "a host, a port and options"
            raise ConfigError(f"{text!r}: only {known} are understood here")
        usual = REACTIVE_PORT if scheme.startswith(REACTIVE) else DEFAULT_PORT
        return cls(
            scheme=scheme,
            host=unquote(parts.hostname),
            port=usual if port is None else port,
            options=MappingProxyType(options),
            path=quote(parts.path or "/", safe=_IN_A_PATH) if web else "",
        )

    def __str__(self) -> str:
        query = "&".join(f"{k}={quote(v, safe=':/')}" for k, v in self.options.items())
        if self.unix:
            where = quote(os.fsencode(self.path), safe="/:@+,=~")
        else:
            host = quote(self.host, safe=":*")
            where = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
            where += self.path if self.path != "/" else ""
        return f"{self.scheme}://{where}" + (f"?{query}" if query else "")

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Address.parse, (str(self),)  # the options proxy does not pickle

    @property
    def unix(self) -> bool:
        """Whether it is the file of a Unix socket."""
        return self.scheme.endswith("+unix")

    @property
    def reactive(self) -> bool:
        """Whether ReactiveSocket is spoken there: see aqueduct.reactivesocket."""
        return self.scheme.startswith(REACTIVE)

    @property
    def web(self) -> bool:
        """Whether it is that of a WebSocket."""
        return self.scheme in _WEB

    @property
    def certified(self) -> bool:
        """Whether a server at this address shows a certificate."""
        return "verify" in _OPTIONS[self.scheme]

    @property
    def resume(self) -> Resumption | None:
        """How a broken connection is resumed; None: it is not."""
        text = self.options.get("resume")
        return None if text is None else _resumption(text)

    @property
    def resolve(self) -> float | None:
        """Seconds after which a client resolves the name again; None: it has one address."""
        text = self.options.get("resolve")
        return None if text is None else above_zero(text)

    @property
    def control_streams(self) -> bool:
        """Whether the control-stream draft is spoken there, as ``dialect`` says."""
        return self.options.get("dialect") == DIALECT

    @property
    def early_data(self) -> bool:
        """Whether a client may send before the handshake is complete, and a listener takes it."""
        return self.options.get("early_data") == "on"

    def with_port(self, port: int) -> Address:
        """The same address with another port (a listener on port 0 learns its own)."""
        return Address(self.scheme, self.host, port, self.options, self.path)


def _check_text(text: str) -> None:
    """Raises ConfigError for bytes of a command line or variable that are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{text!r} is not UTF-8; write other bytes of a path like %FF") from None


def _path_of(text: str, parts: SplitResult, scheme: str) -> str:
    """The file of a Unix socket."""
    if parts.netloc:
        raise ConfigError(
            f"{text!r}: a Unix socket has a path and no host: write {scheme}:///PATH with three "
            f"slashes, for example {scheme}:///run/aqueduct.sock"
        )
    if parts.fragment:
        raise ConfigError(f"{text!r}: write %23 for a # in a path")
    path = os.fsdecode(unquote_to_bytes(parts.path))
    if path.endswith("/") or not path:
        raise ConfigError(f"{text!r} names no file; for example {scheme}:///run/aqueduct.sock")
    if "\0" in path:
        raise ConfigError(f"{text!r}: a path holds no zero byte")
    return path


def _resumption(text: str) -> Resumption:
    """Raises ValueError."""
    words = text.split(",")
    required = words[0] == "require"
    if required:
        del words[0]
    if len(words) > 1 or not (words or required):
        raise ValueError
    if not words:
        return Resumption(required=required)
    return Resumption(duration(words[0], least=0.001), required)


def _check_options(text: str, options: dict[str, str]) -> None:
    if options.get("verify", "on") not in ("on", "off"):
        raise ConfigError(f"{text!r}: verify is {options['verify']!r}; it must be on or off")
    if "fingerprint" in options:
        options["fingerprint"] = options["fingerprint"].lower()
        if not _FINGERPRINT.match(options["fingerprint"]):
            raise ConfigError(f"{text!r}: fingerprint must be sha256: and 64 hexadecimal digits")
    if options.get("compression", "none") not in (*COMPRESSIONS, "none"):
        raise ConfigError(
            f"{text!r}: compression is {options['compression']!r}; it must be one of "
            f"{', '.join(COMPRESSIONS)}, none"
        )
    if options.get("datagram_size", "auto") != "auto":
        kind = Kind("auto or 1200 to 16383 bytes", lambda given: whole(1200, 16383)(size(given)))
        found = kind.value(options["datagram_size"], f"{text!r}: datagram_size")
        options["datagram_size"] = str(found)
    if "resolve" in options:
        try:
            above_zero(options["resolve"])
        except (ValueError, TypeError):
            raise ConfigError(
                f"{text!r}: resolve is {options['resolve']!r}; it must be a duration above zero, "
                "such as 30s"
            ) from None
    if "resume" in options:
        try:
            _resumption(options["resume"])
        except (ValueError, TypeError):
            raise ConfigError(
                f"{text!r}: resume is {options['resume']!r}; it must be a duration such as 60s, "
                "'require', or both as in 'require,60s'"
            ) from None
    if options.get("dialect", DIALECT) != DIALECT:
        raise ConfigError(
            f"{text!r}: dialect is {options['dialect']!r}; it must be {DIALECT}, or be left out"
        )
    if "dialect" in options and "resume" in options:
        raise ConfigError(
            f"{text!r}: a connection of dialect={DIALECT} is not resumed; leave out one of resume "
            "and dialect"
        )
    early = options.get("early_data", "off")
    if early not in ("on", "off"):
        raise ConfigError(f"{text!r}: early_data is {early!r}; it must be on or off")
    if early == "on" and "dialect" not in options:
        raise ConfigError(
            f"{text!r}: early_data=on is for connections of the control-stream draft alone; add "
            f"dialect={DIALECT}, or leave out early_data"
        )
    if "mode" in options and not _MODE.match(options["mode"]):
        raise ConfigError(
            f"{text!r}: mode is {options['mode']!r}; it must be three octal digits, such as 0600 "
            "for the owner alone or 0660 for the group too"
        )
