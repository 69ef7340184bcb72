"""The worker that sends mail: refusals, back-off, a server that comes back, and death between any two lines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select

from marketplace.events.tables import event
from marketplace.notify import outbox
from marketplace.notify.mail import Letter, MailError, UndeliverableError, UnreachableError
from marketplace.notify.rules import FIRST_WAIT_US, LEASE_US, MAX_ATTEMPTS, wait_us
from marketplace.notify.tables import outbox as rows
from marketplace.settings import service as settings
from marketplace.workers.outbox import Deliverer

if TYPE_CHECKING:
    from tests.marketplace.conftest import Office, Post

SECOND = 1_000_000


class Killed(BaseException):
    """The process is gone."""


def put(office: Office, number: int = 1, to: str = "ada@example.com", template: str = "password-changed") -> None:
    with office.database.write() as unit:
        for _ in range(number):
            outbox.enqueue(unit, template=template, to=to, values={}, now=office.clock(), random=office.random)


def state(office: Office) -> list[tuple[str | None, int]]:
    with office.database.read() as unit:
        found = unit.select(select(rows.c.outcome, rows.c.attempts).order_by(rows.c.id))
        return [(row.outcome, row.attempts) for row in found]


def events(office: Office) -> list[tuple[str, str]]:
    with office.database.read() as unit:
        return [
            (row.actor_kind, row.detail) for row in unit.select(select(event).where(event.c.action == "mail.give_up"))
        ]


def test_mails_leave_in_order_with_the_server_currency(office: Office, post: Post) -> None:
    with office.database.write() as unit:
        settings.change(unit, {"server_currency": "EUR"}, office.clock())
        values = {"owner": "", "available": "1", "threshold": "5", "rearm": "7.5"}
        outbox.enqueue(
            unit, template="low-balance", to="a@b.c", values=values, now=office.clock(), random=office.random
        )
    put(office, 2)
    letters = post.deliver()
    assert [letter.to for letter in letters] == ["a@b.c", "ada@example.com", "ada@example.com"]
    assert "1 EUR can still be spent" in letters[0].text and len({letter.id for letter in letters}) == 3
    assert state(office) == [("sent", 1)] * 3 and post.deliver() == []


def test_a_server_that_is_down_is_asked_once_a_pass_and_gets_everything_later(office: Office, post: Post) -> None:
    put(office, 3)
    post.trouble = [UnreachableError("down")] * 2
    assert post.deliver() == [] and len(post.trouble) == 1
    assert post.deliver() == [] and post.trouble == []
    assert len(post.deliver()) == 1  # the one that was not tried before
    office.wait(FIRST_WAIT_US / SECOND)
    assert len(post.deliver()) == 2 and state(office) == [("sent", 2), ("sent", 2), ("sent", 1)]


def test_a_mail_is_tried_again_ever_more_rarely_and_then_given_up(office: Office, post: Post) -> None:
    put(office)
    for attempt in range(1, MAX_ATTEMPTS):
        post.trouble = [MailError("mailbox full")]
        assert post.deliver() == [] and post.trouble == [] and state(office) == [(None, attempt)]
        office.wait(wait_us(attempt) / SECOND - 1)
        post.trouble = [MailError("asked too early")]
        assert post.deliver() == [] and len(post.trouble) == 1
        office.wait(1)
    post.trouble = [MailError("mailbox full")]
    assert post.deliver() == [] and state(office) == [("given up", MAX_ATTEMPTS)]
    assert events(office) == [("system", '{"template":"password-changed","attempts":12}')]
    office.wait(30 * 86_400)
    assert post.deliver() == []


@pytest.mark.parametrize(
    ("template", "to", "trouble"),
    [
        ("password-changed", "ada@example.com", UndeliverableError("550")),
        ("no-such-template", "ada@example.com", None),
        ("verify-email", "ada@example.com", None),  # its link is missing
    ],
)
def test_what_will_never_leave_is_given_up_at_once(
    office: Office, post: Post, template: str, to: str, trouble: MailError | None
) -> None:
    put(office, to=to, template=template)
    put(office)
    post.trouble = [] if trouble is None else [trouble]
    assert [letter.to for letter in post.deliver()] == ["ada@example.com"]  # the next one is not held up
    assert state(office) == [("given up", 1), ("sent", 1)] and len(events(office)) == 1


class Dying:
    """A way of sending that dies before or after the letter is in other hands."""

    def __init__(self, post: Post, *, after: bool) -> None:
        self.post, self.after = post, after

    async def send(self, letter: Letter) -> None:
        if self.after:
            await self.post.send(letter)
        raise Killed


def deliverer(office: Office, post: Post, mail: object) -> Deliverer:
    made = Deliverer(
        office.database,
        post,
        platform="Headrace",
        public_url=office.context.public_url,
        clock=office.clock,
        random=office.random,
    )
    made._mail = mail  # type: ignore[assignment] # a double
    return made


@pytest.mark.parametrize("after", [False, True])
def test_killed_while_sending_the_mail_arrives_at_least_once_and_is_the_same(
    office: Office, post: Post, after: bool
) -> None:
    put(office)
    with pytest.raises(Killed):
        asyncio.run(deliverer(office, post, Dying(post, after=after)).run())
    assert post.deliver() == []  # its lease is still held: nobody knows that the holder is gone
    office.wait(LEASE_US / SECOND)
    post.deliver()
    assert len(post.letters) == (2 if after else 1) and len({letter.id for letter in post.letters}) == 1
    assert state(office) == [("sent", 2)]
    assert post.letters[0] == post.letters[-1]


def test_a_mail_whose_deliverers_die_is_given_up(office: Office, post: Post) -> None:
    put(office)
    for _ in range(MAX_ATTEMPTS):
        with pytest.raises(Killed):
            asyncio.run(deliverer(office, post, Dying(post, after=False)).run())
        office.wait(LEASE_US / SECOND)
    assert post.deliver() == [] and state(office) == [("given up", MAX_ATTEMPTS + 1)] and len(events(office)) == 1


@pytest.mark.parametrize("line", range(12))
def test_killed_at_any_call_of_the_database_it_arrives_in_the_end(office: Office, post: Post, line: int) -> None:
    """The process dies before the n-th transaction of a pass, whichever it is."""
    put(office, 2)
    database, calls = office.database, [0]

    class Mortal:
        def transact(self, work: Callable[[object], object]) -> object:
            calls[0] += 1
            if calls[0] > line:
                raise Killed
            return database.transact(work)

        def __getattr__(self, name: str) -> object:
            return getattr(database, name)

    mortal = deliverer(office, post, post)
    mortal._database = Mortal()  # type: ignore[assignment] # a double
    try:
        asyncio.run(mortal.run())
    except Killed:
        assert line < 6
    for _ in range(3):
        office.wait(LEASE_US / SECOND)
        post.deliver()
    ids = [letter.id for letter in post.letters]
    assert len(set(ids)) == 2 and len(ids) <= 3
    assert [outcome for outcome, _ in state(office)] == ["sent", "sent"]


def test_held_up_beyond_its_lease_a_deliverer_does_not_send(office: Office, post: Post) -> None:
    put(office)
    slow = deliverer(office, post, post)
    write = slow._write

    def sleepy(mail: outbox.Mail) -> Letter | None:
        office.wait(LEASE_US / SECOND)
        return write(mail)

    slow._write = sleepy  # type: ignore[method-assign] # a machine that was suspended
    asyncio.run(slow.run(stopping=iter([False, True]).__next__))
    assert post.letters == [] and state(office) == [(None, 1)]
    assert len(post.deliver()) == 1


def test_several_deliverers_send_every_mail_once(office: Office, post: Post) -> None:
    put(office, 30)
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(10)
        asyncio.run(deliverer(office, post, post).run())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(post.letters) == 30 == len({letter.id for letter in post.letters})
    assert state(office) == [("sent", 1)] * 30


def test_a_pass_ends_when_it_is_told_to(office: Office, post: Post) -> None:
    put(office, 3)
    answers = iter([False, True])
    assert asyncio.run(post.deliverer.run(stopping=lambda: next(answers))) == 1
    assert len(post.letters) == 1


def test_old_rows_are_removed(office: Office, post: Post) -> None:
    put(office)
    post.deliver()
    assert post.deliverer.tidy() == 0
    office.wait(31 * 86_400)
    assert post.deliverer.tidy() == 1 and state(office) == []
