"""Charges of services: each is posted once for its request id, and kept with what the service said about it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from sqlalchemy import insert, select

from marketplace.ledger import chain, ledger
from marketplace.ledger.book import LedgerError
from marketplace.ledger.money import MoneyError
from marketplace.providers.tables import provider
from marketplace.services.rules import Fraction, cost
from marketplace.services.tables import service_charge
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id

KIND = "service"


class Seller(msgspec.Struct, frozen=True):
    """Who charges: the service, the id of the provider whose it is, and the key that asked."""

    service: str
    provider: str
    key_id: str


class Charge(msgspec.Struct, frozen=True):
    """What to charge for. Without a `request_id` it gets one."""

    amount: Fraction
    request_id: str | None = None
    usage_metadata: str | None = None


class Charged(msgspec.Struct, frozen=True):
    """A charge as its customer reads it; `provider` is the provider's name, empty where there is none."""

    service: str
    provider: str
    request_id: str
    usage_metadata: str | None


class DuplicateRequestError(ValueError):
    """The service charged for this request before, or twice in one call; `index` says which charge it was."""

    def __init__(self, index: int, request_id: str) -> None:
        super().__init__(f"request {request_id} was charged before")
        self.index = index
        self.request_id = request_id


class ChargeError(ValueError):
    """One of the charges was refused, and all with it; its cause says why, `index` says which."""

    def __init__(self, index: int) -> None:
        super().__init__(f"charge {index} was refused")
        self.index = index


def charge(
    unit: WriteUnit,
    seller: Seller,
    account_id: str,
    charges: Sequence[Charge],
    *,
    share: int,
    now: int,
    random: Random,
) -> list[str]:
    """Take what the charges cost from an account: all of it, or nothing. Returns their request ids, in order.

    `share` is the provider's part in basis points. DuplicateRequestError; ChargeError from MoneyError or
    InsufficientFundsError.
    """
    # Under this lock two calls with the same request id see each other; every charge is posted under it.
    chain.lock(unit, chain.DIRECT)
    ids = [item.request_id or new_id(now, random) for item in charges]
    _check_new(unit, seller, ids)
    mine = {ledger.service_account(seller.service)} | (
        {ledger.payable_account(seller.provider)} if seller.provider else set()
    )
    ledger.ensure_platform(unit, mine, now)
    ledger.lock_accounts(unit, {account_id, *mine})
    for index, (item, request_id) in enumerate(zip(charges, ids, strict=True)):
        try:
            _charge(unit, seller, account_id, item, request_id, share, now, random)
        except (LedgerError, MoneyError) as error:
            raise ChargeError(index) from error
    return ids


def described(unit: ReadUnit, tx_ids: Collection[str]) -> dict[str, Charged]:
    """Return what was charged for by these transactions, by transaction."""
    wanted = (
        select(
            service_charge.c.tx_id,
            service_charge.c.service,
            provider.c.name,
            service_charge.c.request_id,
            service_charge.c.usage_metadata,
        )
        .join(provider, provider.c.id == service_charge.c.provider, isouter=True)
        .where(service_charge.c.tx_id.in_(sorted(tx_ids)))
    )
    return {
        row.tx_id: Charged(row.service, row.name or "", row.request_id, row.usage_metadata)
        for row in unit.select(wanted)
    }


def _check_new(unit: ReadUnit, seller: Seller, ids: Sequence[str]) -> None:
    known = set(
        unit.select(
            select(service_charge.c.request_id).where(
                service_charge.c.service == seller.service,
                service_charge.c.provider == seller.provider,
                service_charge.c.request_id.in_(sorted(set(ids))),
            )
        ).scalars()
    )
    for index, request_id in enumerate(ids):
        if request_id in known:
            raise DuplicateRequestError(index, request_id)
        known.add(request_id)


def _charge(
    unit: WriteUnit,
    seller: Seller,
    account_id: str,
    item: Charge,
    request_id: str,
    share: int,
    now: int,
    random: Random,
) -> None:
    price = cost(item.amount, share if seller.provider else 0)
    charge_id, tx_id = new_id(now, random), None
    if price.total:
        entries = [
            (account_id, -price.total),
            (ledger.payable_account(seller.provider), price.payable),
            (ledger.service_account(seller.service), price.total - price.payable),
        ]
        tx_id = ledger.post(
            unit,
            tx_id=new_id(now, random),
            key=f"service:{charge_id}",
            kind=KIND,
            entries=[(name, amount) for name, amount in entries if amount],
            now=now,
            memo=seller.service,
        ).tx_id
    unit.execute(
        insert(service_charge).values(
            id=charge_id,
            service=seller.service,
            provider=seller.provider,
            request_id=request_id,
            account_id=account_id,
            key_id=seller.key_id,
            numerator=item.amount.numerator,
            denominator=item.amount.denominator,
            cost=price.total,
            payable=price.payable,
            tx_id=tx_id,
            usage_metadata=item.usage_metadata,
            at=now,
        )
    )
