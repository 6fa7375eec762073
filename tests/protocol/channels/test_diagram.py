"""The pictures in docs/design/channel-life.md are those of the tables that the core obeys."""

from __future__ import annotations

import pytest

from aqueduct.protocol.common.state import (
    RECEIVER,
    SENDER,
    ReceiverState,
    SenderInput,
    SenderState,
)
from ci.state_diagram import PAGE, diagram, redrawn

pytestmark = pytest.mark.checkout


def test_the_pictures_are_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert redrawn(page) == page, "run python ci/state_diagram.py"


def test_every_allowed_step_is_drawn() -> None:
    drawn = diagram(SENDER, SenderState.OPEN, SenderState.ENDED)
    for (state, what), following in SENDER.items():
        if following is None or state is SenderState.ENDED:
            continue
        arrow = next(
            line for line in drawn.splitlines() if f" {state.name} --> {following.name}:" in line
        )
        assert what.name.lower().replace("_", " ") in arrow


def test_a_changed_table_changes_the_picture() -> None:
    changed = {**SENDER, (SenderState.FINISHED, SenderInput.CANCEL): SenderState.CANCELLED}
    drawn = diagram(changed, SenderState.OPEN, SenderState.ENDED)
    assert "FINISHED --> CANCELLED: cancel" in drawn
    assert "FINISHED --> CANCELLED" not in diagram(SENDER, SenderState.OPEN, SenderState.ENDED)


def test_a_page_without_its_place_is_an_error() -> None:
    with pytest.raises(ValueError, match="'receiver'"):
        redrawn(PAGE.read_text(encoding="utf-8").replace("<!-- receiver: end -->", ""))
    assert "CLOSED" in diagram(RECEIVER, ReceiverState.OPEN, ReceiverState.CLOSED)
