"""Draws the life of a channel into docs/design/channel-life.md, from the tables of the core.

    python ci/state_diagram.py           rewrites the two pictures
    python ci/state_diagram.py --check   exits with 1 if they are not what the tables say

A picture is a Mermaid state diagram between two comment lines.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aqueduct.protocol.common.state import RECEIVER, SENDER, ReceiverState, SenderState

__all__ = ["PAGE", "diagram", "redrawn"]

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "design" / "channel-life.md"
Table = Mapping[tuple[Any, Any], Any]

PICTURES: Final[Mapping[str, tuple[Table, Enum, Enum]]] = {
    "sender": (SENDER, SenderState.OPEN, SenderState.ENDED),
    "receiver": (RECEIVER, ReceiverState.OPEN, ReceiverState.CLOSED),
}
"""By the name in the comment lines: the table, the first state and the last."""


def words(member: Enum) -> str:
    """A state or an input as the picture calls it."""
    return member.name.lower().replace("_", " ")


def diagram(table: Table, first: Enum, last: Enum) -> str:
    """The Mermaid text of one table: what moves the state, and what is refused in it.

    In the last state nothing has an effect any more, so nothing is drawn there.
    """
    arrows: dict[tuple[Enum, Enum], list[str]] = {}
    refused: dict[Enum, list[str]] = {}
    for (state, what), following in table.items():
        if state is last:
            continue
        if following is None:
            refused.setdefault(state, []).append(words(what))
        else:
            arrows.setdefault((state, following), []).append(words(what))
    lines = ["stateDiagram-v2", f"    [*] --> {first.name}"]
    lines += [
        f"    {state.name} --> {following.name}: {', '.join(inputs)}"
        for (state, following), inputs in arrows.items()
    ]
    lines.append(f"    {last.name} --> [*]")
    lines += [
        f"    note left of {state.name}: {', '.join(inputs)} are refused"
        for state, inputs in refused.items()
    ]
    return "\n".join(lines)


def redrawn(page: str) -> str:
    """The page with both pictures as the tables say. Raises ValueError where a place is missing."""
    for name, picture in PICTURES.items():
        begin, end = f"<!-- {name}: drawn by ci/state_diagram.py -->", f"<!-- {name}: end -->"
        block = f"{begin}\n```mermaid\n{diagram(*picture)}\n```\n{end}"
        found = re.findall(re.escape(begin) + ".*?" + re.escape(end), page, flags=re.DOTALL)
        if len(found) != 1:
            raise ValueError(f"{len(found)} places for the picture {name!r}; wanted: one {begin}")
        page = page.replace(found[0], block)
    return page


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    drawn = redrawn(page)
    if drawn == page:
        return 0
    if check:
        print(
            f"{PAGE.name}: the pictures are not what the tables say; run python ci/state_diagram.py"
        )
        return 1
    PAGE.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
