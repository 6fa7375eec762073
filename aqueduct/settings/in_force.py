"""Settings in force: what an operator has set, over what code has given."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

from aqueduct.config import DEFAULT, Config
from aqueduct.errors import ConfigError
from aqueduct.settings.table import SECTIONS, SETTINGS, Serve

__all__ = ["Given", "ServiceSettings", "outranked"]

T = TypeVar("T")
_PASSWORDS: Final = frozenset({"serve.key_password", "serve.key_password_file"})


class Given(NamedTuple):
    """What a setting was given, and where."""

    value: Any
    """Read and checked, but not yet compared with other settings."""
    source: str
    """The file, the variable or the option."""
    where: str
    """The same for errors: ``prod.toml: timing.idle_timeout``."""


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """What an operator has set: of each setting the one value that counts."""

    given: Mapping[str, Given] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    """By the names of ``SETTINGS``. A password may be among them, so that no repr shows them."""

    def value(self, name: str) -> Any:
        """The value of a setting; None if nobody has set it."""
        given = self.given.get(name)
        return None if given is None else given.value

    def config(self, code: Config = DEFAULT) -> Config:
        """``code``, the settings of a service, with what the operator has set.

        Raises ConfigError, which names the places, if they cannot work together.
        """
        parts: dict[str, Any] = {
            section: self._with(getattr(code, section), section)
            for section in SECTIONS
            if section != "serve"
        }
        if "debug" in self.given:
            parts["debug"] = self.value("debug")
        changed = {name: part for name, part in parts.items() if part is not getattr(code, name)}
        return self._made(code, changed) if changed else code

    def serve(self, code: Serve | None = None) -> Serve:
        """``code``, where and how a program serves, with what the operator has set."""
        code = Serve() if code is None else code
        lower = outranked(self.given)
        own = {
            each.key: each.default
            for each in SETTINGS.values()
            if each.name in lower and each.name not in self.given
        }
        return self._with(replace(code, **own) if own else code, "serve")

    def _with(self, part: T, section: str) -> T:
        chosen = {
            setting.key: self.given[name].value
            for name, setting in SETTINGS.items()
            if setting.section == section and name in self.given
        }
        return self._made(part, chosen) if chosen else part

    def _made(self, part: T, changed: Mapping[str, Any]) -> T:
        try:
            return replace(part, **changed)  # type: ignore[type-var]
        except ConfigError as error:
            places = [
                given.where
                for name, given in self.given.items()
                if re.search(rf"\b{re.escape(SETTINGS[name].title)}\b", str(error))
            ]
            raise ConfigError(f"{', '.join(places)}: {error}" if places else str(error)) from None

    # For workers

    def to_json(self) -> dict[str, list[Any]]:
        """For the way from the first process to a worker, which has secrets by another way."""
        return {
            name: list(given) for name, given in self.given.items() if not SETTINGS[name].secret
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Sequence[Any]]) -> ServiceSettings:
        """The reverse of ``to_json``."""
        return cls({name: Given(*given) for name, given in found.items()})


def outranked(layer: Mapping[str, Given]) -> set[str]:
    """The settings of lower places that those of ``layer`` exclude.

    There is one certificate, and one password of its key.
    """
    names = set()
    made = layer.get("serve.dev_certificate")
    if made is not None and made.value:
        names |= {"serve.certificate", "serve.key"} | _PASSWORDS
    if "serve.certificate" in layer or "serve.key" in layer:
        names.add("serve.dev_certificate")
    if not _PASSWORDS.isdisjoint(layer):
        names |= _PASSWORDS
    return names
