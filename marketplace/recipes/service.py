"""What the catalog knows of images, for rentals and for nodes."""

from __future__ import annotations

import msgspec
from sqlalchemy import ColumnElement, bindparam, case, or_, select

from marketplace.agent.wire import DesiredImage
from marketplace.nodes import commands
from marketplace.nodes.tables import gpu, node
from marketplace.recipes.rules import suits
from marketplace.recipes.tables import recipe, recipe_tag
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.store.ids import Random
from marketplace.store.prepared import Prepared

_TAGS = Prepared(
    select(recipe_tag.c.tag)
    .join(recipe, recipe.c.id == recipe_tag.c.recipe_id)
    .where(recipe.c.image_url == bindparam("image"), recipe.c.removed_at.is_(None), recipe.c.owner_kind == "none")
)


def tags_of_image(unit: ReadUnit, image_url: str) -> frozenset[str]:
    """Return the tags of a catalog image; none for an address that the catalog does not know, which is a custom one."""
    return frozenset(tag for (tag,) in unit.rows(_TAGS, {"image": image_url}))


class Start(msgspec.Struct, frozen=True):
    """What a virtual machine of a recipe begins from."""

    image_url: str | None
    cloudinit_url: str


def start_of(unit: ReadUnit, name: str, usable: ColumnElement[bool]) -> Start | None:
    """Return what a recipe, by name or id, says of virtual machines: of those that somebody may use their own comes
    before that of a team or a provider, and everybody's last."""
    nearest = case({"user": 0, "team": 1, "provider": 2}, value=recipe.c.owner_kind, else_=3)
    mine = (usable, recipe.c.removed_at.is_(None), recipe.c.kind == "VirtualMachine")
    wanted = select(recipe.c.details).where(*mine, or_(recipe.c.name == name, recipe.c.id == name))
    found = unit.select(wanted.order_by(nearest, recipe.c.id).limit(1)).scalar_one_or_none()
    if found is None:
        return None
    details = msgspec.json.decode(found)
    return Start(details.get("image_url"), details.get("cloudinit_url") or "")


def images(unit: ReadUnit) -> list[DesiredImage]:
    """Return everybody's images of virtual machines, each once, with the tags of all recipes that it is in."""
    wanted = (
        select(recipe.c.image_url, recipe.c.details, recipe_tag.c.tag)
        .join(recipe_tag, recipe_tag.c.recipe_id == recipe.c.id, isouter=True)
        .where(recipe.c.owner_kind == "none", recipe.c.removed_at.is_(None), recipe.c.image_url.like("http%"))
        .order_by(recipe.c.image_url, recipe_tag.c.tag)
    )
    found: dict[str, tuple[str | None, set[str]]] = {}
    for url, details, tag in unit.select(wanted):
        digest = msgspec.json.decode(details).get("image_sha256")
        known, tags = found.get(url, (None, set()))
        found[url] = (known or digest, tags | ({tag} if tag else set()))
    return [DesiredImage(url=url, sha256=digest, tags=sorted(tags)) for url, (digest, tags) in found.items()]


def images_for(unit: ReadUnit, node_id: str, *, by_tag: bool) -> list[DesiredImage]:
    """Return the images that a node keeps ready: all, or with `by_tag` those whose driver its GPUs can load."""
    known = images(unit)
    if not by_tag:
        return known
    wanted = select(gpu.c.kernel_modules).where(gpu.c.node_id == node_id, gpu.c.present).distinct()
    modules = list(unit.select(wanted).scalars())
    return [one for one in known if suits(modules, frozenset(one.tags))]


def request_sync(unit: WriteUnit, image_url: str, *, by_tag: bool, now: int, random: Random) -> int:
    """Ask the nodes for which an image is meant to fetch it now; return how many. A node that was asked already, and
    has not begun, is asked once."""
    asked = 0
    for node_id in list(
        unit.select(select(node.c.id).where(node.c.deleted_at.is_(None)).order_by(node.c.id)).scalars()
    ):
        if not any(one.url == image_url for one in images_for(unit, node_id, by_tag=by_tag)):
            continue
        asked += 1
        commands.ask(unit, node_id, "sync_images", {}, now=now, random=random)
    return asked
