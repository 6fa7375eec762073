"""The core and the plain model side by side, chunk by chunk."""

from __future__ import annotations

from dataclasses import replace

from aqueduct.dissect.bpmux_scenarios import Session
from aqueduct.dissect.values import WireError
from aqueduct.errors import AqueductError
from tests.reference import bpmux as model

__all__ = ["CREDITS", "play"]

CREDITS = [
    ("send", model.Chunk("In-Stream", 0, credit=40), 0),
    ("recv", model.Chunk("In-Stream", 0, credit=40), 0),
]
"""What most steps need to be allowed: credit on the top-level, both ways."""


def play(steps: list[tuple[str, model.Chunk, int]]) -> int:
    """Both at once; how many steps were no error."""
    session, endpoint = Session(), model.Endpoint()
    for index, (what, given_chunk, cut) in enumerate(steps):
        # What this side sends in pieces is cut by the scheduler, not by a chunk of the application.
        chunk = replace(given_chunk, total=0) if what == "send" else given_chunk
        data = model.encode(chunk)
        wanted: Exception | None = None
        try:
            (endpoint.receive if what == "recv" else endpoint.send)(chunk)
        except (model.Violation, model.Misuse) as error:
            wanted = error
        got: Exception | None = None
        try:
            if what == "recv":
                for part in (data[:cut], data[cut:]):
                    session.receive(part)
            else:
                session.send(data)
        except (WireError, AqueductError) as error:
            got = error
        assert (got is None) == (wanted is None), (index, chunk, got, wanted)
        if wanted is not None:
            return index
        compare(session, endpoint)
    return len(steps)


def compare(session: Session, endpoint: model.Endpoint) -> None:
    assert [tuple(entry) for entry in session.delivered] == [
        (place, number, what, data.hex()) for place, number, what, data in endpoint.delivered
    ]
    assert session.acks == b"".join(map(model.encode, endpoint.acks))
    for place, name in enumerate(endpoint.maps):
        assert session.mux.count(place) == len(endpoint.maps[name])
        for number, entity in endpoint.maps[name].items():
            found = session.mux.find(place, number)
            assert found is not None
            assert (found.credit_in, found.credit_out, found.partial, found.end_out) == (
                entity.credit_in,
                entity.credit_out,
                entity.partial,
                entity.end_out,
            )
