"""The table of all settings: the names that each has, and what it must be."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

from aqueduct.arguments import KINDS, Kind, check_fields, choice, kind_of
from aqueduct.config import DEFAULT, Config, Count, Seconds
from aqueduct.errors import ConfigError
from aqueduct.logs import FORMATS, LEVELS

__all__ = ["OPTIONS", "PREFIX", "SECTIONS", "SETTINGS", "Serve", "Setting"]

PREFIX: Final = "AQUEDUCT_"
Pem: TypeAlias = str | os.PathLike[str] | bytes
FilePath: TypeAlias = str
Addresses: TypeAlias = tuple[str, ...]
Origins: TypeAlias = tuple[str, ...]
HostPort: TypeAlias = str


def _option(
    text: str,
    metavar: str = "",
    *,
    option: str = "",
    secret: bool = False,
    choices: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Metadata of a field that is an option of ``aqueduct serve``, too: ``text`` is its help.

    ``option``: its name, if it is not that of the field. ``secret``: its value is never shown.
    ``choices``: the values that there are.
    """
    about = {"metavar": metavar, "option": option, "secret": secret, "choices": choices}
    return {"help": text, **about}


@dataclass(frozen=True, slots=True)
class Serve:
    """Where and how a service is served; each is an option of ``aqueduct serve`` as well."""

    listen: Addresses = field(
        default=(),
        metadata=_option(
            "where to listen: aqueduct://HOST:PORT, aqueduct+tls://HOST:PORT, "
            "aqueduct+tcp://HOST:PORT (port 0: any free one) or aqueduct+unix:///PATH; for clients "
            "of ReactiveSocket reactivesocket+tcp, +tls, +ws, +wss or +unix; may be repeated",
            "ADDRESS",
        ),
    )
    origins: Origins = field(
        default=(),
        metadata=_option(
            "origins of web pages that may connect to reactivesocket+ws:// and +wss://, such as "
            "https://app.example.com; may be repeated (by default no page may)",
            "ORIGIN",
            option="--origin",
        ),
    )
    certificate: Pem | None = field(
        default=None, metadata=_option("certificate chain, PEM", "FILE")
    )
    key: Pem | None = field(
        default=None, repr=False, metadata=_option("private key of the certificate, PEM", "FILE")
    )
    key_password: str | None = field(
        default=None,
        repr=False,
        metadata=_option(
            "password of a private key that is encrypted; other users of the machine can see an "
            "option, and not a variable or a file",
            "TEXT",
            secret=True,
        ),
    )
    key_password_file: FilePath | None = field(
        default=None,
        metadata=_option(
            "a file with one line, which is that password; it is read at the start", "FILE"
        ),
    )
    client_ca: Pem | None = field(
        default=None,
        metadata=_option(
            "CAs of the certificates that clients must show over aqueduct+tls://, PEM", "FILE"
        ),
    )
    dev_certificate: bool = field(
        default=False,
        metadata=_option(
            "make a certificate on the spot; the address printed pins its fingerprint"
        ),
    )
    admin: HostPort | None = field(
        default=None,
        metadata=_option(
            "an HTTP port for operators, such as 127.0.0.1:9464: the live page at /, /health/live, "
            "/health/ready, /metrics and /state.json; it needs the extra admin (by default there "
            "is none)",
            "HOST:PORT",
        ),
    )
    benchmark: bool | None = field(
        default=None,
        metadata=_option(
            "with the handler aqueduct.benchmark, for aqueduct bench and doctor (by default: as "
            "the service was made)"
        ),
    )
    workers: Count | None = field(
        default=None,
        metadata=_option(
            "serve by so many processes, which share the addresses and are replaced when they die "
            "(by default: by this one process)",
            "N",
        ),
    )
    restarts: Count = field(
        default=10,
        metadata=_option(
            "deaths of workers within a minute that are borne; one more ends the service", "N"
        ),
    )
    start_timeout: Seconds = field(
        default=300.0,
        metadata=_option(
            "how long a worker may take to load the service and to listen: seconds, or 5min",
            "DURATION",
        ),
    )

    log_format: str = field(
        default="text",
        metadata=_option(
            "of the log of aqueduct serve on standard error: text, or json with one object a line",
            "FORMAT",
            choices=FORMATS,
        ),
    )
    log_level: str = field(
        default="info",
        metadata=_option(
            f"the least that aqueduct serve logs: {', '.join(LEVELS)}", "LEVEL", choices=LEVELS
        ),
    )

    zero_allowed: ClassVar[tuple[str, ...]] = ("restarts",)

    def __post_init__(self) -> None:
        check_fields(self)
        for entry in fields(self):
            if choices := entry.metadata["choices"]:
                _choice(choices).value(getattr(self, entry.name), f"Serve.{entry.name}")


