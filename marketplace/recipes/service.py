"""What the catalog knows of an image."""

from __future__ import annotations

from sqlalchemy import select

from marketplace.recipes.tables import recipe, recipe_tag
from marketplace.store.db import ReadUnit


def tags_of_image(unit: ReadUnit, image_url: str) -> frozenset[str]:
    """Return the tags of a catalog image; none for an address that the catalog does not know, which is a custom one."""
    wanted = (
        select(recipe_tag.c.tag)
        .join(recipe, recipe.c.id == recipe_tag.c.recipe_id)
        .where(recipe.c.image_url == image_url, recipe.c.removed_at.is_(None), recipe.c.owner_kind == "none")
    )
    return frozenset(unit.select(wanted).scalars())
