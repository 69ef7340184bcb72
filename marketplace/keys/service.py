"""Keys: create, list, revoke, and load all that may be used into memory.

Every change raises the keys epoch in the same transaction; whoever keeps a copy polls `key_epoch` and loads again
when it moved.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from sqlalchemy import Select, bindparam, insert, select, update

from marketplace.http.pagination import newest_first
from marketplace.keys.budgets import DEFAULT_PERIOD, BudgetPeriod
from marketplace.keys.rules import KeyKind, KeySecret, digest, new_secret
from marketplace.keys.tables import api_key
from marketplace.ledger.money import MAX_AMOUNT
from marketplace.store import epochs
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id
from marketplace.store.prepared import Prepared

MAX_NAME = 63
_USABLE = (api_key.c.revoked_at.is_(None), api_key.c.active.is_(True))
_LISTS = ("allowed_models", "allowed_addresses")


class KeyRow(msgspec.Struct, frozen=True):
    """A key as it is stored: everything but the secret. Null limits do not limit."""

    id: str
    kind: KeyKind
    owner_id: str
    account_id: str | None
    name: str
    prefix: str
    digest: bytes
    created_at: int
    created_by: str | None = None
    expires_at: int | None = None
    revoked_at: int | None = None
    allowed_models: tuple[str, ...] | None = None
    allowed_addresses: tuple[str, ...] | None = None
    budget: int | None = None
    """nano-units for each `budget_period`"""
    budget_period: BudgetPeriod | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None
    active: bool = True
    lineage: str | None = None
    """first of the keys that replaced one another; None for one that replaced none"""
    service: str | None = None
    """what a service's key may charge for"""
    provider: str | None = None
    """id of the provider that a node's or service's key belongs to"""

    @property
    def spender(self) -> str:
        """Who a budget is counted for: this key, and those that it replaced."""
        return self.lineage or self.id

    def __repr__(self) -> str:
        """Leave the digest out: it has no place in a log."""
        return f"KeyRow({self.id}, {self.prefix}…, {self.name!r})"


COLUMNS = tuple(api_key.c[name] for name in KeyRow.__struct_fields__)
OF_SECRET = (api_key.c.digest == bindparam("digest"), *_USABLE)
"""What holds for the usable key of the parameter `digest`, whether it is expired or not."""
_BY_DIGEST = Prepared(select(*COLUMNS).where(*OF_SECRET))


class UnknownKeyError(LookupError):
    """There is no key of that id, name or prefix, or it is revoked."""


class KeyNameError(ValueError):
    """A key's name is empty or too long."""


class BudgetError(ValueError):
    """A budget is not an amount above zero."""


class KeySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What may be changed on a key. A field that is UNSET stays as it is; None takes a limit away."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    active: bool | msgspec.UnsetType = msgspec.UNSET
    expires_at: int | msgspec.UnsetType | None = msgspec.UNSET
    allowed_models: tuple[str, ...] | msgspec.UnsetType | None = msgspec.UNSET
    allowed_addresses: tuple[str, ...] | msgspec.UnsetType | None = msgspec.UNSET
    budget: int | msgspec.UnsetType | None = msgspec.UNSET
    budget_period: BudgetPeriod | msgspec.UnsetType = msgspec.UNSET
    requests_per_minute: int | msgspec.UnsetType | None = msgspec.UNSET
    tokens_per_minute: int | msgspec.UnsetType | None = msgspec.UNSET
    max_concurrency: int | msgspec.UnsetType | None = msgspec.UNSET


