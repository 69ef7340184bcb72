"""Meters of what runs by the hour, and their charges.

A meter advances through time and never back. What a stretch of time costs is an exact fraction, `rate` × time ÷
`per_us`: the whole nano-units of it are charged, the rest is carried to the next charge, and the last charge is rounded
half up. However often a meter is ticked, it charges rate × time, rounded once.

What an account cannot pay is written off, and the meter remembers since when: whoever looks after funds ends what runs
unpaid. The provider is owed their part of all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from sqlalchemy import func, insert, select, update

from marketplace.ledger import chain, ledger
from marketplace.ledger.money import MoneyError
from marketplace.ledger.rental_tables import rental_charge, rental_meter
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id

KIND = "rental"
HOUR_US = 3600 * 1_000_000
MAX_RATE = 10**15
"""A million units of the currency an hour."""

ResourceType = Literal["Compute", "Volume"]


class Meter(msgspec.Struct, frozen=True, kw_only=True):
    """A meter as it stands."""

    id: str
    resource_type: ResourceType
    resource_id: str
    resource_name: str
    account_id: str
    provider_id: str | None
    share: int
    rate: int
    per_us: int
    exempt: bool
    free_until: int | None
    started_at: int
    metered_to: int
    stopped_at: int | None
    remainder: int
    charged_us: int
    charged: int
    unpaid_since: int | None


class Reading(msgspec.Struct, frozen=True):
    """What a stretch of time costs: nano-units, what is carried on, and how much of the time costs anything."""

    amount: int
    remainder: int
    charged_us: int


class Charged(msgspec.Struct, frozen=True):
    """A charge as its customer reads it. `carryover` and `rounding` are fractions of a nano-unit before and after."""

    resource_type: ResourceType
    resource_id: str
    resource_name: str
    begin: int
    end: int
    carryover: tuple[int, int]
    rounding: tuple[int, int]


def reading(meter: Meter, until: int, *, last: bool = False) -> Reading:
    """Say what a meter charges from where it stands to `until`, pure. The last charge rounds half up what is left."""
    begin = max(meter.metered_to, meter.free_until or 0)
    charged_us = 0 if meter.exempt else max(0, until - begin)
    amount, remainder = divmod(meter.remainder + meter.rate * charged_us, meter.per_us)
    if last:
        return Reading(amount + (2 * remainder >= meter.per_us > 0), 0, charged_us)
    return Reading(amount, remainder, charged_us)


def start(
    unit: WriteUnit,
    *,
    resource_type: ResourceType,
    resource_id: str,
    resource_name: str,
    account_id: str,
    provider_id: str | None,
    share: int,
    rate: int,
    per_us: int = HOUR_US,
    exempt: bool = False,
    free_until: int | None = None,
    now: int,
    random: Random,
) -> str:
    """Begin to meter a resource and return the meter's id. A resource has one running meter at most. MoneyError for an
    impossible rate."""
    if not 0 <= rate <= MAX_RATE or per_us <= 0:
        raise MoneyError(f"a rate of {rate} nano-units")
    meter_id = new_id(now, random)
    unit.execute(
        insert(rental_meter).values(
            id=meter_id,
            resource_type=resource_type,
            resource_id=resource_id,
            resource_name=resource_name,
            account_id=account_id,
            provider_id=provider_id,
            share=share,
            rate=rate,
            per_us=per_us,
            exempt=exempt,
            free_until=free_until,
            started_at=now,
            metered_to=now,
            stopped_at=None,
            remainder=0,
            charged_us=0,
            charged=0,
            unpaid_since=None,
        )
    )
    return meter_id


def running(unit: ReadUnit, resource_id: str) -> Meter | None:
    """Return the running meter of a resource; in a write unit it is locked."""
    wanted = select(rental_meter).where(rental_meter.c.resource_id == resource_id, rental_meter.c.stopped_at.is_(None))
    if isinstance(unit, WriteUnit):
        wanted = wanted.with_for_update()
    row = unit.select(wanted).one_or_none()
    return None if row is None else Meter(**row._mapping)


def of_resources(unit: ReadUnit, resource_ids: Sequence[str]) -> dict[str, Meter]:
    """Return the latest meter of each resource that ever had one."""
    wanted = (
        select(rental_meter).where(rental_meter.c.resource_id.in_(resource_ids)).order_by(rental_meter.c.started_at)
    )
    return {row.resource_id: Meter(**row._mapping) for row in unit.select(wanted)}


def tick(unit: WriteUnit, meter: Meter, until: int, *, random: Random) -> int:
    """Charge a running meter up to a time; returns how many nano-units. A time that it has reached changes nothing."""
    if until <= meter.metered_to:
        return 0
    return _advance(unit, meter, until, last=False, random=random)


def stop(unit: WriteUnit, resource_id: str, until: int, *, random: Random) -> int | None:
    """End the meter of a resource, charged up to a time, or to where it already is; returns what was charged by this,
    None when none was running."""
    chain.lock(unit, chain.DIRECT)
    meter = running(unit, resource_id)
    if meter is None:
        return None
    return _advance(unit, meter, max(until, meter.metered_to), last=True, random=random)


def cover(unit: WriteUnit, resource_id: str, free_until: int | None) -> None:
    """Let the running meter of a resource charge nothing before a time; None charges from where it stands."""
    unit.execute(
        update(rental_meter)
        .where(rental_meter.c.resource_id == resource_id, rental_meter.c.stopped_at.is_(None))
        .values(free_until=free_until)
    )


def rate_of(unit: ReadUnit, account_id: str, now: int) -> int:
    """What runs on an account costs an hour, in nano-units."""
    wanted = select(rental_meter.c.rate, rental_meter.c.per_us).where(
        rental_meter.c.account_id == account_id,
        rental_meter.c.stopped_at.is_(None),
        rental_meter.c.exempt.is_(False),
        func.coalesce(rental_meter.c.free_until, 0) <= now,
    )
    return sum(rate * HOUR_US // per_us for rate, per_us in unit.select(wanted))


def described(unit: ReadUnit, tx_ids: Sequence[str]) -> dict[str, Charged]:
    """Return what these transactions charged for, by transaction."""
    c, m = rental_charge.c, rental_meter.c
    wanted = (
        select(
            c.tx_id,
            m.resource_type,
            m.resource_id,
            m.resource_name,
            m.per_us,
            c.begin_at,
            c.end_at,
            c.carried,
            c.remainder,
        )
        .join(rental_meter, m.id == c.meter_id)
        .where(c.tx_id.in_(tx_ids))
    )
    return {
        row.tx_id: Charged(
            row.resource_type,
            row.resource_id,
            row.resource_name,
            row.begin_at,
            row.end_at,
            (row.carried, row.per_us),
            (row.remainder, row.per_us),
        )
        for row in unit.select(wanted)
    }


def _advance(unit: WriteUnit, meter: Meter, until: int, *, last: bool, random: Random) -> int:
    read = reading(meter, until, last=last)
    values = {
        "metered_to": until,
        "remainder": read.remainder,
        "charged_us": meter.charged_us + read.charged_us,
        "charged": meter.charged + read.amount,
        "stopped_at": until if last else None,
    }
    if read.amount:
        short = _post(unit, meter, read, until, random)
        values["unpaid_since"] = (meter.unpaid_since or until) if short else None
    elif not read.charged_us:
        values["unpaid_since"] = None  # this time was paid before, or costs nothing
    unit.execute(update(rental_meter).where(rental_meter.c.id == meter.id).values(**values))
    return read.amount


def _post(unit: WriteUnit, meter: Meter, read: Reading, until: int, random: Random) -> bool:
    """Post a charge; says whether the account could not pay all of it."""
    chain.lock(unit, chain.DIRECT)
    account = ledger.lock_accounts(unit, [meter.account_id])[meter.account_id]
    paid = min(read.amount, max(0, account.available)) if account.bounded else read.amount
    entries = ledger.sale(
        meter.account_id, read.amount, ledger.RENTALS, meter.provider_id, meter.share, written_off=read.amount - paid
    )
    posted = ledger.post(
        unit,
        tx_id=new_id(until, random),
        # From where to where: a last charge may end where a tick did, and still have a nano-unit to round up to.
        key=f"meter:{meter.id}:{meter.metered_to}:{until}",
        kind=KIND,
        entries=entries,
        now=until,
        memo=meter.resource_id,  # not what people call it: the books cannot forget
    )
    unit.execute(
        insert(rental_charge).values(
            tx_id=posted.tx_id,
            meter_id=meter.id,
            begin_at=meter.metered_to,
            end_at=until,
            carried=meter.remainder,
            remainder=read.remainder,
            amount=read.amount,
            payable=ledger.payable_part(read.amount, meter.provider_id, meter.share),
            written_off=read.amount - paid,
        )
    )
    return paid < read.amount
