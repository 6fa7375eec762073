"""How many batches a call may have under way, and how many bytes."""

from __future__ import annotations

from aqueduct._speedups.calls.batch_sender import InFlightWindow


def test_the_window():
    window = InFlightWindow(3, 100)
    assert window.open
    assert window.send(99) == 0
    assert window.open
    assert window.send(2) == 1
    assert not window.open  # by bytes
    window.settle(0)
    assert window.open
    assert [window.send(1), window.send(1)] == [2, 3]
    assert not window.open  # by number
    window.settle(7)  # more than was ever sent
    assert window.settled == 4 and window.open
    window.settle(1)
    assert window.send(1000) == 4
    assert not window.open
    window.settle(4)
    assert window.open


def test_the_window_has_more_of_small_batches():
    window = InFlightWindow(2, 100, 5, 30)
    for size in (1, 1, 1, 1):
        window.send(size)
    assert window.open
    window.send(1)
    assert not window.open  # five
    window.settle(0)
    assert window.open
    window.held = 26
    assert not window.open  # 4 + 26 bytes
    window.settle(3)
    assert window.open  # one under way, however small
    window.send(40)
    assert not window.open  # two, not small
    window.held = 0
    assert not window.open
    window.settle(4)
    assert window.open
    assert window.send(60) == 6 and window.send(60) == 7 and not window.open
    tight = InFlightWindow(8, 10, 64, 1000)
    tight.send(10)
    assert not tight.open  # what is under way is bounded first


def test_the_window_of_answers_in_any_order():
    window = InFlightWindow(3, 100)
    for size in (10, 50, 30):
        window.send(size)
    assert not window.open and window.sent_bytes == 90
    assert window.settle_one(1) and window.open
    assert window.send(90) == 3
    assert not window.open  # by number and by bytes
    assert window.settle_one(2) and not window.open  # by bytes: 10 and 90 are under way
    assert not window.settle_one(2) and not window.settle_one(4) and not window.settle_one(-1)
    assert window.settle_one(3) and window.settle_one(0)
    assert window.settled == 4 and window.is_one_below(0) is False and window.open
