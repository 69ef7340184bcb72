"""Datacenters: where nodes are, and on which addresses and ports what runs there is reached."""

from __future__ import annotations

import msgspec
from sqlalchemy import Select, insert, select

from marketplace.catalog.tables import datacenter
from marketplace.providers.service import Provider
from marketplace.providers.tables import provider
from marketplace.store import epochs
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id

PORTS = (20_000, 39_999)
SOMEWHERE = "ZZ"
"""The country code of what nobody told (ISO 3166-1 leaves it to users)."""


class Datacenter(msgspec.Struct, frozen=True, kw_only=True):
    """A datacenter with its provider."""

    id: str
    provider_id: str
    name: str
    country_code: str
    tunnel: str
    tunnel_host: str | None
    port_from: int
    port_to: int
    provider_name: str
    provider_logo: str | None


class NameTakenError(ValueError):
    """Another datacenter has this name."""


def create(
    unit: WriteUnit,
    *,
    provider_id: str,
    name: str,
    country_code: str = SOMEWHERE,
    tunnel: str = "nat",
    tunnel_host: str | None = None,
    relay_port: int | None = None,
    relay_sealed: bytes | None = None,
    ports: tuple[int, int] = PORTS,
    now: int,
    random: Random,
) -> str:
    """Add a datacenter and return its id. `relay_sealed` is the secret of its relay, encrypted. NameTakenError."""
    epochs.bump(unit, epochs.PROVIDERS)  # of two that want a name, the second comes here after the first is done
    if by_name(unit, [name]):
        raise NameTakenError(name)
    datacenter_id = new_id(now, random)
    unit.execute(
        insert(datacenter).values(
            id=datacenter_id,
            provider_id=provider_id,
            name=name,
            name_key=name.casefold(),
            country_code=country_code,
            tunnel=tunnel,
            tunnel_host=tunnel_host,
            relay_port=relay_port,
            relay_sealed=relay_sealed,
            port_from=ports[0],
            port_to=ports[1],
            created_at=now,
        )
    )
    return datacenter_id


def home_of(unit: WriteUnit, owner: Provider, now: int, random: Random) -> str:
    """Return where a new node of a provider is: its oldest datacenter, which is made where it has none."""
    oldest = (
        select(datacenter.c.id)
        .where(datacenter.c.provider_id == owner.id)
        .order_by(datacenter.c.created_at, datacenter.c.id)
        .limit(1)
    )
    found = unit.select(oldest).scalar_one_or_none()
    return found or create(unit, provider_id=owner.id, name=f"{owner.name}-1", now=now, random=random)


def _all() -> Select[*tuple[object, ...]]:
    return select(
        datacenter.c.id,
        datacenter.c.provider_id,
        datacenter.c.name,
        datacenter.c.country_code,
        datacenter.c.tunnel,
        datacenter.c.tunnel_host,
        datacenter.c.port_from,
        datacenter.c.port_to,
        provider.c.name.label("provider_name"),
        provider.c.logo_url.label("provider_logo"),
    ).join(provider, provider.c.id == datacenter.c.provider_id)


_ALL = _all()


def every(unit: ReadUnit) -> dict[str, Datacenter]:
    """Return all datacenters, by id."""
    return {row.id: Datacenter(**row._mapping) for row in unit.select(_ALL).all()}


def find(unit: ReadUnit, datacenter_id: str) -> Datacenter:
    """Return a datacenter that a node names."""
    return Datacenter(**unit.select(_ALL.where(datacenter.c.id == datacenter_id)).one()._mapping)


def by_name(unit: ReadUnit, names: list[str]) -> list[Datacenter]:
    """Return the datacenters of these names, however they are capitalised."""
    wanted = _ALL.where(datacenter.c.name_key.in_([name.casefold() for name in names]))
    return [Datacenter(**row._mapping) for row in unit.select(wanted).all()]
