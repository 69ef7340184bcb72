"""Meters: immutable price versions, and what was metered under them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import msgspec
from sqlalchemy import ColumnElement, func, insert, select

from marketplace.ledger.money import Price, check_price
from marketplace.ledger.rules import day_start
from marketplace.ledger.tables import price_version, usage_record
from marketplace.store.db import ReadUnit, WriteUnit


class PriceVersion(msgspec.Struct, frozen=True):
    """A price that a model had from `effective_from` (µs) until the next version; it never changes."""

    id: str
    model: str
    number: int
    price: Price
    effective_from: int


class TokenTotals(msgspec.Struct, frozen=True):
    """Sums over usage records, billable or not."""

    requests: int
    prompt: int
    cached: int
    completion: int
    cost: int


def fingerprint(version: PriceVersion) -> bytes:
    """Return the hash that is stored beside a version, so that the audit sees a price that was altered underneath."""
    return hashlib.sha256(msgspec.msgpack.encode(version)).digest()


def set_price(
    unit: WriteUnit, model: str, prompt: int, cached: int, completion: int, *, version_id: str, now: int
) -> PriceVersion:
    """Give a model a price in nano-units per 1,000,000 tokens: a new version, or the current one when it says the same.

    Requests that hold money already keep the version that they began with. MoneyError for an impossible price.
    """
    price = check_price(Price(prompt, cached, completion))
    latest = current_price(unit, model)
    if latest is not None and latest.price == price:
        return latest
    # Two writers at once collide on (model, number): one of them fails whole instead of both being current.
    version = PriceVersion(version_id, model, latest.number + 1 if latest else 1, price, now)
    unit.execute(
        insert(price_version).values(
            id=version.id,
            model=model,
            number=version.number,
            prompt=prompt,
            cached=cached,
            completion=completion,
            effective_from=now,
            fingerprint=fingerprint(version),
        )
    )
    return version


def current_price(unit: ReadUnit, model: str) -> PriceVersion | None:
    """Return the model's newest price version, None for a model that has no price."""
    found = _versions(unit, price_version.c.model == model, newest=True)
    return found[0] if found else None


def prices(unit: ReadUnit, ids: Collection[str]) -> dict[str, PriceVersion]:
    """Return price versions by id: those that exist of the ones asked for."""
    return {version.id: version for version in _versions(unit, price_version.c.id.in_(sorted(ids)))}


def price_history(unit: ReadUnit, model: str) -> list[PriceVersion]:
    """Return every price that the model ever had, newest first."""
    return _versions(unit, price_version.c.model == model)


def _versions(unit: ReadUnit, condition: ColumnElement[bool], *, newest: bool = False) -> list[PriceVersion]:
    wanted = select(
        price_version.c.id,
        price_version.c.model,
        price_version.c.number,
        price_version.c.prompt,
        price_version.c.cached,
        price_version.c.completion,
        price_version.c.effective_from,
    ).where(condition)
    wanted = wanted.order_by(price_version.c.number.desc())
    if newest:
        wanted = wanted.limit(1)
    return [
        PriceVersion(row.id, row.model, row.number, Price(row.prompt, row.cached, row.completion), row.effective_from)
        for row in unit.select(wanted)
    ]


def prefill_allowance_used(unit: ReadUnit, key_id: str, now: int) -> int:
    """Return the prompt tokens that a key had computed and abandoned for free since the UTC day of `now` began."""
    wanted = select(func.coalesce(func.sum(usage_record.c.prompt), 0)).where(
        usage_record.c.key_id == key_id,
        usage_record.c.at >= day_start(now),
        usage_record.c.reason == "prefill_allowance",
    )
    return int(unit.select(wanted).scalar_one())


def token_totals(unit: ReadUnit, *, engine_epoch: str | None = None, model: str | None = None) -> TokenTotals:
    """Return what was metered in all, or by one engine process or model: to be compared with the engine's own
    counters."""
    usage = usage_record.c
    wanted = select(
        func.count(),
        func.coalesce(func.sum(usage.prompt), 0),
        func.coalesce(func.sum(usage.cached), 0),
        func.coalesce(func.sum(usage.completion), 0),
        func.coalesce(func.sum(usage.cost), 0),
    ).select_from(usage_record)
    if engine_epoch is not None:
        wanted = wanted.where(usage.engine_epoch == engine_epoch)
    if model is not None:
        wanted = wanted.where(usage.model == model)
    return TokenTotals(*(int(value) for value in unit.select(wanted).one()))
