"""The signup bonus: given to a person once, when their address is known to be theirs."""

from __future__ import annotations

from sqlalchemy import select

from marketplace.ledger import chain, ledger
from marketplace.ledger.tables import ledger_tx
from marketplace.settings import service as settings
from marketplace.store.db import WriteUnit
from marketplace.store.ids import Random, new_id
from marketplace.users.service import User

KIND = "bonus"
MEMO = "Signup bonus"


def grant_once(unit: WriteUnit, user: User, *, now: int, random: Random) -> bool:
    """Post the bonus to a person's account, unless they had it; says whether it was posted now.

    Once for a person for ever: the transaction's key is theirs. A bonus of nothing is not posted.
    """
    amount, key = settings.current(unit).signup_bonus, f"bonus:{user.id}"
    chain.lock(unit, chain.DIRECT)  # under it, two who grant at once see each other
    had = unit.select(select(ledger_tx.c.id).where(ledger_tx.c.idempotency_key == key)).one_or_none()
    if amount <= 0 or had is not None:
        return False
    ledger.post(
        unit,
        tx_id=new_id(now, random),
        key=key,
        kind=KIND,
        entries=[(user.account_id, amount), (ledger.PROMO_EXPENSE, -amount)],
        now=now,
        memo=MEMO,
    )
    return True