def create(
    unit: WriteUnit,
    *,
    kind: KeyKind,
    owner_id: str,
    account_id: str | None,
    name: str,
    pepper: bytes,
    now: int,
    random: Random,
    created_by: str | None = None,
    expires_at: int | None = None,
    allowed_models: Collection[str] | None = None,
    allowed_addresses: Collection[str] | None = None,
    budget: int | None = None,
    budget_period: BudgetPeriod | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    max_concurrency: int | None = None,
    active: bool = True,
    lineage: str | None = None,
    service: str | None = None,
    provider: str | None = None,
) -> tuple[KeyRow, KeySecret]:
    """Make a key and return its row and its secret. The secret exists nowhere else afterwards.

    A budget is in nano-units; without a period it is for all time. KeyNameError for a name that is empty or longer
    than MAX_NAME characters; BudgetError.
    """
    _check_name(name)
    _check_budget(budget)
    secret = new_secret(kind, random)
    row = KeyRow(
        id=new_id(now, random),
        kind=kind,
        owner_id=owner_id,
        account_id=account_id,
        name=name,
        prefix=secret.lookup,
        digest=digest(secret, pepper),
        created_at=now,
        created_by=created_by,
        expires_at=expires_at,
        allowed_models=None if allowed_models is None else tuple(sorted(allowed_models)),
        allowed_addresses=None if allowed_addresses is None else tuple(sorted(allowed_addresses)),
        budget=budget,
        budget_period=None if budget is None else budget_period or DEFAULT_PERIOD,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrency=max_concurrency,
        active=active,
        lineage=lineage,
        service=service,
        provider=provider,
    )
    unit.execute(insert(api_key).values(_columns(msgspec.structs.asdict(row))))
    epochs.bump(unit, epochs.KEYS)
    return row, secret


def change(unit: WriteUnit, key_id: str, settings: KeySettings) -> KeyRow:
    """Change what a key may do and return it as it is then. UnknownKeyError, KeyNameError, BudgetError.

    A budget that is taken away takes its period along; a period without a budget says nothing and is not kept.
    """
    values = {name: value for name, value in msgspec.structs.asdict(settings).items() if value is not msgspec.UNSET}
    if "name" in values:
        _check_name(values["name"])
    usable = (api_key.c.id == key_id, api_key.c.revoked_at.is_(None))
    if "budget" in values or "budget_period" in values:
        _check_budget(values.get("budget"))
        before = unit.select(select(api_key.c.budget, api_key.c.budget_period).where(*usable)).one_or_none()
        if before is not None:
            period = values.get("budget_period", before.budget_period or DEFAULT_PERIOD)
            values["budget_period"] = None if values.get("budget", before.budget) is None else period
    if values:
        unit.execute(update(api_key).where(*usable).values(_columns(values)))
        epochs.bump(unit, epochs.KEYS)
    found = _rows(unit, select(*COLUMNS).where(*usable))
    if not found:
        raise UnknownKeyError(f"no usable key {key_id}")
    return found[0]


def rotate(
    unit: WriteUnit,
    old: KeyRow,
    *,
    overlap: int,
    pepper: bytes,
    now: int,
    random: Random,
    created_by: str | None = None,
) -> tuple[KeyRow, KeySecret]:
    """Make a key like `old`, with the same expiry; `old` still works for `overlap` µs, never longer than it would
    have. What was spent of a budget stays spent: both count for one."""
    end = now + overlap if old.expires_at is None else min(old.expires_at, now + overlap)
    change(unit, old.id, KeySettings(expires_at=end))
    row, secret = create(
        unit,
        kind=old.kind,
        owner_id=old.owner_id,
        account_id=old.account_id,
        name=old.name,
        pepper=pepper,
        now=now,
        random=random,
        created_by=created_by,
        expires_at=old.expires_at,
        allowed_models=old.allowed_models,
        allowed_addresses=old.allowed_addresses,
        budget=old.budget,
        budget_period=old.budget_period,
        requests_per_minute=old.requests_per_minute,
        tokens_per_minute=old.tokens_per_minute,
        max_concurrency=old.max_concurrency,
        active=old.active,
        lineage=old.spender,
        service=old.service,
        provider=old.provider,
    )
    return row, secret


def revoke(unit: WriteUnit, key_id: str, *, now: int) -> None:
    """Make a key unusable for ever. UnknownKeyError when there is no such key or it was revoked before."""
    changed = unit.execute(
        update(api_key).where(api_key.c.id == key_id, api_key.c.revoked_at.is_(None)).values(revoked_at=now)
    )
    if changed.rowcount == 0:
        raise UnknownKeyError(f"no usable key {key_id}")
    epochs.bump(unit, epochs.KEYS)


def revoke_all(unit: WriteUnit, owner_id: str, *, now: int) -> int:
    """Make every key of an owner unusable for ever; returns how many there were."""
    changed = unit.execute(
        update(api_key).where(api_key.c.owner_id == owner_id, api_key.c.revoked_at.is_(None)).values(revoked_at=now)
    )
    if changed.rowcount:
        epochs.bump(unit, epochs.KEYS)
    return int(changed.rowcount)


