"""How a renter stands at a moment, and what is on offer then: one question, asked when a rental is planned and again
when it is written. What the plan was made from is still right if the answers agree."""

from __future__ import annotations

import msgspec
from sqlalchemy import bindparam, func, select

from marketplace.catalog.board import EPOCHS, Stamp
from marketplace.ledger.book import UnknownAccountError
from marketplace.ledger.tables import account
from marketplace.quotas.service import in_force
from marketplace.quotas.tables import quota
from marketplace.store.db import ReadUnit
from marketplace.store.epochs import epoch
from marketplace.store.prepared import Prepared


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """An account, and the epochs of what is on offer."""

    available: int
    """nano-units that it may still spend; without meaning where `unlimited`"""
    unlimited: bool
    walled: bool
    """whether it holds a quota in force somewhere: then it rents on its quotas only"""
    stamp: Stamp

    def covers(self, cost: int) -> bool:
        """Whether it has enough for something that costs so much."""
        return self.unlimited or (self.available >= cost and (self.available > 0 or cost <= 0))

    def agrees(self, other: Standing) -> bool:
        """Whether a plan that was made under the one holds under the other. What is available may differ: it is
        compared with the cost each time."""
        return self.stamp == other.stamp and self.walled == other.walled


_STANDING = Prepared(
    select(
        account.c.posted - account.c.held + account.c.credit_limit,
        account.c.unlimited,
        select(quota.c.id).where(in_force(), quota.c.account_id == bindparam("account")).exists(),
        *(
            func.coalesce(select(epoch.c.value).where(epoch.c.name == name).scalar_subquery(), 0).label(f"epoch_{name}")
            for name in EPOCHS
        ),
    ).where(account.c.id == bindparam("account"))
)


def standing(unit: ReadUnit, account_id: str, now: int) -> Standing:
    """Return how an account stands in this unit. UnknownAccountError."""
    found = unit.rows(_STANDING, {"account": account_id, "now": now})
    if not found:
        raise UnknownAccountError(f"no customer account {account_id}")
    available, unlimited, walled, *stamp = found[0]
    return Standing(available=available, unlimited=unlimited, walled=walled, stamp=tuple(stamp))
