"""A full database: thousands of people, their teams, keys and events, and a long history of requests on the ledger.

Nothing is written past the services: requests go through `apply_batch` like a journal's, money through top-ups, so the
audit has everything to check. One person is the busiest: a tenth of all requests, many keys and teams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from random import Random as Numbers

from marketplace.accounts import service as accounts
from marketplace.auth import sessions
from marketplace.events.tables import event
from marketplace.keys import service as keys
from marketplace.keys.rules import KeyKind
from marketplace.ledger import meters
from marketplace.ledger.apply import apply_batch
from marketplace.ledger.records import Hold, JournalRecord, Settle
from marketplace.settings import service as settings
from marketplace.store.db import Database, WriteUnit
from marketplace.store.ids import new_id
from marketplace.store.vault import Vault
from marketplace.teams import service as teams
from marketplace.users import service as users
from marketplace.users.service import User

MODELS = ("smollm2-135m", "qwen3-0.6b")
NODE = "gateway-1"
REQUESTS_IN_BATCH = 512
BUSIEST = 10
"""One of so many requests is the busiest person's."""
KEYS, TEAMS, EVENTS = 150, 150, 5000
"""Of the busiest person."""
BALANCE = 10**14
_UNIT = 500
"""People made in one transaction."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much there is."""

    people: int
    teams: int
    requests: int


@dataclass(slots=True)
class Town:
    """Who lives there: enough of it to ask for everything."""

    busiest: User
    key: str
    """the busiest person's"""
    session: str
    """an admin's token"""
    people: list[User] = field(default_factory=list)


class Builder:
    """Builds a town in an empty database. `now` is when it is finished, in µs: history lies in the 30 days before."""

    def __init__(self, database: Database, pepper: bytes, now: int, seed: int = 7) -> None:
        self._database = database
        self._pepper = pepper
        self._numbers = Numbers(seed)
        self._random = self._numbers.randbytes
        self._end = now
        self._now = now - 29 * 86_400_000_000

    def build(self, size: Size) -> Town:
        """Build everything; returns who lives there."""
        self._database.migrate()
        prices = {}
        with self._database.write() as unit:
            for model in MODELS:
                prices[model] = meters.set_price(
                    unit, model, 10**8, 5 * 10**7, 4 * 10**8, version_id=self._id(), now=self._now
                ).id
            admin = self._person(unit, "admin", 0)
            busiest = self._person(unit, "user", 0)
            town = Town(busiest, self._key(unit, "user", busiest)[1], "", [busiest])
        self._people(town, size.people - 2)
        self._teams(town, size.teams)
        self._events(town)
        self._requests(town, size.requests, prices)
        with self._database.write() as unit:
            vault = Vault(self._pepper)
            town.session, _ = sessions.open_session(unit, admin.id, vault=vault, now=self._end, random=self._random)
            settings.change(unit, {"read_per_minute": 1_000_000, "read_burst": 1_000_000}, self._end)
        return town

    def _tick(self, by: int = 1000) -> int:
        self._now += by
        return self._now

    def _id(self) -> str:
        return new_id(self._tick(), self._random)

    def _person(self, unit: WriteUnit, role: str, number: int) -> User:
        made = users.create(
            unit,
            email=f"{role}.{self._random(3).hex()}.{number}@example.com",
            role="admin" if role == "admin" else "user",
            password_hash=None,
            now=self._tick(),
            random=self._random,
            name=f"{role.title()} {number} {self._random(2).hex()}",
            verified=True,
        )
        accounts.top_up(unit, made.account_id, BALANCE, key=made.id, now=self._tick(), random=self._random)
        return made

    def _key(self, unit: WriteUnit, kind: KeyKind, owner: User) -> tuple[str, str]:
        row, secret = keys.create(
            unit,
            kind=kind,
            owner_id=owner.id,
            account_id=owner.account_id,
            name=f"key {self._random(2).hex()}",
            pepper=self._pepper,
            now=self._tick(),
            random=self._random,
        )
        return row.id, secret.text

    def _people(self, town: Town, number: int) -> None:
        for first in range(0, number, _UNIT):
            with self._database.write() as unit:
                for one in range(first, min(first + _UNIT, number)):
                    town.people.append(self._person(unit, "user", one + 1))

    def _teams(self, town: Town, number: int) -> None:
        with self._database.write() as unit:
            for one in range(number):
                owner = town.busiest if one < TEAMS else self._numbers.choice(town.people)
                teams.create(unit, name=f"team {one}", owner_id=owner.id, now=self._tick(), random=self._random)

    def _events(self, town: Town) -> None:
        """Half of them the busiest person's; as rows, because each of them alone would be a statement."""
        rows = []
        for one in range(2 * EVENTS):
            owner = town.busiest if one % 2 else self._numbers.choice(town.people)
            rows.append(
                {
                    "id": self._id(),
                    "at": self._now,
                    "action": "keys.add",
                    "actor_kind": "user",
                    "actor_id": owner.id,
                    "credential_id": owner.id,
                    "owner_id": owner.id,
                    "subject_id": owner.id,
                    "detail": '{"prefix":"hr_u_4fT9kQ2x","kind":"user"}',
                    "request_id": self._id(),
                }
            )
        with self._database.write() as unit:
            unit.insert_rows(event, rows)

    def _requests(self, town: Town, number: int, prices: dict[str, str]) -> None:
        """The history: batches of a journal, evenly over what is left of the 30 days."""
        with self._database.write() as unit:
            own = [self._key(unit, "user", town.busiest)[0] for _ in range(KEYS)][:3]
        others = {user.id: f"key of {user.id}" for user in town.people}
        step = max(1, (self._end - self._now - 1_000_000) // (2 * max(1, number)))
        seq = count(1)

        def records() -> Iterator[JournalRecord]:
            for one in range(number):
                busy = one % BUSIEST == 0
                user = town.busiest if busy else self._numbers.choice(town.people)
                model = MODELS[one % 3 == 0]
                request_id = new_id(self._tick(step), self._random)
                key_id = self._numbers.choice(own) if busy else others[user.id]
                account = user.account_id
                yield Hold(next(seq), request_id, account, key_id, model, prices[model], 10**6, 200, 1024, self._now)
                prompt = self._numbers.randrange(1, 400)
                counts = (prompt, prompt // 3, self._numbers.randrange(1, 200))
                at = self._tick(step)
                yield Settle(
                    next(seq), request_id, *counts, "finished", True, "completed", "engine", "epoch", at, counts[2]
                )

        made = records()
        while batch := list(islice(made, 2 * REQUESTS_IN_BATCH)):
            with self._database.write() as unit:
                done = apply_batch(unit, NODE, batch)
            assert done.quarantined == 0, "the history contradicts the ledger"


def build(
    database: Database, pepper: bytes, size: Size, now: int, said: Callable[[str], None] = lambda text: None
) -> Town:
    """Build a town of that size."""
    town = Builder(database, pepper, now).build(size)
    said(f"{size.people} people, {size.teams} teams, {size.requests} requests")
    return town
