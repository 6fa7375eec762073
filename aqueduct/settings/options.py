"""Settings as options of ``aqueduct serve``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from aqueduct.errors import ConfigError
from aqueduct.settings.places import FILE_VARIABLE
from aqueduct.settings.table import OPTIONS, PREFIX, SETTINGS, Setting
from aqueduct.settings.text import default_text

__all__ = ["add_options", "options_of"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Gives ``aqueduct serve`` its options; ``options_of`` reads them."""
    for setting in SETTINGS.values():
        if setting.option:
            _add_option(parser, setting)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"settings in TOML, below variables {PREFIX}SECTION_KEY and these options (by default "
        f"the file that {FILE_VARIABLE} names)",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="write the settings in force as TOML, with where they come from, and end",
    )


def _add_option(parser: argparse.ArgumentParser, setting: Setting) -> None:
    about = {**setting.entry.metadata, **OPTIONS.get(setting.name, {})}
    text = about["help"]
    more: dict[str, Any] = {"metavar": about["metavar"], "type": _reader(setting)}
    if setting.base == "bool":
        more = {"action": "store_true", "default": None}
    elif setting.base in ("Addresses", "Origins"):
        more["action"] = "append"
    elif setting.default is not None and setting.section == "serve":
        text += f" ({default_text(setting)})"
    parser.add_argument(setting.option, dest=setting.name, help=text, **more)


def _reader(setting: Setting) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            if setting.base == "Origins":
                return setting.kind.value([text], "the value")[0]
            return text if setting.base == "Addresses" else setting.read(text, "the value")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as options, by the names of ``SETTINGS``."""
    found = {name: getattr(arguments, name, None) for name, each in SETTINGS.items() if each.option}
    return {name: value for name, value in found.items() if value is not None}
