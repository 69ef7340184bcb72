"""Providers: make, find and change them; who acts for them, and whose people they may see."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import CompoundSelect, Row, Select, delete, insert, select, update

from marketplace.http.pagination import newest_first
from marketplace.providers.rules import name_key
from marketplace.providers.tables import provider, provider_customer, provider_member
from marketplace.store import epochs
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id
from marketplace.users.rules import Role
from marketplace.users.tables import users


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """A company whose machines are in the pool."""

    id: str
    name: str
    logo_url: str | None
    website: str | None
    created_at: int


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who acts for a provider. A root answers for it."""

    provider_id: str
    user_id: str
    email: str
    name: str
    role: Role
    is_root: bool
    joined_at: int


class NameTakenError(ValueError):
    """Another provider has this name."""


class OtherProviderError(ValueError):
    """The person acts for another provider already."""


_PROVIDER = select(provider.c.id, provider.c.name, provider.c.logo_url, provider.c.website, provider.c.created_at)


def create(
    unit: WriteUnit, *, name: str, logo_url: str | None = None, website: str | None = None, now: int, random: Random
) -> Provider:
    """Add a provider. ValueError for an impossible name, NameTakenError."""
    _check_free(unit, name, but="")
    made = Provider(id=new_id(now, random), name=name, logo_url=logo_url, website=website, created_at=now)
    unit.execute(insert(provider).values(name_key=name_key(name), **msgspec.structs.asdict(made)))
    return made


def change(unit: WriteUnit, changed: Provider) -> None:
    """Write a provider's name and addresses. ValueError for an impossible name, NameTakenError."""
    _check_free(unit, changed.name, but=changed.id)
    unit.execute(
        update(provider)
        .where(provider.c.id == changed.id)
        .values(name=changed.name, name_key=name_key(changed.name), logo_url=changed.logo_url, website=changed.website)
    )


def find(unit: ReadUnit, provider_id: str) -> Provider | None:
    """Return the provider of that id."""
    return _one(unit, _PROVIDER.where(provider.c.id == provider_id))


def find_by_name(unit: ReadUnit, name: str) -> Provider | None:
    """Return the provider of that name, however it is capitalised."""
    return _one(unit, _PROVIDER.where(provider.c.name_key == name.casefold()))


def provider_of(unit: ReadUnit, user_id: str) -> Provider | None:
    """Return the provider that a person acts for."""
    mine = select(provider_member.c.provider_id).where(provider_member.c.user_id == user_id)
    return _one(unit, _PROVIDER.where(provider.c.id == mine.scalar_subquery()))


def list_page(
    unit: ReadUnit,
    *,
    ids: Collection[str] | None = None,
    names: Collection[str] | None = None,
    cursor: str | None,
    limit: int,
) -> list[Provider]:
    """Return providers, newest first: all, or those of the given ids or names; one more than `limit` when there are
    more."""
    wanted = _PROVIDER
    if ids is not None:
        wanted = wanted.where(provider.c.id.in_(sorted(ids)))
    if names is not None:
        wanted = wanted.where(provider.c.name_key.in_(sorted({name.casefold() for name in names})))
    return [
        _read(row) for row in unit.select(newest_first(wanted, provider.c.created_at, provider.c.id, cursor, limit))
    ]


def members(unit: ReadUnit, provider_ids: Collection[str]) -> list[Member]:
    """Return the people of these providers, in the order in which they joined."""
    wanted = (
        select(
            provider_member.c.provider_id,
            provider_member.c.user_id,
            users.c.email,
            users.c.name,
            users.c.role,
            provider_member.c.is_root,
            provider_member.c.joined_at,
        )
        .join(users, users.c.id == provider_member.c.user_id)
        .where(provider_member.c.provider_id.in_(sorted(provider_ids)))
        .order_by(provider_member.c.provider_id, provider_member.c.joined_at, provider_member.c.user_id)
    )
    return [Member(**row._mapping) for row in unit.select(wanted)]


def member(unit: ReadUnit, user_id: str) -> Member | None:
    """Return what a person is to the provider that they act for."""
    provider_id = unit.select(
        select(provider_member.c.provider_id).where(provider_member.c.user_id == user_id)
    ).scalar_one_or_none()
    if provider_id is None:
        return None
    return next(item for item in members(unit, [provider_id]) if item.user_id == user_id)


def add_member(unit: WriteUnit, provider_id: str, user_id: str, *, is_root: bool, now: int) -> None:
    """Let a person act for a provider; for one who does, only whether they are a root is set. OtherProviderError."""
    row = {"user_id": user_id, "provider_id": provider_id, "is_root": is_root, "joined_at": now}
    unit.insert_missing(provider_member, [row])
    changed = unit.execute(
        update(provider_member)
        .where(provider_member.c.user_id == user_id, provider_member.c.provider_id == provider_id)
        .values(is_root=is_root)
    )
    if changed.rowcount == 0:
        raise OtherProviderError("this person acts for another provider")


def remove_member(unit: WriteUnit, provider_id: str, user_id: str) -> bool:
    """Let a person no longer act for a provider; says whether they did."""
    gone = unit.execute(
        delete(provider_member).where(
            provider_member.c.user_id == user_id, provider_member.c.provider_id == provider_id
        )
    )
    return gone.rowcount == 1


def add_customer(unit: WriteUnit, provider_id: str, user_id: str, *, now: int) -> None:
    """Remember that a person came through a provider, which may see them from now on."""
    unit.insert_missing(provider_customer, [{"provider_id": provider_id, "user_id": user_id, "since": now}])


def related(provider_id: str) -> CompoundSelect[str]:
    """A query for the ids of everybody whom a provider may see: its people and its customers."""
    people: Select[str] = select(provider_member.c.user_id).where(provider_member.c.provider_id == provider_id)
    customers: Select[str] = select(provider_customer.c.user_id).where(provider_customer.c.provider_id == provider_id)
    return people.union(customers)


def _check_free(unit: WriteUnit, name: str, *, but: str) -> None:
    epochs.bump(unit, epochs.PROVIDERS)  # of two that want a name, the second comes here after the first is done
    taken = select(provider.c.id).where(provider.c.name_key == name_key(name), provider.c.id != but)
    if unit.select(taken).one_or_none() is not None:
        raise NameTakenError("another provider has this name")


def _one(unit: ReadUnit, wanted: Select[*tuple[object, ...]]) -> Provider | None:
    row = unit.select(wanted).one_or_none()
    return None if row is None else _read(row)


def _read(row: Row[*tuple[object, ...]]) -> Provider:
    return Provider(**row._mapping)
