"""Writes the tables of types into docs/cookbook/types.md, from those that the library goes by.

python ci/spark_types.py           rewrites the tables
python ci/spark_types.py --check   exits with 1 if they are not what the library says
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ci.generated_page import run
from spark_udfs.spark_types import markdown

__all__ = ["PAGE"]

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "cookbook" / "types.md"


if __name__ == "__main__":
    sys.exit(run(PAGE, "types", markdown(), __doc__))
