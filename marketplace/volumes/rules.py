"""What a volume may become, pure, and what it costs."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from marketplace.events.transitions import Machine, Moves
from marketplace.volumes.tables import volume

Status = Literal["Creating", "Available", "Attached", "Error", "Deleting", "Deleted"]
MONTH_US = 30 * 86_400 * 1_000_000
"""A month of a volume's price: 30 days."""

MOVES: Moves = MappingProxyType(
    {
        ("Creating", "made"): "Available",
        ("Creating", "fail"): "Error",
        ("Available", "attach"): "Attached",
        ("Attached", "detach"): "Available",
        ("Available", "delete"): "Deleting",
        ("Error", "delete"): "Deleting",
        ("Deleting", "deleted"): "Deleted",
    }
)
MACHINE = Machine("volumes", volume, "status", MOVES)


def rate(size_gb: int, cost_per_gb_month: int) -> int:
    """Nano-units in MONTH_US."""
    return size_gb * cost_per_gb_month
