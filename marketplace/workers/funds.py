"""Tells people that their balance runs out, and the owners of teams.

One pass looks at the next accounts in the order of their ids, PASS of them by their primary key, so it costs the same
with a thousand accounts and with a million. Where it is in the round is kept in memory: losing it only begins the
round again. What was told is a row, changed in the transaction that writes the mails; two passes at once tell once.
"""

from __future__ import annotations

from functools import partial

from sqlalchemy import select, update

from marketplace.events import service as events
from marketplace.ledger import ledger
from marketplace.ledger.book import CUSTOMER
from marketplace.ledger.money import format_nano
from marketplace.ledger.tables import account
from marketplace.notify import low_balance as rules
from marketplace.notify import outbox
from marketplace.notify.low_balance import Step
from marketplace.notify.tables import low_balance
from marketplace.settings import service as settings
from marketplace.store.db import Clock, Database, ReadUnit, WriteUnit
from marketplace.store.ids import Random
from marketplace.teams import service as teams
from marketplace.users import service as users

PASS = 1000
"""Accounts of one pass."""


class FundsWatch:
    """Watches the accounts of one database."""

    def __init__(self, database: Database, *, clock: Clock, random: Random) -> None:
        self._database = database
        self._clock = clock
        self._random = random
        self._after = ""

    def run(self) -> int:
        """Look at the next accounts; returns of how many something was noted or told."""
        with self._database.read() as unit:
            threshold = settings.current(unit).low_balance_threshold
            seen, due = _look(unit, self._after, threshold)
        done = sum(self._database.transact(partial(self._take, account_id=account_id)) for account_id in due)
        self._after = seen[-1] if len(seen) == PASS else ""
        return done

    def _take(self, unit: WriteUnit, account_id: str) -> bool:
        """Do what is due now for an account: much may have happened since it was looked at."""
        threshold = settings.current(unit).low_balance_threshold
        # The row first: whoever else takes this account waits here, and then sees what was done.
        known = unit.select(
            select(low_balance.c.armed).where(low_balance.c.account_id == account_id).with_for_update()
        ).scalar_one_or_none()
        state = ledger.account_states(unit, [account_id])[account_id]
        due: Step | None = None if state.unlimited else rules.step(known, state.available, threshold)
        if due is None:
            return False
        now = self._clock()
        if known is None:
            unit.insert_missing(low_balance, [{"account_id": account_id, "armed": True, "changed_at": now}])
            return True
        unit.execute(
            update(low_balance).where(low_balance.c.account_id == account_id).values(armed=due == "arm", changed_at=now)
        )
        if due == "tell":
            self._tell(unit, account_id, state.available, threshold, now)
        return True

    def _tell(self, unit: WriteUnit, account_id: str, available: int, threshold: int, now: int) -> None:
        owner = unit.select(select(account.c.owner_kind, account.c.owner_id).where(account.c.id == account_id)).one()
        whose, readers = _readers(unit, owner.owner_kind, owner.owner_id)
        values = {
            "owner": whose,
            "available": format_nano(available),
            "threshold": format_nano(threshold),
            "rearm": format_nano(rules.rearm_at(threshold)),
        }
        for user_id, email in readers:
            outbox.enqueue(
                unit,
                template="low-balance",
                to=email,
                values=values,
                now=now,
                random=self._random,
                user_id=user_id,
            )
        events.record(
            unit,
            action="account.low_balance",
            actor_kind="system",
            actor_id="",
            credential_id="",
            owner_id=owner.owner_id,
            subject_id=account_id,
            detail={"available": available, "threshold": threshold, "told": len(readers)},
            request_id="",
            now=now,
            random=self._random,
        )


def _look(unit: ReadUnit, after: str, threshold: int) -> tuple[list[str], list[str]]:
    """The next accounts, and those of them about which something is to be done."""
    wanted = (
        select(
            account.c.id,
            account.c.kind,
            account.c.unlimited,
            (account.c.posted - account.c.held + account.c.credit_limit).label("available"),
            low_balance.c.armed,
        )
        .join(low_balance, low_balance.c.account_id == account.c.id, isouter=True)
        .where(account.c.id > after)
        .order_by(account.c.id)
        .limit(PASS)
    )
    rows = unit.select(wanted).all()
    due = [
        row.id
        for row in rows
        if row.kind == CUSTOMER and not row.unlimited and rules.step(row.armed, row.available, threshold) is not None
    ]
    return [row.id for row in rows], due


def _readers(unit: ReadUnit, owner_kind: str, owner_id: str) -> tuple[str, list[tuple[str, str]]]:
    """How the mail names the account, and who gets it: the person, or every owner of the team."""
    if owner_kind == "team":
        team = teams.find(unit, owner_id)
        if team is None:
            return "", []
        owners = [member for member in teams.members(unit, [owner_id]) if member.role == "Owner"]
        return f" of the team {team.name}", [(owner.user_id, owner.email) for owner in owners]
    user = users.find(unit, owner_id)
    return "", [(user.id, user.email)] if user is not None and user.email_verified_at is not None else []
