"""Pages of docs with a part that is made of the code: written, or compared with the code."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

__all__ = ["run"]


def run(page: Path, part: str, made: str, about: str | None) -> int:
    """The status of a command that writes ``made`` between the two comments named ``part``.

    With ``--check`` it writes nothing, and the status is 1 if the page differs. ``about``: its
    help.
    Raises SystemExit if the page has no place for it.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    begin, end = f"<!-- {part} -->\n", f"<!-- end of {part} -->\n"
    text = page.read_text()
    place = re.compile(f"{begin}.*{end}", re.DOTALL)
    if not place.search(text):
        raise SystemExit(f"{page} has no lines {begin.strip()} and {end.strip()}")
    wanted = place.sub(lambda _: f"{begin}{made}{end}", text)
    if given.check:
        return int(text != wanted)
    page.write_text(wanted)
    return 0
