"""People whom others add: they come without a password, and a mail lets them choose one."""

from __future__ import annotations

from marketplace.accounts import service as accounts
from marketplace.auth import letters
from marketplace.providers import service as providers
from marketplace.store.db import WriteUnit
from marketplace.store.ids import Random
from marketplace.users import service as users
from marketplace.users.service import User

MEMO = "Initial balance"


def add(
    unit: WriteUnit,
    *,
    email: str,
    name: str,
    initial_balance: int = 0,
    credit_limit: int = 0,
    unlimited: bool = False,
    provider_id: str | None = None,
    now: int,
    random: Random,
) -> User:
    """Add a person with what their account begins with, in nano-units, and write to them. With a provider, they are
    its customer. EmailError, EmailTakenError."""
    user = users.create(
        unit, email=email, name=name, role="user", password_hash=None, now=now, random=random, unlimited=unlimited
    )
    if credit_limit:
        accounts.set_credit_limit(unit, user.account_id, credit_limit)
    if initial_balance:
        accounts.adjust(
            unit, user.account_id, initial_balance, key=f"initial:{user.id}", now=now, random=random, memo=MEMO
        )
    if provider_id is not None:
        providers.add_customer(unit, provider_id, user.id, now=now)
    letters.ask(unit, "welcome", email, now=now, random=random)
    return user
