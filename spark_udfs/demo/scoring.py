"""What the demo computes for each flight: plain numpy on record batches, no network.

The service and the check of its answers run the same functions. Their results do not depend on
how the rows are cut into batches, bit for bit: every operation works element by element, and the
model is fitted on sums of integers, which are exact in any order. Nor do they depend on the
processor, whose sines and solutions differ in the last bits: those are rounded off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["SCORES", "DelayModel", "great_circle_km", "score", "scored_schema"]

Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]

SCORES: Final = pa.schema(
    [
        ("expected_arr_delay", pa.float64()),
        ("great_circle_km", pa.float64()),
    ]
)
"""What ``score`` appends. ``expected_arr_delay`` is in minutes, null for a flight that never
arrived at its destination (cancelled or diverted: its ``arr_delay`` is null);
``great_circle_km`` is null where an airport's coordinates are unknown."""

EARTH_RADIUS_KM: Final = 6371.0088
TRAINING_STEP: Final = 4
_SLOPES: Final = ("dep_delay", "distance", "hour")


def scored_schema(flights: pa.Schema) -> pa.Schema:
    """The schema of ``score``'s answer for flights of the given schema."""
    for field in SCORES:
        flights = flights.append(field)
    return flights


def score(flights: pa.RecordBatch, model: DelayModel) -> pa.RecordBatch:
    """The same rows with two columns more, ``SCORES``."""
    expected = model.expected_delay(flights)
    kilometres = great_circle_km(flights)
    return flights.append_column(SCORES.field(0), expected).append_column(
        SCORES.field(1), kilometres
    )


@dataclass(frozen=True)
class DelayModel:
    """A linear model of the arrival delay: a constant for each carrier and three slopes."""

    carriers: dict[str, float]
    """Minutes, by carrier code."""
    slopes: dict[str, float]
    """Minutes by minute of departure delay, by mile, by scheduled hour of the day."""
    rows: int
    """Flights it was fitted on."""

    @classmethod
    def fit(cls, flights: pa.Table) -> DelayModel:
        """Least squares on every fourth flight that arrived."""
        sample = flights.take(np.arange(0, flights.num_rows, TRAINING_STEP))
        sample = sample.filter(pc.is_valid(sample["arr_delay"]))
        carriers = sorted(pc.unique(sample["carrier"]).to_pylist())
        names = sample["carrier"].to_numpy()
        columns = [sample[name].to_numpy().astype(np.int64) for name in _SLOPES]
        columns += [(names == carrier).astype(np.int64) for carrier in carriers]
        features = np.stack(columns, axis=1)
        target = sample["arr_delay"].to_numpy().astype(np.int64)
        # Normal equations in integers: exact, so every process on every machine gets the same.
        # What the solver's rounding leaves is cut off at a millionth of a minute.
        solution = np.linalg.solve(
            (features.T @ features).astype(np.float64), (features.T @ target).astype(np.float64)
        )
        values = [float(value) for value in np.round(solution, 6)]
        return cls(
            carriers=dict(zip(carriers, values[len(_SLOPES) :], strict=True)),
            slopes=dict(zip(_SLOPES, values, strict=False)),
            rows=len(target),
        )

    def expected_delay(self, flights: pa.RecordBatch) -> pa.Array:
        """Minutes; null for a flight that never arrived, and for an unknown carrier."""
        codes = pa.array(self.carriers.keys(), pa.string())
        constants = pa.array(self.carriers.values(), pa.float64())
        constant = constants.take(pc.index_in(flights["carrier"], value_set=codes))
        unknown = _nulls(constant) | _nulls(flights["arr_delay"])
        total = _values(constant)
        for name, slope in self.slopes.items():
            unknown |= _nulls(flights[name])
            total = total + slope * _values(flights[name])
        return pa.array(total, mask=unknown)


def great_circle_km(flights: pa.RecordBatch) -> pa.Array:
    """The way over the globe between a flight's airports, to the millimetre (haversine)."""
    columns = [flights[name] for name in ("origin_lat", "origin_lon", "dest_lat", "dest_lon")]
    unknown = np.logical_or.reduce([_nulls(column) for column in columns])
    lat1, lon1, lat2, lon2 = (np.radians(_values(column)) for column in columns)
    half_chord = (
        np.sin((lat2 - lat1) / 2) ** 2
        + np.cos(lat1) * np.cos(lat2) * np.sin((lon2 - lon1) / 2) ** 2
    )
    kilometres = 2 * EARTH_RADIUS_KM * np.arcsin(np.sqrt(half_chord))
    return pa.array(np.round(kilometres, 6), mask=unknown)  # what processors differ in is cut off


def _nulls(column: pa.Array) -> Numbers:
    result: Numbers = column.is_null().to_numpy(zero_copy_only=False)
    return result


def _values(column: pa.Array) -> Numbers:
    filled = column.fill_null(0).to_numpy(zero_copy_only=False)
    result: Numbers = np.ascontiguousarray(filled, dtype=np.float64)
    return result
