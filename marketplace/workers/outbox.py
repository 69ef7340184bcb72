"""Sends the mail of the outbox. One pass takes what is due, letter by letter; it may be killed at any line and run
again, and several may run at once."""

from __future__ import annotations

import logging
from collections.abc import Callable

from marketplace.auth import letters
from marketplace.auth.letters import Prepared
from marketplace.events import service as events
from marketplace.notify import outbox
from marketplace.notify.mail import Letter, Mail, MailError, UndeliverableError, UnreachableError
from marketplace.notify.rendering import RenderingError, render
from marketplace.notify.rules import MAX_ATTEMPTS, SEND_US, wait_us
from marketplace.settings import service as settings
from marketplace.store.db import Clock, Database, WriteUnit
from marketplace.store.ids import Random

log = logging.getLogger(__name__)

PASS = 100
"""Most letters of one pass."""


class Deliverer:
    """Sends letters of one database in one way."""

    def __init__(
        self, database: Database, mail: Mail, *, platform: str, public_url: str, clock: Clock, random: Random
    ) -> None:
        self._database = database
        self._mail = mail
        self._platform = platform
        self._public_url = public_url
        self._clock = clock
        self._random = random

    async def run(self, stopping: Callable[[], bool] = lambda: False) -> int:
        """Send what is due, until nothing is, `stopping` says so, or the server cannot be reached; returns how many
        were tried."""
        for tried in range(PASS):
            mail = None if stopping() else self._claim()
            if mail is None:
                return tried
            if not await self._deliver(mail):
                return tried + 1
        return PASS

    def tidy(self) -> int:
        """Remove what was finished long ago; returns how many."""
        return self._database.transact(lambda unit: outbox.purge(unit, self._clock()))

    def _claim(self) -> outbox.Mail | None:
        with self._database.read() as unit:  # an idle pass does not wait for the one writer that SQLite has
            if not outbox.due(unit, self._clock()):
                return None
        return self._database.transact(lambda unit: outbox.claim(unit, now=self._clock(), random=self._random))

    async def _deliver(self, mail: outbox.Mail) -> bool:
        """One attempt at one letter; False when there is no point in trying others now."""
        if mail.attempts > MAX_ATTEMPTS:
            self._give_up(mail, "its deliverers were killed")
            return True
        try:
            letter = self._write(mail)
        except RenderingError as error:
            self._give_up(mail, str(error))
            return True
        if letter is None:
            self._finish(mail, "dropped")
            return True
        if self._clock() + SEND_US > mail.lease_end:
            return True  # held up for so long that another deliverer may have it before this one is done
        try:
            await self._mail.send(letter)
        except UndeliverableError as error:
            self._give_up(mail, str(error))
        except MailError as error:
            if mail.attempts >= MAX_ATTEMPTS:
                self._give_up(mail, str(error))
            else:
                self._postpone(mail, str(error))
            return not isinstance(error, UnreachableError)
        else:
            self._finish(mail, "sent")
        return True

    def _write(self, mail: outbox.Mail) -> Letter | None:
        """What to send; None for nothing. RenderingError."""
        prepared, currency = self._database.transact(lambda unit: self._prepare(unit, mail))
        if prepared is None:
            return None
        always = {"platform": self._platform, "base_url": self._public_url, "currency": currency}
        rendered = render(prepared.template, {**prepared.values, **always})
        return Letter(
            id=mail.id,
            to=prepared.to,
            subject=rendered.subject,
            text=rendered.text,
            html=rendered.html,
            at=mail.created_at,
            link=prepared.link,
        )

    def _prepare(self, unit: WriteUnit, mail: outbox.Mail) -> tuple[Prepared | None, str]:
        currency = settings.current(unit).server_currency
        if not letters.is_request(mail.template):
            link = mail.values.get("link", "")
            return Prepared(template=mail.template, to=mail.recipient, values=mail.values, link=link), currency
        prepared = letters.prepare(unit, mail, public_url=self._public_url, now=self._clock(), random=self._random)
        return prepared, currency

    def _finish(self, mail: outbox.Mail, outcome: outbox.Outcome) -> None:
        self._database.transact(lambda unit: outbox.finish(unit, mail, outcome, now=self._clock()))

    def _postpone(self, mail: outbox.Mail, trouble: str) -> None:
        until = self._clock() + wait_us(mail.attempts)
        log.warning("mail %s (%s) did not leave, attempt %d: %s", mail.id, mail.template, mail.attempts, trouble)
        self._database.transact(lambda unit: outbox.postpone(unit, mail, until=until, trouble=trouble))

    def _give_up(self, mail: outbox.Mail, trouble: str) -> None:
        log.error("mail %s (%s) is given up after %d attempts: %s", mail.id, mail.template, mail.attempts, trouble)

        def work(unit: WriteUnit) -> None:
            now = self._clock()
            if not outbox.finish(unit, mail, "given up", now=now, trouble=trouble):
                return
            events.record(
                unit,
                action="mail.give_up",
                actor_kind="system",
                actor_id="",
                credential_id="",
                owner_id=mail.user_id or "",
                subject_id=mail.id,
                detail={"template": mail.template, "attempts": mail.attempts},
                request_id="",
                now=now,
                random=self._random,
            )

        self._database.transact(work)