def find_by_id(unit: ReadUnit, key_id: str) -> KeyRow:
    """Return a key that is not revoked. UnknownKeyError."""
    found = _rows(unit, select(*COLUMNS).where(api_key.c.id == key_id, api_key.c.revoked_at.is_(None)))
    if not found:
        raise UnknownKeyError(f"no usable key {key_id}")
    return found[0]


def find(unit: ReadUnit, text: str, owner_id: str | None = None) -> KeyRow:
    """Return the one usable key of that id, lookup prefix or name. UnknownKeyError when there is none, or several of
    the name."""
    wanted = select(*COLUMNS).where(
        api_key.c.revoked_at.is_(None),
        (api_key.c.id == text) | (api_key.c.prefix == text) | (api_key.c.name == text),
    )
    if owner_id is not None:
        wanted = wanted.where(api_key.c.owner_id == owner_id)
    found = _rows(unit, wanted)
    if len(found) != 1:
        raise UnknownKeyError(f"{'no' if not found else 'more than one'} usable key {text!r}")
    return found[0]


def find_usable(unit: ReadUnit, secret: KeySecret, pepper: bytes, now: int) -> KeyRow | None:
    """Return the key of a secret, unless it is revoked, switched off or expired. Only hashes are compared."""
    found = unit.rows(_BY_DIGEST, {"digest": digest(secret, pepper)})
    return unexpired(found[0], now) if found else None


def unexpired(columns: Sequence[Any], now: int) -> KeyRow | None:
    """Return the key of a row of COLUMNS, unless it is expired."""
    row = _row(columns)
    return None if row.expires_at is not None and row.expires_at <= now else row


def may_come_from(row: KeyRow, address: str) -> bool:
    """Say whether a key may be used from an address."""
    if row.allowed_addresses is None:
        return True
    try:
        caller = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(caller in ipaddress.ip_network(network, strict=False) for network in row.allowed_addresses)


def list_page(unit: ReadUnit, kind: KeyKind, owner_id: str | None, cursor: str | None, limit: int) -> list[KeyRow]:
    """Return keys of a kind that are not revoked, of an owner or of all, newest first: one more than `limit` when
    there are more."""
    wanted = select(*COLUMNS).where(api_key.c.kind == kind, api_key.c.revoked_at.is_(None))
    if owner_id is not None:
        wanted = wanted.where(api_key.c.owner_id == owner_id)
    return _rows(unit, newest_first(wanted, api_key.c.created_at, api_key.c.id, cursor, limit))


def list_keys(unit: ReadUnit, owner_id: str | None = None) -> list[KeyRow]:
    """Return the keys of an owner, or all, revoked ones too, newest first."""
    wanted = select(*COLUMNS).order_by(api_key.c.created_at.desc(), api_key.c.id.desc())
    if owner_id is not None:
        wanted = wanted.where(api_key.c.owner_id == owner_id)
    return _rows(unit, wanted)


def load_active(unit: ReadUnit) -> list[KeyRow]:
    """Return every key that is neither revoked nor switched off. Whoever uses one compares `expires_at` with the clock
    at that moment."""
    return _rows(unit, select(*COLUMNS).where(*_USABLE))


def key_epoch(unit: ReadUnit) -> int:
    """Return the number that rises whenever a key is made, changed or revoked."""
    return epochs.current(unit, epochs.KEYS)


def _rows(unit: ReadUnit, wanted: Select[*tuple[Any, ...]]) -> list[KeyRow]:
    return [_row(row) for row in unit.select(wanted).all()]


def _row(row: Sequence[Any]) -> KeyRow:
    key = KeyRow(*row)
    if key.allowed_models is None and key.allowed_addresses is None:
        return key
    lists = {name: msgspec.json.decode(text, type=tuple[str, ...]) for name in _LISTS if (text := getattr(key, name))}
    return msgspec.structs.replace(key, **lists)


def _columns(values: dict[str, Any]) -> dict[str, Any]:
    """The values as the table keeps them."""
    return {
        name: msgspec.json.encode(value).decode() if name in _LISTS and value is not None else value
        for name, value in values.items()
    }


def _check_budget(budget: int | None) -> None:
    if budget is not None and not 0 < budget <= MAX_AMOUNT:
        raise BudgetError("a budget is an amount above zero")


def _check_name(name: str) -> None:
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise KeyNameError(f"a key's name has 1 to {MAX_NAME} printable characters")
