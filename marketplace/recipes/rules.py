"""Which images which node keeps ready, pure."""

from __future__ import annotations

from collections.abc import Collection

from marketplace.nodes.rules import OPEN_TAG, PROPRIETARY_TAG, loads

DRIVER_TAGS = frozenset({OPEN_TAG, PROPRIETARY_TAG})
"""Tags that say which of the GPU vendor's kernel modules an image holds. They are always known."""


def suits(modules: Collection[str], tags: frozenset[str]) -> bool:
    """Whether an image with these tags is of use on a node whose GPUs can load these kernel modules: one without a
    driver on every node, one with a driver where a GPU can load it."""
    if not tags & DRIVER_TAGS:
        return True
    return any(loads(one, tags) for one in modules)
