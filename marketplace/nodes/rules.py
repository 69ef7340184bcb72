"""What a node may become, pure: whether it is heard, and whether it is being emptied; and which drivers GPUs load."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from marketplace.events.transitions import Machine, Moves
from marketplace.nodes.tables import node

SECOND = 1_000_000
SILENT_US = 60 * SECOND
"""After so long without a poll a node does not respond."""
OFFLINE_US = 600 * SECOND
"""After so long it is offline, and what had not begun to run on it has failed."""
LOST_US = 24 * 3600 * SECOND
"""After so long what was being ended on it counts as ended; its claims stay until the node says that it is gone."""

Status = Literal["Ready", "NotResponding", "Offline"]
DrainState = Literal["None", "Draining", "Drained"]

MOVES: Moves = MappingProxyType(
    {
        ("Offline", "heard"): "Ready",
        ("NotResponding", "heard"): "Ready",
        ("Ready", "silent"): "NotResponding",
        ("NotResponding", "lost"): "Offline",
        # The agent said that it goes.
        ("Ready", "leave"): "Offline",
        ("NotResponding", "leave"): "Offline",
    }
)
CONNECTIVITY = Machine("nodes", node, "status", MOVES)

DRAIN_MOVES: Moves = MappingProxyType(
    {
        ("None", "drain"): "Draining",
        ("Draining", "drained"): "Drained",
        ("Draining", "cancel_drain"): "None",
        ("Draining", "resume"): "None",
        ("Drained", "resume"): "None",
    }
)
DRAIN = Machine("nodes", node, "drain_state", DRAIN_MOVES)

OPEN_TAG = "gpuvendor-driver"
PROPRIETARY_TAG = "gpuvendor-driver-proprietary"


def loads(modules: str, tags: frozenset[str]) -> bool:
    """Whether GPUs with these kernel modules can load the drivers of an image with these tags. An image without a
    driver tag, and a GPU of which nothing is known, fit everything."""
    if modules == "ProprietaryOnly":
        return OPEN_TAG not in tags or PROPRIETARY_TAG in tags
    if modules == "OpenOnly":
        return PROPRIETARY_TAG not in tags or OPEN_TAG in tags
    return True
