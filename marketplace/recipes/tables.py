"""Tables of recipes, their groups and their tags."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Index, Table, Text, text

from marketplace.store.base import metadata

recipe_group = Table(
    "recipe_group",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("description", Text, nullable=False),
    Column("logo_url", Text, nullable=True),
    Column("data", Text, nullable=True, comment="JSON for clients; nothing here reads it"),
    Column("created_at", BigInteger, nullable=False),
)

recipe = Table(
    "recipe",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("group_id", Text, ForeignKey("recipe_group.id"), nullable=True),
    Column("owner_kind", Text, nullable=False, comment="none is everybody's"),
    Column("owner_id", Text, nullable=False, comment="of the user, team or provider; empty for none"),
    Column("logo_url", Text, nullable=True),
    Column("instructions_url", Text, nullable=True),
    Column("kind", Text, nullable=False),
    Column("image_url", Text, nullable=True, comment="of a virtual machine; null in a container's"),
    Column("details", Text, nullable=False, comment="JSON as it was given"),
    Column("created_at", BigInteger, nullable=False),
    Column("removed_at", BigInteger, nullable=True),
    CheckConstraint("owner_kind IN ('none', 'user', 'team', 'provider')", name="owner_kind_known"),
    CheckConstraint("kind IN ('VirtualMachine', 'Docker')", name="kind_known"),
    CheckConstraint("(owner_kind = 'none') = (owner_id = '')", name="owner_named"),
)
_THERE = text("removed_at IS NULL")
Index(
    "ix_recipe_name",
    recipe.c.owner_kind,
    recipe.c.owner_id,
    recipe.c.name,
    unique=True,
    sqlite_where=_THERE,
    postgresql_where=_THERE,
)
Index("ix_recipe_image", recipe.c.image_url, sqlite_where=_THERE, postgresql_where=_THERE)

recipe_label = Table(
    "recipe_label",
    metadata,
    Column("name", Text, primary_key=True),
    Column("description", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
)

recipe_tag = Table(
    "recipe_tag",
    metadata,
    Column("recipe_id", Text, ForeignKey("recipe.id"), primary_key=True),
    Column("tag", Text, primary_key=True),
)
Index("ix_recipe_tag_tag", recipe_tag.c.tag)

recipe_group_tag = Table(
    "recipe_group_tag",
    metadata,
    Column("group_id", Text, ForeignKey("recipe_group.id"), primary_key=True),
    Column("tag", Text, primary_key=True),
)
