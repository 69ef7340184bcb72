"""Recipes as their owners keep them, with groups and tags; and who may use which."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, and_, delete, insert, or_, select, update

from marketplace.providers.tables import provider_customer, provider_member
from marketplace.recipes.rules import DRIVER_TAGS
from marketplace.recipes.tables import recipe, recipe_group, recipe_group_tag, recipe_label, recipe_tag
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random, new_id
from marketplace.teams.tables import team_member

VM, DOCKER = "VirtualMachine", "Docker"


class NameTakenError(ValueError):
    """There is another of this name."""


class UnknownTagError(LookupError):
    """There is no such tag; `place` is its place among those that were named."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


class Owner(msgspec.Struct, frozen=True):
    """Whose a recipe is: a user's, a team's, a provider's, or everybody's."""

    kind: str = "none"
    id: str = ""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe."""

    id: str
    name: str
    description: str
    group_id: str | None
    logo_url: str | None
    instructions_url: str | None
    kind: str
    details: dict[str, Any]
    tags: tuple[str, ...]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A group."""

    id: str
    name: str
    description: str
    logo_url: str | None
    metadata: dict[str, Any] | None
    tags: tuple[str, ...]


_THERE = recipe.c.removed_at.is_(None)


def of(owner: Owner) -> ColumnElement[bool]:
    """Whether a recipe is an owner's."""
    return and_(recipe.c.owner_kind == owner.kind, recipe.c.owner_id == owner.id)


def usable(*, user_id: str | None, team_id: str | None) -> ColumnElement[bool]:
    """Whether a recipe is everybody's, a person's or one of their teams', or of a provider that they act for or are a
    customer of; for a team, its own."""
    if user_id is None:
        return or_(recipe.c.owner_kind == "none", of(Owner("team", team_id or "")))
    teams = select(team_member.c.team_id).where(team_member.c.user_id == user_id)
    people = select(provider_member.c.provider_id).where(provider_member.c.user_id == user_id)
    customers = select(provider_customer.c.provider_id).where(provider_customer.c.user_id == user_id)
    return or_(
        recipe.c.owner_kind == "none",
        of(Owner("user", user_id)),
        and_(recipe.c.owner_kind == "team", recipe.c.owner_id.in_(teams)),
        and_(recipe.c.owner_kind == "provider", recipe.c.owner_id.in_(people.union(customers))),
    )


def add(
    unit: WriteUnit, owner: Owner, values: Mapping[str, Any], tags: Collection[str], *, now: int, random: Random
) -> str:
    """Add a recipe and return its id. `values` are its columns. NameTakenError, UnknownTagError."""
    check_tags(unit, list(tags))
    recipe_id = new_id(now, random)
    row = {"id": recipe_id, "owner_kind": owner.kind, "owner_id": owner.id, "created_at": now, "removed_at": None}
    unit.insert_missing(recipe, [{**values, **row}])
    if unit.select(select(recipe.c.id).where(recipe.c.id == recipe_id)).one_or_none() is None:
        raise NameTakenError(values["name"])
    unit.insert_missing(recipe_tag, [{"recipe_id": recipe_id, "tag": tag} for tag in tags])
    return recipe_id


def matching(
    unit: ReadUnit,
    owner: Owner,
    *,
    names: Collection[str] | None = None,
    tags: Collection[str] | None = None,
    groups: Collection[str] | None = None,
    kind: str | None = None,
) -> list[str]:
    """Return the ids of an owner's recipes with one of these names, tags or groups."""
    wanted = select(recipe.c.id).where(of(owner), _THERE)
    if names is not None:
        wanted = wanted.where(recipe.c.name.in_(sorted(names)))
    if tags is not None:
        tagged = select(recipe_tag.c.recipe_id).where(recipe_tag.c.tag.in_(sorted(tags)))
        wanted = wanted.where(recipe.c.id.in_(tagged))
    if groups is not None:
        inside = select(recipe_group.c.id).where(recipe_group.c.name.in_(sorted(groups)))
        wanted = wanted.where(recipe.c.group_id.in_(inside))
    if kind is not None:
        wanted = wanted.where(recipe.c.kind == kind)
    return list(unit.select(wanted.order_by(recipe.c.id)).scalars())


def remove(unit: WriteUnit, ids: Collection[str], now: int) -> None:
    """Remove recipes. Their rows stay: machines name them."""
    unit.execute(update(recipe).where(recipe.c.id.in_(sorted(ids)), _THERE).values(removed_at=now))


def set_image(unit: WriteUnit, ids: Collection[str], image_url: str, digest: str | None) -> None:
    """Give recipes of virtual machines another image."""
    wanted = select(recipe.c.id, recipe.c.details).where(recipe.c.id.in_(sorted(ids))).with_for_update()
    for recipe_id, text in unit.select(wanted).all():
        details = {**msgspec.json.decode(text), "image_url": image_url, "image_sha256": digest}
        written = msgspec.json.encode(details).decode()
        unit.execute(update(recipe).where(recipe.c.id == recipe_id).values(image_url=image_url, details=written))


