"""Settings as text: a file of TOML that can be read back."""

from __future__ import annotations

import os
from typing import Any, Final

from aqueduct.arguments import duration
from aqueduct.config import Config, GiB, KiB, MiB
from aqueduct.errors import ConfigError
from aqueduct.escaping import escape
from aqueduct.settings.in_force import Given, ServiceSettings
from aqueduct.settings.table import SECTIONS, SETTINGS, Setting

__all__ = ["default_text", "size_text", "time_text", "toml_lines"]

_HERE: Final = {
    "flow.process_receive_budget": "process_receive_bytes",
    "flow.process_send_budget": "process_send_bytes",
    "relink.links_bytes": "all_links_bytes",
    "calls.work_threads": "threads_at_work",
}
"""Settings whose 0 stands for what this machine has, and the property that says it."""


def toml_lines(settings: ServiceSettings, config: Config, *, code: str) -> list[str]:
    """All settings in force as the lines of a file, with where those come from that were set.

    ``config``: what ``settings.config`` has made. ``code``: whose code gave what no operator did.
    Raises ConfigError for a path that is not UTF-8: it can be used, but TOML cannot hold it.
    """
    serve = settings.serve()
    lines = [f"# The settings in force for {code}. aqueduct serve --config FILE takes them back."]
    for section in ("", *SECTIONS):
        lines += ["", f"[{section}]"] if section else []
        part = serve if section == "serve" else getattr(config, section) if section else config
        for name, setting in SETTINGS.items():
            if setting.section == section:
                value = getattr(part, setting.key)
                line = _line(setting, settings.given.get(name), value, code)
                if value == 0 and name in _HERE:
                    line += f"  # on this machine {_machine_text(setting, part)}"
                lines.append(line)
    return lines


def _line(setting: Setting, given: Given | None, value: Any, code: str) -> str:
    origin = ""
    if given is not None:
        origin = f"  # from {escape(given.source)}"
    elif value != setting.default:
        origin = f"  # from the code of {escape(code)}"
    if value is None:
        return f"# {setting.key} is not set"
    if setting.secret:
        return f"# {setting.key} is set, and not shown{origin.replace('  # ', ', ')}"
    text = _toml(setting, value)
    try:
        text.encode()
    except UnicodeEncodeError:
        where = setting.name if given is None else given.where
        raise ConfigError(
            f"{where}: {escape(text)} is not UTF-8, and TOML can hold nothing else; a file of "
            "settings needs paths of UTF-8"
        ) from None
    return f"{setting.key} = {text}{origin}"


def _machine_text(setting: Setting, part: Any) -> str:
    value: int = getattr(part, _HERE[setting.name])
    return f"{value / MiB:,.0f} MiB" if setting.base == "Bytes" else str(value)


def default_text(setting: Setting) -> str:
    """The default of a setting as the file has it; empty: there is none."""
    value = setting.default
    return "" if value is None else _toml(setting, value).strip('"')


def size_text(value: int) -> str:
    """A size in the largest unit of which it is a whole number: ``64m``."""
    for unit, scale in (("g", GiB), ("m", MiB), ("k", KiB)):
        if value and value % scale == 0:
            return f"{value // scale}{unit}"
    return str(value)


def time_text(value: float) -> str:
    """A duration with its unit, which reads as exactly this value: ``5min``, ``25ms``."""
    for unit, seconds in (("d", 86_400), ("h", 3600), ("min", 60)):
        if value and value % seconds == 0:
            return f"{value / seconds:.0f}{unit}"
    found = f"{value:g}s" if value >= 1 or not value else f"{value * 1000:g}ms"
    try:
        return found if duration(found) == value else repr(float(value))
    except ValueError:  # with an exponent
        return repr(float(value))


def _toml(setting: Setting, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_quoted, value))}]"
    if isinstance(value, str | os.PathLike):
        return _quoted(os.path.abspath(value) if setting.names_a_file else str(value))
    if setting.base == "Bytes" or setting.base == "int | str":
        text = size_text(value)
        return text if text.isdigit() else _quoted(text)
    if setting.base == "Seconds":
        text = time_text(value)
        return _quoted(text) if text[-1].isalpha() else text
    return repr(value)


def _quoted(text: str) -> str:
    return '"' + "".join(map(_character, text)) + '"'


def _character(each: str) -> str:
    if each in '"\\':
        return "\\" + each
    if each.isprintable() or "\ud800" <= each <= "\udfff":  # a surrogate, of no character
        return each
    return f"\\u{ord(each):04x}" if ord(each) < 1 << 16 else f"\\U{ord(each):08x}"
