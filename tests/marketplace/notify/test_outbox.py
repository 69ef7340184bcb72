"""The outbox: written with what it tells about, claimed by one at a time, sent at least once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select

from marketplace.notify import outbox
from marketplace.notify.rules import KEEP_US, LEASE_US
from marketplace.notify.tables import outbox as rows
from marketplace.store.db import WriteUnit

if TYPE_CHECKING:
    from tests.marketplace.conftest import Office


def put(office: Office, unit: WriteUnit, **values: str) -> None:
    outbox.enqueue(
        unit,
        template="message",
        to="ada@example.com",
        values={"subject": "s"},
        now=office.clock(),
        random=office.random,
        **values,
    )


def claim(office: Office) -> outbox.Mail | None:
    with office.database.write() as unit:
        return outbox.claim(unit, now=office.clock(), random=office.random)


def test_a_mail_exists_only_with_what_it_tells_about(office: Office) -> None:
    with pytest.raises(RuntimeError), office.database.write() as unit:
        put(office, unit)
        raise RuntimeError("the change failed")
    assert claim(office) is None
    with office.database.write() as unit:
        put(office, unit)
    mail = claim(office)
    assert mail is not None and (mail.recipient, mail.values, mail.attempts) == ("ada@example.com", {"subject": "s"}, 1)
    assert "ada" not in repr(mail)


def test_the_same_dedupe_is_sent_once_for_ever(office: Office) -> None:
    for _ in range(2):
        with office.database.write() as unit:
            put(office, unit, dedupe="receipt:1")
            put(office, unit, dedupe="receipt:1")
    mail = claim(office)
    assert mail is not None and claim(office) is None
    with office.database.write() as unit:
        assert outbox.finish(unit, mail, "sent", now=office.now)
    office.wait(10 * KEEP_US / 1_000_000)
    with office.database.write() as unit:
        assert outbox.purge(unit, office.now) == 0
        put(office, unit, dedupe="receipt:1")
    assert claim(office) is None


def test_whoever_claims_has_it_until_the_lease_ends(office: Office) -> None:
    with office.database.write() as unit:
        put(office, unit)
    first = claim(office)
    assert first is not None and claim(office) is None
    office.wait(LEASE_US / 1_000_000)
    second = claim(office)
    assert second is not None and second.id == first.id and second.attempts == 2 and second.claim != first.claim
    with office.database.write() as unit:  # the first wakes up: it may say that it was sent, nothing else
        assert not outbox.postpone(unit, first, until=office.now, trouble="late")
        assert not outbox.finish(unit, first, "given up", now=office.now)
        assert outbox.finish(unit, first, "sent", now=office.now)
        assert not outbox.finish(unit, second, "sent", now=office.now)
        assert not outbox.postpone(unit, second, until=office.now, trouble="")
    office.wait(LEASE_US / 1_000_000)
    assert claim(office) is None


def test_what_is_finished_is_forgotten_and_later_removed(office: Office) -> None:
    with office.database.write() as unit:
        put(office, unit)
    mail = claim(office)
    assert mail is not None
    with office.database.write() as unit:
        outbox.finish(unit, mail, "sent", now=office.now)
        left = unit.select(select(rows)).one()
        assert (left.recipient, left.payload, left.outcome, left.due_at) == ("", "{}", "sent", None)
        assert outbox.purge(unit, office.now + KEEP_US - 1) == 0
        assert outbox.purge(unit, office.now + KEEP_US) == 1


def test_eight_who_claim_at_once_share_the_mail(office: Office) -> None:
    with office.database.write() as unit:
        for _ in range(40):
            put(office, unit)
    start = threading.Barrier(8)
    taken: list[str] = []

    def work() -> None:
        start.wait(10)
        while True:
            mail = office.database.transact(lambda unit: outbox.claim(unit, now=office.now, random=office.random))
            if mail is None:
                return
            taken.append(mail.id)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(taken) == len(set(taken)) == 40
