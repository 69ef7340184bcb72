"""Give quotas, change them and take them back. A quota is never larger than what its node has for it: that is decided
under the node's row, where whoever places something there waits or looks again."""

from __future__ import annotations

from typing import Literal

import msgspec
from sqlalchemy import insert, update

from marketplace.placement import claims, load
from marketplace.placement.capacity import NOTHING, Amount, largest_quota, total
from marketplace.quotas import coverage
from marketplace.quotas import service as quotas
from marketplace.quotas.tables import quota
from marketplace.store.db import WriteUnit
from marketplace.store.ids import Random, new_id


class EmptyQuotaError(ValueError):
    """It would grant nothing."""


class ExceedsNodeError(ValueError):
    """The node has less than that for it."""

    def __init__(self, largest: Amount) -> None:
        super().__init__("the node has less for it")
        self.largest = largest


class Holder(msgspec.Struct, frozen=True):
    """Whose quota it is."""

    kind: Literal["user", "team"]
    id: str
    account_id: str
    name: str


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a quota says."""

    name: str
    budget: Amount
    valid_from: int
    valid_till: int | None
    exclusive: bool


def create(
    unit: WriteUnit, node_id: str, holder: Holder, terms: Terms, *, created_by: str, now: int, random: Random
) -> str:
    """Give a quota of a node that exists, and return its id. EmptyQuotaError, ExceedsNodeError."""
    claims.changed(unit, node_id)
    _check(unit, node_id, terms, now)
    quota_id = new_id(now, random)
    unit.execute(
        insert(quota).values(
            id=quota_id,
            node_id=node_id,
            account_id=holder.account_id,
            holder_kind=holder.kind,
            holder_id=holder.id,
            active=True,
            created_by=created_by,
            created_at=now,
            revoked_at=None,
            **_columns(terms),
        )
    )
    return quota_id


def change(unit: WriteUnit, quota_id: str, node_id: str, before: Terms, terms: Terms, now: int) -> None:
    """Give a quota that is not revoked other terms; what runs under it is covered by the new ones. EmptyQuotaError,
    ExceedsNodeError."""
    claims.changed(unit, node_id)
    if msgspec.structs.replace(terms, name=before.name) != before:
        _check(unit, node_id, terms, now, but=quota_id)
    unit.execute(update(quota).where(quota.c.id == quota_id).values(**_columns(terms)))
    coverage.refresh(unit, coverage.of_quota(unit, quota_id))


def revoke(unit: WriteUnit, quota_id: str, node_id: str, now: int) -> bool:
    """Take a quota back, and say whether it was still given. What runs under it goes on, and costs from now on."""
    claims.changed(unit, node_id)
    mine = (quota.c.id == quota_id, quota.c.active)
    if unit.execute(update(quota).where(*mine).values(active=False, revoked_at=now)).rowcount == 0:
        return False
    coverage.refresh(unit, coverage.of_quota(unit, quota_id))
    return True


def largest(unit: WriteUnit, node_id: str, *, begin: int, till: int | None, now: int, but: str | None = None) -> Amount:
    """Return the largest budget that a quota of a node may have in a time, beside all other quotas of that time and
    what is used under none of them. `but` is the quota itself, where it exists."""
    (view,) = load.views(unit, now, [node_id])
    beside = quotas.overlapping(unit, node_id, begin, till)
    others = [standing for standing in beside if standing.id != but]
    if any(standing.exclusive for standing in others):
        return NOTHING
    return largest_quota(view.capacity, view.taken.less(total(standing.consumed for standing in beside)), others)


def _check(unit: WriteUnit, node_id: str, terms: Terms, now: int, but: str | None = None) -> None:
    if terms.budget == NOTHING:
        raise EmptyQuotaError("a quota of nothing")
    room = largest(unit, node_id, begin=max(now, terms.valid_from), till=terms.valid_till, now=now, but=but)
    if not terms.budget.within(room):
        raise ExceedsNodeError(room)


def _columns(terms: Terms) -> dict[str, object]:
    return {
        "name": terms.name,
        "gpu": terms.budget.gpu,
        "vcpu": terms.budget.threads,
        "dram": terms.budget.dram,
        "disk": terms.budget.disk,
        "exclusive": terms.exclusive,
        "valid_from": terms.valid_from,
        "valid_till": terms.valid_till,
    }
