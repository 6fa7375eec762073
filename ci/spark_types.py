"""Writes the tables of types into docs/cookbook/types.md, from those that the library goes by.

python ci/spark_types.py           rewrites the tables
python ci/spark_types.py --check   exits with 1 if they are not what the library says
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_udfs.spark_types import markdown

__all__ = ["PAGE", "rewritten"]

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "cookbook" / "types.md"
_PART: Final = re.compile("<!-- types -->\n.*<!-- end of types -->\n", re.DOTALL)


def rewritten(text: str) -> str:
    """``text`` with the tables as they are to be. Raises SystemExit if it has no place for them."""
    if not _PART.search(text):
        raise SystemExit(f"{PAGE} has no lines <!-- types --> and <!-- end of types -->")
    made = f"<!-- types -->\n{markdown()}<!-- end of types -->\n"
    return _PART.sub(lambda _: made, text)


def main() -> int:
    """The status of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    text = PAGE.read_text()
    wanted = rewritten(text)
    if given.check:
        return int(text != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