def _choice(choices: tuple[str, ...]) -> Kind:
    return Kind(f"{', '.join(choices[:-1])} or {choices[-1]}", choice(*choices))


SECTIONS: Final[Mapping[str, type]] = MappingProxyType(
    {"serve": Serve}
    | {
        each.name: type(part)
        for each in fields(Config)
        if is_dataclass(part := getattr(DEFAULT, each.name))
    }
)
"""The sections of the file, and the class that says what is in each."""


class Setting(NamedTuple):
    """One setting: a field of a dataclass, by the names that it has."""

    section: str
    """Of the file; empty: it stands before all sections."""
    owner: type
    entry: Field[Any]

    @property
    def key(self) -> str:
        """Its name within the section."""
        return self.entry.name

    @property
    def name(self) -> str:
        """``timing.idle_timeout``."""
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def variable(self) -> str:
        """``AQUEDUCT_TIMING_IDLE_TIMEOUT``."""
        return PREFIX + self.name.replace(".", "_").upper()

    @property
    def title(self) -> str:
        """``Timing.idle_timeout``, as errors and the code have it."""
        return f"{self.owner.__name__}.{self.key}"

    @property
    def option(self) -> str:
        """``--key-password``: its option of ``aqueduct serve``; empty: it has none."""
        if self.name in OPTIONS:
            return OPTIONS[self.name]["option"]
        if self.section != "serve":
            return ""
        return self.entry.metadata["option"] or "--" + self.key.replace("_", "-")

    @property
    def kind(self) -> Kind:
        """What its value must be, and how it is read."""
        if choices := self.entry.metadata.get("choices"):
            return _choice(choices)
        # Other text is checked by its class alone, once all values are known.
        return kind_of(self.owner, self.entry) or KINDS["text"]

    def read(self, given: Any, where: str) -> Any:
        """What was given, read and checked. Raises ConfigError that begins with ``where``."""
        if self.base == "Pem" and isinstance(given, str) and "-----BEGIN" in given:
            raise ConfigError(  # before anything shows a private key
                f"{where} has the text of a PEM file; it must be the path of the file"
            )
        return self.kind.value(given, where)

    @property
    def base(self) -> str:
        """The name of its type: Bytes, Seconds, Count, ..."""
        return str(self.entry.type).removesuffix(" | None")

    @property
    def names_a_file(self) -> bool:
        """Whether its value is the path of a file."""
        return self.base in ("Pem", "FilePath")

    @property
    def default(self) -> Any:
        """What it is when nobody sets it."""
        if self.entry.default is not MISSING:
            return self.entry.default
        return False  # Config.debug, whose default is its variable

    @property
    def secret(self) -> bool:
        """Whether its value is not to be shown."""
        return bool(self.entry.metadata.get("secret"))


OPTIONS: Final[Mapping[str, dict[str, str]]] = MappingProxyType(
    {
        "timing.drain_timeout": {
            "option": "--drain",
            "metavar": "DURATION",
            "help": "the process ends within this time of SIGINT or SIGTERM; open calls fail a "
            "little earlier (by default Timing.drain_timeout of the service: 25)",
        }
    }
)
"""ServiceSettings of other sections that are options of ``aqueduct serve``, too."""

SETTINGS: Final[Mapping[str, Setting]] = MappingProxyType(
    {
        setting.name: setting
        for section, owner in (*SECTIONS.items(), ("", Config))
        for entry in fields(owner)
        if (setting := Setting(section, owner, entry)).section or entry.name not in SECTIONS
    }
)
"""All settings by their names, ``timing.idle_timeout``."""
