"""Two sides that do whatever is allowed with bidirectional streams, and what must come of it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from aqueduct.carriers.contract import BIDI
from aqueduct.config import Config
from tests.carriers.test_bidi import beat, begun, slots
from tests.carriers.users import KINDS, Pair, Recorder, is_lossy, linked, met

ROOM = 12
WINDOW = 3000


def narrow() -> Config:
    """Few slots, and windows that are soon full."""
    config = slots(ROOM)
    return dataclasses.replace(config, flow=dataclasses.replace(config.flow, initial_window=WINDOW))


class Person:
    """One side, and what it has done with each stream by the number that it has for it."""

    def __init__(self, user: Recorder, chance: random.Random) -> None:
        self.user = user
        self.chance = chance
        self.opened = 0
        self.said: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        """Directions with an end."""
        self.codes: dict[int, int] = {}
        """Of directions that it has reset, perhaps after their end."""
        self.stopped: dict[int, int] = {}

    @property
    def known(self) -> list[int]:
        """Streams that it may use."""
        user = self.user
        heard = {number for number in (*user.data, *user.resets, *user.stops) if number & 1}
        return sorted({*self.said, *heard})

    def open(self) -> None:
        """Opens a stream, if it may."""
        if self.user.carrier.bidi_openable:
            self.write(BIDI | self.opened << 1)
            self.opened += 1

    def write(self, number: int) -> None:
        """Writes a little or more, and perhaps the end."""
        if number in self.ended or number in self.codes:
            return
        data = self.chance.randbytes(self.chance.choice((0, 1, 100, WINDOW, 3 * WINDOW)))
        fin = self.chance.random() < 0.2
        self.user.carrier.write(number, [data[:50], data[50:]], fin)
        if number not in self.user.stops:
            self.said.setdefault(number, bytearray()).extend(data)
        self.said.setdefault(number, bytearray())
        if fin:
            self.ended.add(number)

    def reset(self, number: int) -> None:
        """Gives up what it writes."""
        self.user.carrier.reset(number, code := self.chance.randrange(1 << 40))
        self.codes.setdefault(number, code)
        self.said.setdefault(number, bytearray())

    def stop(self, number: int) -> None:
        """Wants no more of it."""
        if number not in self.stopped:
            self.stopped[number] = self.chance.randrange(1 << 40)
            self.user.carrier.stop(number, self.stopped[number])

    def credit(self, number: int, more: int) -> None:
        """Lets the other side send more."""
        limit = self.user.limits.get(number, WINDOW)
        self.user.credit(number, limit + more)

    def act(self) -> None:
        """One thing or another."""
        known = self.known
        what = self.chance.random()
        if what < 0.2 or not known:
            self.open()
            return
        number = self.chance.choice(known)
        if what < 0.6:
            self.write(number)
        elif what < 0.65:
            self.reset(number)
        elif what < 0.7:
            self.stop(number)
        else:
            self.credit(number, self.chance.randrange(2 * WINDOW))
        if self.chance.random() < 0.5:
            self.user.carrier.flush()

    def finish(self) -> None:
        """Ends all that is open, and takes all that comes."""
        for number in self.known:
            self.credit(number, 1 << 30)
            if number not in self.ended and number not in self.codes:
                self.user.carrier.write(number, [], True)
                self.ended.add(number)
                self.said.setdefault(number, bytearray())
        self.user.carrier.flush()


def check(reader: Person, writer: Person) -> None:
    """What one side has heard, against what the other one has said."""
    user = reader.user
    for number in reader.known:
        said, heard = writer.said[number ^ 1], user.data.get(number, b"")
        assert said.startswith(heard)
        if number in user.ended:
            assert heard == said
            assert number ^ 1 in writer.ended
        else:
            codes = writer.codes.get(number ^ 1), reader.stopped.get(number)
            assert user.resets[number] in codes


async def talk(pair: Pair, seed: int, count: int) -> tuple[Person, Person]:
    """Both do something, and then end it all."""
    chance = random.Random(seed)
    left, right = (Person(user, chance) for user in (pair.client, pair.server))
    for index in range(count):
        chance.choice((left, right)).act()
        if index % 25 == 24:
            for person in (left, right):
                person.user.carrier.flush()
            await beat(pair, 1)

    def all_over() -> bool:
        for person in (left, right):
            person.finish()
        return left.known == sorted(number ^ 1 for number in right.known) and all(
            {*person.user.ended, *person.user.resets}.issuperset(person.known)
            for person in (left, right)
        )

    await met(all_over)
    return left, right


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_they_do(kind: str, seed: int) -> None:
    async with linked(kind, narrow(), window=None, server_window=None, bidi=True) as pair:
        await begun(pair)
        left, right = await talk(pair, seed, 200 if is_lossy(kind) else 1000)
        assert left.opened + right.opened > ROOM
        check(left, right)
        check(right, left)
        for person in (left, right):
            carrier: Any = person.user.carrier
            await met(lambda: carrier.bidi_openable >= ROOM // 2)  # noqa: B023
