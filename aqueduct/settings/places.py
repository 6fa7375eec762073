"""The places of settings: variables and a TOML file, below options of the command line."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from aqueduct.address import Address
from aqueduct.arguments import Kind, flag_text
from aqueduct.errors import ConfigError
from aqueduct.escaping import escape, near_miss, shown
from aqueduct.settings.in_force import Given, ServiceSettings, outranked
from aqueduct.settings.secret_files import password_in
from aqueduct.settings.table import PREFIX, SECTIONS, SETTINGS, Setting

__all__ = ["FILE_VARIABLE", "forget_secrets", "read_settings"]

FILE_VARIABLE: Final = f"{PREFIX}CONFIG"
"""The variable that names the file."""
_VARIABLES: Final = MappingProxyType({each.variable: each for each in SETTINGS.values()})
_KUBERNETES: Final = re.compile(
    r"(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?)"
)
"""What Kubernetes puts into each container for a Service that is called ``aqueduct``."""
_ADDRESS: Final = ("SERVE_PORT", "ADMIN_PORT")
"""The end of names that Kubernetes gives ``tcp://HOST:PORT``, and a slip gives a number."""
_ALIKE: Final = 0.8
"""How like a name a variable is that is taken for a slip. Others may belong to anybody."""


def read_settings(
    options: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    file: str | os.PathLike[str] | None = None,
) -> ServiceSettings:
    """What an operator has set in these places; an option counts before a variable and a file.

    - ``options``: values that are read already, by the names of ``SETTINGS``.
    - ``environment``: variables; None: none are read.
    - ``file``: a TOML file; None: the one that ``AQUEDUCT_CONFIG`` names, if it does.

    Raises ConfigError that names the place, what was wrong there and what would do.
    """
    variables = environment or {}
    if file is None:
        file = variables.get(FILE_VARIABLE, "").strip() or None
    layers = [
        {} if file is None else _from_file(os.fspath(file)),
        _from_variables(variables),
        {
            name: Given(value, SETTINGS[name].option, SETTINGS[name].option)
            for name, value in (options or {}).items()
        },
    ]
    chosen: dict[str, Given] = {}
    for layer in layers:
        for name in outranked(layer):
            chosen.pop(name, None)
        chosen.update(layer)
    _read_password(chosen)
    settings = ServiceSettings(chosen)
    for text in settings.value("serve.listen") or ():
        try:
            Address.parse(text)
        except ConfigError as error:
            raise ConfigError(f"{chosen['serve.listen'].where}: {error}") from None
    return settings


def forget_secrets(environment: MutableMapping[str, str]) -> None:
    """Removes passwords: workers, and what handlers start, are not to inherit them."""
    for setting in SETTINGS.values():
        if setting.secret:
            environment.pop(setting.variable, None)


def _read_password(chosen: dict[str, Given]) -> None:
    """Adds the password that stands in a file."""
    told = chosen.get("serve.key_password_file")
    if told is None:
        return
    other = chosen.get("serve.key_password")
    if other is not None:
        raise ConfigError(f"{other.where} and {told.where} exclude each other")
    try:
        password = password_in(told.value)
    except ConfigError as error:
        raise ConfigError(f"{told.where}: {error}") from None
    chosen["serve.key_password"] = Given(password, told.source, told.where)


def _from_file(path: str) -> dict[str, Given]:
    where = escape(path)
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"{where}, the file of --config or {FILE_VARIABLE}: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: byte {error.start} is not UTF-8, as TOML must be") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, too
        raise ConfigError(f"{where} is no TOML that can be read: {error}") from None
    given = {}
    for section, content in found.items():
        if section in SETTINGS:
            given[section] = _given_in_file(SETTINGS[section], content, where, path)
        elif section not in SECTIONS:
            raise ConfigError(f"{where}: {_unknown_section(section)}")
        elif not isinstance(content, dict):
            raise ConfigError(
                f"{where}: {section} is a section: write [{section}], and its settings below it"
            )
        else:
            for key, value in content.items():
                name = f"{section}.{key}"
                if name not in SETTINGS:
                    raise ConfigError(f"{where}: {_unknown_key(section, key)}")
                given[name] = _given_in_file(SETTINGS[name], value, where, path)
    return given


def _given_in_file(setting: Setting, value: Any, where: str, path: str) -> Given:
    place = f"{where}: {setting.name}"
    read = setting.read(value, place)
    if setting.names_a_file:
        # A file that names others is moved with them, and may be used from anywhere.
        read = os.path.join(os.path.dirname(os.path.abspath(path)), read)
    return Given(read, where, place)


def _unknown_section(section: str) -> str:
    named = shown(section)[1:-1]
    homes = [name for name, each in SETTINGS.items() if each.key == section]
    if homes:
        return f"{named} stands outside of its section; write {_either(homes)}"
    near = near_miss(section, [*SECTIONS, "debug"])
    guess = f"; did you mean {near}?" if near else f"; there are {', '.join(SECTIONS)}"
    return f"there is no section {named}{guess}"


def _unknown_key(section: str, key: str) -> str:
    text = f"{section} has no setting {shown(key)[1:-1]}"
    near = near_miss(key, [each.key for each in SETTINGS.values() if each.section == section])
    if near:
        return f"{text}; did you mean {near}?"
    homes = [name for name, each in SETTINGS.items() if each.key == key]
    return f"{text}; did you mean {_either(homes)}?" if homes else text


def _from_variables(variables: Mapping[str, str]) -> dict[str, Given]:
    given = {}
    for variable, text in variables.items():
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE or not text.strip():
            continue  # an empty one is how many tools write "not set"
        setting = _VARIABLES.get(variable)
        if setting is None:
            _check_variable(variable, text)
            continue
        given[setting.name] = Given(_read_text(setting, text, variable), variable, variable)
    return given


def _read_text(setting: Setting, text: str, where: str) -> Any:
    """The same for text that stands for values of all types."""
    if setting.base == "bool":
        return Kind("true or false, or 1 or 0", flag_text).value(text, where)
    parted = setting.base in ("Addresses", "Origins")
    return setting.read(_parts(text) if parted else text, where)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _check_variable(variable: str, text: str) -> None:
    """Raises ConfigError for one that was meant to be a setting, as far as can be told.

    The prefix is not ours alone: a program may have variables of its own, and so has Kubernetes.
    """
    rest = variable.removeprefix(PREFIX)
    if _KUBERNETES.fullmatch(rest) and ("://" in text or not rest.endswith(_ADDRESS)):
        return
    homes = [each.variable for each in SETTINGS.values() if each.key.upper() == rest.upper()]
    names = [each.removeprefix(PREFIX) for each in _VARIABLES]
    near = [PREFIX + each for each in difflib.get_close_matches(rest.upper(), names, 1, _ALIKE)]
    if homes or near:
        raise ConfigError(f"{variable} is no setting; did you mean {_either(homes or near)}?")
    section = next((each for each in SECTIONS if rest.startswith(f"{each.upper()}_")), None)
    if section is not None:
        raise ConfigError(
            f"{variable} is no setting: {section} has none of that name; "
            "aqueduct serve MODULE:SERVICE --print-config shows all"
        )


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
