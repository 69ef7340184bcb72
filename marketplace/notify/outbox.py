"""The outbox: a mail is a row that is written in the transaction of what it tells about, and sent afterwards.

A deliverer claims a due mail by moving its due time to the end of a lease, sends it, and then marks it. Killed before
the mark, the mail becomes due again when the lease has ended: every mail is sent at least once, and twice only where
its deliverer died between the server's yes and the mark. Both copies carry the same Message-ID. Two deliverers never
hold the same mail at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from sqlalchemy import delete, insert, select, update

from marketplace.notify.rules import KEEP_US, LEASE_US
from marketplace.notify.tables import outbox
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id

Outcome = Literal["sent", "dropped", "given up"]
_EMPTY = "{}"


class Mail(msgspec.Struct, frozen=True, kw_only=True):
    """A mail that is claimed: until `lease_end` nobody else sends it. `attempts` includes this one."""

    id: str
    template: str
    recipient: str
    values: dict[str, str]
    user_id: str | None
    created_at: int
    attempts: int
    claim: str
    lease_end: int

    def __repr__(self) -> str:
        """Leave address and content out."""
        return f"Mail({self.id}, {self.template})"


def enqueue(
    unit: WriteUnit,
    *,
    template: str,
    to: str,
    values: Mapping[str, str],
    now: int,
    random: Random,
    user_id: str | None = None,
    dedupe: str | None = None,
) -> None:
    """Put a mail into the outbox; it leaves once the unit is committed. A second one of the same `dedupe` is not sent.

    What it says is made from the template when it leaves. An address that no mail can go to is found then, and the
    mail given up. `values` are stored readably until then: a link with a secret in it is better made at sending, as
    marketplace.auth.letters does.
    """
    row = {
        "id": new_id(now, random),
        "template": template,
        "recipient": to,
        "payload": msgspec.json.encode(dict(values)).decode(),
        "user_id": user_id,
        "dedupe": dedupe,
        "created_at": now,
        "due_at": now,
        "attempts": 0,
        "claim": "",
        "finished_at": None,
        "outcome": None,
        "trouble": "",
    }
    if dedupe is None:
        unit.execute(insert(outbox).values(**row))
    else:
        unit.insert_missing(outbox, [row])


def due(unit: ReadUnit, now: int) -> bool:
    """Whether any mail may be due; cheap."""
    return unit.select(select(outbox.c.id).where(outbox.c.due_at <= now).limit(1)).first() is not None


def claim(unit: WriteUnit, *, now: int, random: Random) -> Mail | None:
    """Take the mail that has been due longest; None when there is none."""
    wanted = (
        select(outbox)
        .where(outbox.c.due_at <= now)
        .order_by(outbox.c.due_at, outbox.c.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    row = unit.select(wanted).one_or_none()
    if row is None:
        return None
    mail = Mail(
        id=row.id,
        template=row.template,
        recipient=row.recipient,
        values=msgspec.json.decode(row.payload, type=dict[str, str]),
        user_id=row.user_id,
        created_at=row.created_at,
        attempts=row.attempts + 1,
        claim=random(8).hex(),
        lease_end=now + LEASE_US,
    )
    unit.execute(
        update(outbox)
        .where(outbox.c.id == mail.id)
        .values(due_at=mail.lease_end, attempts=mail.attempts, claim=mail.claim)
    )
    return mail


def finish(unit: WriteUnit, mail: Mail, outcome: Outcome, *, now: int, trouble: str = "") -> bool:
    """End a mail as sent, dropped or given up, and forget address and content; says whether this call ended it.

    That it was sent is true whoever holds the lease by now; the other outcomes are for the holder to say.
    """
    mine = update(outbox).where(outbox.c.id == mail.id, outbox.c.due_at.is_not(None))
    if outcome != "sent":
        mine = mine.where(outbox.c.claim == mail.claim)
    done = unit.execute(
        mine.values(due_at=None, finished_at=now, outcome=outcome, trouble=trouble, recipient="", payload=_EMPTY)
    )
    return done.rowcount == 1


def postpone(unit: WriteUnit, mail: Mail, *, until: int, trouble: str) -> bool:
    """Give the lease back: the mail is due again at `until`. False when another has the mail by now."""
    done = unit.execute(
        update(outbox)
        .where(outbox.c.id == mail.id, outbox.c.due_at.is_not(None), outbox.c.claim == mail.claim)
        .values(due_at=until, trouble=trouble)
    )
    return done.rowcount == 1


def purge(unit: WriteUnit, now: int) -> int:
    """Remove mails that were finished long ago, but for those whose `dedupe` must still be known; returns how
    many."""
    old = delete(outbox).where(outbox.c.finished_at <= now - KEEP_US, outbox.c.dedupe.is_(None))
    return unit.execute(old).rowcount
