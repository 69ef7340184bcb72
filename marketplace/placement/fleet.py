"""The nodes as one process saw them last. Whatever changes what may be placed on a node raises its generation, but for
its agent falling silent, a drain and quotas that begin or end by themselves: what was made of a node is right for as
long as those are looked at beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from marketplace.placement import load
from marketplace.placement.view import NodeView
from marketplace.store.db import ReadUnit, WriteUnit

MAX_NODES = 100_000


class _Seen(NamedTuple):
    """A node that takes something new, and when it was so (µs)."""

    generation: int
    at: int
    until: int
    view: NodeView


class Fleet:
    """A copy of the nodes of one database that take something new. Safe to share between threads."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def taking(self, unit: ReadUnit, instance_type: str, now: int) -> list[NodeView]:
        """The nodes of a type that take anything new at all."""
        found: list[NodeView] = []
        changed: list[str] = []
        for node_id, generation in load.taking(unit, instance_type):
            seen = self._seen.get(node_id)
            if seen is not None and seen.generation == generation and seen.at <= now < seen.until:
                found.append(seen.view)
            else:
                changed.append(node_id)
        if changed:
            fresh = load.views(unit, now, changed)
            self._keep(unit, fresh, now)
            found += fresh
        return found

    def learn(self, view: NodeView, now: int) -> None:
        """Remember a node as whoever changed it last, and has committed that, knows it to be."""
        self._remember([view], now)

    def _keep(self, unit: ReadUnit, views: Sequence[NodeView], now: int) -> None:
        if isinstance(unit, WriteUnit):
            return  # its statements may see different moments, and what it wrote itself may be taken back
        self._remember(views, now)

    def _remember(self, views: Sequence[NodeView], now: int) -> None:
        if len(self._seen) + len(views) > MAX_NODES:
            self._seen.clear()
        self._seen.update((view.id, _Seen(view.generation, now, view.until, view)) for view in views)
