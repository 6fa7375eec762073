"""What is wrong between a client and a service, and how fast the way between them is.

``examine`` makes the checks of ``aqueduct doctor``, ``PathBenchmark`` the measurements of
``aqueduct bench``. Neither prints anything.
"""

from aqueduct.diagnosis.examination import examine
from aqueduct.diagnosis.findings import Finding, Severity
from aqueduct.diagnosis.path_benchmark import Direction, PathBenchmark

__all__ = ["Direction", "Finding", "PathBenchmark", "Severity", "examine"]