def recipes(unit: ReadUnit, condition: ColumnElement[bool]) -> list[Recipe]:
    """Return recipes, by name."""
    rows = unit.select(select(recipe).where(_THERE, condition).order_by(recipe.c.name, recipe.c.id)).all()
    tags = _tags(unit, recipe_tag, "recipe_id", [row.id for row in rows])
    return [
        Recipe(
            id=row.id,
            name=row.name,
            description=row.description,
            group_id=row.group_id,
            logo_url=row.logo_url,
            instructions_url=row.instructions_url,
            kind=row.kind,
            details=msgspec.json.decode(row.details),
            tags=tags.get(row.id, ()),
        )
        for row in rows
    ]


def groups(unit: ReadUnit) -> list[Group]:
    """Return all groups, by name."""
    rows = unit.select(select(recipe_group).order_by(recipe_group.c.name)).all()
    tags = _tags(unit, recipe_group_tag, "group_id", [row.id for row in rows])
    return [
        Group(
            id=row.id,
            name=row.name,
            description=row.description,
            logo_url=row.logo_url,
            metadata=None if row.data is None else msgspec.json.decode(row.data),
            tags=tags.get(row.id, ()),
        )
        for row in rows
    ]


def group_id(unit: ReadUnit, name: str) -> str | None:
    """Return the id of a group."""
    return unit.select(select(recipe_group.c.id).where(recipe_group.c.name == name)).scalar_one_or_none()


def add_group(unit: WriteUnit, values: Mapping[str, Any], tags: Collection[str], *, now: int, random: Random) -> str:
    """Add a group and return its id. NameTakenError, UnknownTagError."""
    check_tags(unit, list(tags))
    made = new_id(now, random)
    unit.insert_missing(recipe_group, [{"id": made, "created_at": now, **values}])
    if group_id(unit, values["name"]) != made:
        raise NameTakenError(values["name"])
    unit.insert_missing(recipe_group_tag, [{"group_id": made, "tag": tag} for tag in tags])
    return made


def change_group(unit: WriteUnit, changed: str, values: Mapping[str, Any], tags: Collection[str] | None) -> None:
    """Write columns of a group, and its tags unless None. NameTakenError, UnknownTagError."""
    taken = group_id(unit, values["name"]) if "name" in values else None
    if taken is not None and taken != changed:
        raise NameTakenError(values["name"])
    if values:
        unit.execute(update(recipe_group).where(recipe_group.c.id == changed).values(**values))
    if tags is not None:
        check_tags(unit, list(tags))
        unit.execute(delete(recipe_group_tag).where(recipe_group_tag.c.group_id == changed))
        unit.insert_missing(recipe_group_tag, [{"group_id": changed, "tag": tag} for tag in tags])


def remove_group(unit: WriteUnit, gone: str) -> None:
    """Remove a group; its recipes are in none from now on."""
    unit.execute(update(recipe).where(recipe.c.group_id == gone).values(group_id=None))
    unit.execute(delete(recipe_group_tag).where(recipe_group_tag.c.group_id == gone))
    unit.execute(delete(recipe_group).where(recipe_group.c.id == gone))


def knows_tag(unit: ReadUnit, name: str) -> bool:
    """Whether there is a tag."""
    known = select(recipe_label.c.name).where(recipe_label.c.name == name)
    return name in DRIVER_TAGS or unit.select(known).one_or_none() is not None


def check_tags(unit: ReadUnit, tags: list[str]) -> None:
    """UnknownTagError unless there are all of these."""
    for place, tag in enumerate(tags):
        if not knows_tag(unit, tag):
            raise UnknownTagError(place)


def add_tag(unit: WriteUnit, name: str, description: str, now: int) -> None:
    """Add a tag. NameTakenError."""
    if knows_tag(unit, name):
        raise NameTakenError(name)
    unit.execute(insert(recipe_label).values(name=name, description=description, created_at=now))


def change_tag(unit: WriteUnit, name: str, new_name: str | None, description: str | None) -> None:
    """Give a tag another name, wherever it is, or another description. NameTakenError."""
    if description is not None:
        unit.execute(update(recipe_label).where(recipe_label.c.name == name).values(description=description))
    if new_name is None or new_name == name:
        return
    if knows_tag(unit, new_name):
        raise NameTakenError(new_name)
    for table, column in ((recipe_label, "name"), (recipe_tag, "tag"), (recipe_group_tag, "tag")):
        unit.execute(update(table).where(table.c[column] == name).values({column: new_name}))


def remove_tag(unit: WriteUnit, name: str) -> None:
    """Remove a tag from whatever has it."""
    for table, column in ((recipe_tag, "tag"), (recipe_group_tag, "tag"), (recipe_label, "name")):
        unit.execute(delete(table).where(table.c[column] == name))


def _tags(unit: ReadUnit, table: Any, key: str, ids: list[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for owner, tag in unit.select(select(table.c[key], table.c.tag).where(table.c[key].in_(ids)).order_by(table.c.tag)):
        found[owner] = (*found.get(owner, ()), tag)
    return found
