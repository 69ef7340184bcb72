"""The books under people who come, pay, spend, get money back and are erased, while the power fails at any statement
and eight of them act at once. Money is moved, never made, and the audit is clean whatever happened."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random as RandomNumbers
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from sqlalchemy import event, select

from marketplace.accounts import service as accounts
from marketplace.accounts.service import RefundError
from marketplace.events.transitions import SYSTEM, Scene
from marketplace.ledger.apply import apply_batch
from marketplace.ledger.audit import audit
from marketplace.ledger.book import InsufficientFundsError
from marketplace.ledger.ledger import CLEARING, PROMO_EXPENSE, REFUNDS, WRITEOFF, CreditInUseError, revenue_account
from marketplace.ledger.records import Hold, Settle
from marketplace.ledger.tables import account
from marketplace.settings import service as app_settings
from marketplace.store.ids import new_id
from marketplace.users import bonus, erasure
from marketplace.users import service as users
from marketplace.users.service import User
from marketplace.users.tables import users as users_table

if TYPE_CHECKING:
    from marketplace.store.db import Database, WriteUnit
    from tests.marketplace.conftest import MakeDatabase, Shop

T = TypeVar("T")
PLATFORM = (CLEARING, PROMO_EXPENSE, REFUNDS, WRITEOFF, revenue_account("tiny"))


class PowerFailureError(Exception):
    """The process is gone in the middle of a transaction."""


@contextmanager
def power_failure(database: Database, after: int) -> Iterator[None]:
    """Let the statement behind so many others never reach the database."""
    left = [after]

    def count(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise PowerFailureError

    event.listen(database._writer, "before_cursor_execute", count)
    try:
        yield
    finally:
        event.remove(database._writer, "before_cursor_execute", count)


class People(RuleBasedStateMachine):
    """One random life of a platform and its people; a dict of balances takes every step too."""

    def __init__(self, shop: Shop) -> None:
        super().__init__()
        self.shop = shop
        self.living: dict[str, User] = {}
        self.erased: list[User] = []
        self.posted: dict[str, int] = dict.fromkeys(PLATFORM, 0)
        self.spent: dict[str, int] = {}
        self.running: dict[str, str] = {}
        self.charged: dict[str, tuple[str, int]] = {}
        self.failures = 0

    def do(self, fails_after: int | None, work: Callable[[WriteUnit], T]) -> T:
        """Take a step in one transaction; where the power fails first, nothing of it happened, and it is taken
        again."""
        if fails_after is not None:
            before = self.shop.dump()
            try:
                with power_failure(self.shop.database, fails_after):
                    return self.shop.database.transact(work)
            except PowerFailureError:
                self.failures += 1
                assert self.shop.dump() == before
        return self.shop.database.transact(work)

    def move(self, account_id: str, amount: int, other: str) -> None:
        self.posted[account_id] += amount
        self.posted[other] -= amount

    fails = st.none() | st.integers(0, 14)

    @rule(fails=fails)
    def come(self, fails: int | None) -> None:
        """Somebody registers with the one address there is, or with another; their bonus is given once."""
        address = "ada@example.com"
        if any(user.email == address for user in self.living.values()):
            address = f"{self.shop.new_id()}@example.com"
        now = self.shop.tick()

        def work(unit: WriteUnit) -> User:
            made = users.create(
                unit, email=address, role="user", password_hash=None, now=now, random=self.shop.random, name="Ada"
            )
            assert bonus.grant_once(unit, made, now=now, random=self.shop.random)
            assert not bonus.grant_once(unit, made, now=now, random=self.shop.random)
            return made

        made = self.do(fails, work)
        with self.shop.database.read() as unit:
            gift = app_settings.current(unit).signup_bonus
        self.living[made.account_id] = made
        self.posted[made.account_id] = self.spent[made.account_id] = 0
        self.move(made.account_id, gift, PROMO_EXPENSE)

    @precondition(lambda self: self.living)
    @rule(data=st.data(), amount=st.integers(1, 3000), fails=fails)
    def top_up(self, data: st.DataObject, amount: int, fails: int | None) -> None:
        name, key, now = data.draw(st.sampled_from(sorted(self.living))), self.shop.new_id(), self.shop.tick()
        self.do(
            fails,
            lambda unit: accounts.top_up(unit, name, amount, key=key, now=now, random=self.shop.random),
        )
        self.move(name, amount, CLEARING)

    @precondition(lambda self: self.posted.keys() - set(PLATFORM))
    @rule(data=st.data(), amount=st.integers(-2000, 2000).filter(bool), fails=fails)
    def adjust(self, data: st.DataObject, amount: int, fails: int | None) -> None:
        """Also on the accounts of those who were erased: what is left of theirs may be paid out."""
        name, key, now = data.draw(st.sampled_from(sorted(self.spent))), self.shop.new_id(), self.shop.tick()
        state = self.shop.state(name)
        try:
            self.do(
                fails,
                lambda unit: accounts.adjust(unit, name, amount, key=key, now=now, random=self.shop.random),
            )
        except InsufficientFundsError:
            assert state.available + amount < 0
        else:
            self.move(name, amount, CLEARING)

    @precondition(lambda self: self.living)
    @rule(data=st.data(), amount=st.integers(0, 800), fails=fails)
    def begin(self, data: st.DataObject, amount: int, fails: int | None) -> None:
        hold = self.shop.hold(data.draw(st.sampled_from(sorted(self.living))), amount)
        self.do(fails, lambda unit: apply_batch(unit, "gateway-1", [hold]))
        self.running[hold.request_id] = hold.account_id

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(0, 600), fails=fails)
    def end(self, data: st.DataObject, tokens: int, fails: int | None) -> None:
        request = data.draw(st.sampled_from(sorted(self.running)))
        name = self.running.pop(request)
        record = self.shop.settle(request, tokens, 0, 0) if tokens else self.shop.void(request)
        done = self.do(fails, lambda unit: apply_batch(unit, "gateway-1", [record]))
        if tokens:  # one nano-unit each
            paid = tokens - done.written_off
            self.move(name, -paid, revenue_account("tiny"))
            self.move(WRITEOFF, -done.written_off, revenue_account("tiny"))
            self.spent[name] += paid
            if paid:
                self.charged[request] = (name, paid)

    @precondition(lambda self: self.charged)
    @rule(data=st.data(), amount=st.integers(1, 200), fails=fails)
    def refund(self, data: st.DataObject, amount: int, fails: int | None) -> None:
        request = data.draw(st.sampled_from(sorted(self.charged)))
        name, left = self.charged[request]
        key, now = self.shop.new_id(), self.shop.tick()
        try:
            self.do(
                fails,
                lambda unit: accounts.refund(unit, request, amount, key=key, now=now, random=self.shop.random),
            )
        except RefundError:
            assert amount > left
        else:
            self.charged[request] = (name, left - amount)
            self.move(name, amount, REFUNDS)
            self.spent[name] -= amount

    @precondition(lambda self: self.living)
    @rule(data=st.data(), fails=fails)
    def erase(self, data: st.DataObject, fails: int | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.living)))
        user, now = self.living[name], self.shop.tick()

        def work(unit: WriteUnit) -> bool:
            if erasure.obstacles(unit, user):
                return False
            erasure.erase(unit, user, Scene(SYSTEM, now, self.shop.random))
            return True

        assert self.do(fails, work) == (name not in self.running.values())
        if name not in self.running.values():
            self.erased.append(self.living.pop(name))

    def teardown(self) -> None:
        """Let everything end, compare every balance, and audit."""
        for request in sorted(self.running):
            self.shop.apply(self.shop.void(request))
        assert {name: self.shop.posted(name) for name in self.posted} == self.posted
        assert sum(self.posted.values()) == 0
        with self.shop.database.read() as unit:
            spent = dict(unit.select(select(account.c.id, account.c.spent)).all())
            rows = {row.id: row for row in unit.select(select(users_table))}
        assert {name: spent[name] for name in self.spent} == self.spent
        for user in self.erased:
            row = rows[user.id]
            assert (row.email, row.name, row.erased_at is None, row.account_id) == ("", "", False, user.account_id)
        report = self.shop.audit()
        assert report.clean, "\n".join(report.lines())


def _live(
    fresh: MakeDatabase, make_shop: Callable[[Database], Shop], examples: int, steps: int, same: bool = False
) -> list[People]:
    """Live so many lives, the `same` ones each time or others."""
    lives: list[People] = []

    def begin() -> People:
        lives.append(People(make_shop(fresh())))
        return lives[-1]

    run_state_machine_as_test(
        begin,  # type: ignore[arg-type]  # any callable that makes a machine is called the same way
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=same,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return lives


def test_people_come_and_go(fresh_database: MakeDatabase, make_shop: Callable[[Database], Shop]) -> None:
    lives = _live(fresh_database, make_shop, examples=2, steps=24, same=True)
    assert any(life.failures for life in lives)


@pytest.mark.slow
def test_many_people_come_and_go(fresh_database: MakeDatabase, make_shop: Callable[[Database], Shop]) -> None:
    lives = _live(fresh_database, make_shop, examples=100, steps=60)
    assert any(life.erased for life in lives) and any(life.posted[REFUNDS] for life in lives)


class Client:
    """One of several who act at once: its own journal, its own idea of what it moved."""

    def __init__(self, number: int, shop: Shop, people: list[User]) -> None:
        self.number, self.database, self.people, self.price_id = number, shop.database, people, shop.price_id
        self.numbers = RandomNumbers(number)
        self.now = shop.now + number * 10**9
        self.seq = 0
        self.moved = dict.fromkeys(PLATFORM, 0)
        self.charged: list[str] = []
        self.erased = 0

    def tick(self) -> int:
        self.now += 1
        return self.now

    def new_id(self) -> str:
        return new_id(self.tick(), self.numbers.randbytes)

    def act(self, steps: int) -> None:
        """Take random steps; each is one transaction."""
        actions = (self.top_up, self.top_up, self.adjust, self.infer, self.infer, self.refund, self.credit, self.bonus)
        for step in range(steps):
            # Few erasures: or nobody is left for the others.
            self.erase() if step == steps // 2 and self.number % 2 else self.numbers.choice(actions)()

    def top_up(self) -> None:
        amount, name, key, now = self.numbers.randint(1, 3000), self.someone().account_id, self.new_id(), self.tick()
        self.database.transact(
            lambda unit: accounts.top_up(unit, name, amount, key=key, now=now, random=self.numbers.randbytes)
        )
        self.moved[CLEARING] -= amount

    def adjust(self) -> None:
        amount, key, now = self.numbers.choice((-700, 300)), self.new_id(), self.tick()
        name = self.someone().account_id
        try:
            self.database.transact(
                lambda unit: accounts.adjust(unit, name, amount, key=key, now=now, random=self.numbers.randbytes)
            )
        except InsufficientFundsError:
            return
        self.moved[CLEARING] -= amount

    def infer(self) -> None:
        """A request of its own journal, from its hold to its end."""
        request, name, tokens = self.new_id(), self.someone().account_id, self.numbers.randint(1, 900)
        hold = Hold(
            self.next(),
            request,
            name,
            "key",
            "tiny",
            self.price_id,
            400,
            prompt_tokens=1,
            max_completion=1,
            at=self.tick(),
        )
        settle = Settle(
            self.next(), request, tokens, 0, 0, "finished", True, "finished", "engine", "epoch", self.tick()
        )
        node = f"gateway-{self.number}"
        self.database.transact(lambda unit: apply_batch(unit, node, [hold]))
        done = self.database.transact(lambda unit: apply_batch(unit, node, [settle]))
        assert (done.settled, done.quarantined) == (1, 0)
        self.moved[revenue_account("tiny")] += tokens
        self.moved[WRITEOFF] -= done.written_off
        if done.written_off < tokens:
            self.charged.append(request)

    def refund(self) -> None:
        if not self.charged:
            return
        request, key, now = self.numbers.choice(self.charged), self.new_id(), self.tick()
        try:
            self.database.transact(
                lambda unit: accounts.refund(unit, request, 7, key=key, now=now, random=self.numbers.randbytes)
            )
        except RefundError:
            return
        self.moved[REFUNDS] -= 7

    def credit(self) -> None:
        name, limit = self.someone().account_id, self.numbers.randint(0, 500)
        try:
            self.database.transact(lambda unit: accounts.set_credit_limit(unit, name, limit))
        except CreditInUseError:
            return

    def bonus(self) -> None:
        user, now = self.someone(), self.tick()
        if self.database.transact(lambda unit: bonus.grant_once(unit, user, now=now, random=self.numbers.randbytes)):
            with self.database.read() as unit:
                self.moved[PROMO_EXPENSE] -= app_settings.current(unit).signup_bonus

    def erase(self) -> None:
        user, now = self.someone(), self.tick()

        def work(unit: WriteUnit) -> bool:
            found = users.seize(unit, user.id)
            if found is None or erasure.obstacles(unit, found):
                return False
            erasure.erase(unit, found, Scene(SYSTEM, now, self.numbers.randbytes))
            return True

        self.erased += self.database.transact(work)

    def someone(self) -> User:
        return self.numbers.choice(self.people)

    def next(self) -> int:
        self.seq += 1
        return self.seq


def _eight_at_once(shop: Shop, steps: int) -> list[Client]:
    people = []
    for number in range(12):
        with shop.database.write() as unit:
            people.append(
                users.create(
                    unit,
                    email=f"{number}@example.com",
                    role="user",
                    password_hash=None,
                    now=shop.tick(),
                    random=shop.random,
                )
            )
    clients = [Client(number, shop, people) for number in range(8)]
    troubles: list[BaseException] = []

    def run(client: Client) -> None:
        try:
            client.act(steps)
        except BaseException as trouble:  # told below: a thread's exception would be lost
            troubles.append(trouble)

    threads = [threading.Thread(target=run, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert troubles == []
    for name in PLATFORM:
        assert shop.posted(name) == sum(client.moved[name] for client in clients), name
    with shop.database.read() as snapshot:
        report = audit(snapshot, now=clients[-1].now)
    assert report.clean, "\n".join(report.lines())
    return clients


def test_eight_clients_at_once(shop: Shop) -> None:
    clients = _eight_at_once(shop, steps=10)
    assert sum(client.erased for client in clients) >= 1


@pytest.mark.slow
def test_eight_busy_clients_at_once(shop: Shop) -> None:
    clients = _eight_at_once(shop, steps=250)
    assert sum(client.erased for client in clients) >= 1 and any(client.moved[REFUNDS] for client in clients)
