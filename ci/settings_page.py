"""Writes docs/guides/settings.md, the page of all settings, from the dataclasses that have them.

python ci/settings_page.py           rewrites the tables
python ci/settings_page.py --check   exits with 1 if they are not what the library says
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aqueduct.config import Config
from aqueduct.settings.table import SECTIONS, SETTINGS, Setting
from aqueduct.settings.text import default_text
from ci.generated_page import run

__all__ = ["FIRST", "PAGE"]

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "guides" / "settings.md"
FIRST: Final = {
    "serve.workers": "one process of Python uses about one processor",
    "flow.process_receive_budget": "with several workers each one takes a quarter of the memory",
    "calls.max_calls_process": "it is what protects a service from more callers than it can serve",
    "timing.drain_timeout": "it must be less than what ends the process otherwise, such as "
    "`terminationGracePeriodSeconds`",
    "timing.progress_deadline": "a handler that computes for longer than this for one batch fails "
    "its call",
}
"""The settings to touch first, each with the reason."""
_UNITS: Final = {
    "Bytes": "size",
    "Seconds": "time",
    "Count": "number",
    "Share": "share of 1",
    "bool": "true, false",
    "str": "text",
    "Pem": "file",
    "FilePath": "file",
    "Addresses": "list of addresses",
    "Origins": "list of origins",
    "HostPort": "host and port",
    "tuple[str, ...]": "list of text",
    "int | str": 'size, or "auto"',
}
_HEAD: Final = (
    "| key | variable, option | default | unit | what it does |",
    "|---|---|---|---|---|",
)


def docstrings(owner: type) -> dict[str, str]:
    """What stands below each field of a dataclass."""
    (body,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = inspect.cleandoc(str(text.value.value))
    return found


def _about(setting: Setting, written: dict[str, str]) -> str:
    text = setting.entry.metadata.get("help") or written[setting.key]
    text = text[0].upper() + text[1:].rstrip(".") + "."
    text = " ".join(text.replace("``", "`").split()).replace("|", "\\|")
    return f"**First.** {text}" if setting.name in FIRST else text


def _row(setting: Setting, written: dict[str, str]) -> str:
    default = default_text(setting)
    shown = f"`{default}`" if default else ""
    option = f" `{setting.option}`" if setting.option else ""
    return (
        f"| `{setting.key}` | `{setting.variable}`{option} | {shown} | {_UNITS[setting.base]} "
        f"| {_about(setting, written)} |"
    )


def markdown() -> str:
    """The generated part of the page."""
    lines = ["## Five to touch first", "", "| setting | default | why |", "|---|---|---|"]
    for name, why in FIRST.items():
        default = default_text(SETTINGS[name])
        lines.append(f"| `{name}` | {f'`{default}`' if default else ''} | {why} |")
    for section, owner in (*SECTIONS.items(), ("", Config)):
        intro = (inspect.getdoc(owner) or "").replace("``", "`")
        if not section:
            intro = "What stands in the file before all sections."
        lines += ["", f"## {section or 'Without a section'}", "", intro, "", *_HEAD]
        written = docstrings(owner)
        lines += [_row(each, written) for each in SETTINGS.values() if each.section == section]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(run(PAGE, "settings", markdown(), __doc__))
