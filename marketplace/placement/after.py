"""A node once something was placed on it, pure: what is read of it afterwards, without reading it."""

from __future__ import annotations

from msgspec.structs import replace

from marketplace.placement.choose import Placement
from marketplace.placement.view import GpuView, NodeView


def after(placed: Placement) -> NodeView | None:
    """The node as it is with the claims of a placement, one generation later. None where more has changed than that: a
    lease that loses its GPUs may have others."""
    if any(part.gpu.leased for part in placed.slices):
        return None
    node, amount = placed.node, placed.amount
    gpus = _rented(placed)
    claimed = node.threads_claimed.union(*placed.cpus.values())
    pages = dict(node.pages_used)
    for numa, count in placed.hugepages.items():
        pages[numa] = pages.get(numa, 0) + count
    return node.claimed(
        gpus=gpus,
        used=replace(node.used + amount, gpu=sum(bool(gpu.rented) for gpu in gpus)),
        pages_used=pages,
        threads_claimed=claimed,
        standings=tuple(
            replace(one, consumed=one.consumed + amount) if one.id == placed.quota_id else one for one in node.standings
        ),
    )


def _rented(placed: Placement) -> tuple[GpuView, ...]:
    taken: dict[str, frozenset[int]] = {}
    for part in placed.slices:
        taken[part.gpu.id] = taken.get(part.gpu.id, frozenset()).union(part.slices)
    return tuple(
        replace(gpu, rented=gpu.rented | taken[gpu.id]) if gpu.id in taken else gpu for gpu in placed.node.gpus
    )
