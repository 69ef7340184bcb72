"""What a volume may become, pure, and what it costs."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from marketplace.events.transitions import Machine, Moves
from marketplace.volumes.tables import volume

Status = Literal["Creating", "Available", "Attached", "Error", "Deleting", "Deleted"]
Step = Literal["warn", "spare", "delete"]
MAX_GB = 65_536
MAX_COST = 10 * 1_000_000_000
"""Largest price of a gigabyte for a month, in nano-units."""
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


def step(*, poor: bool, delete_after: int | None, attached: bool, now: int) -> Step | None:
    """What is due for a volume that costs something. While its account is empty it is kept for a time, and then
    deleted, but not under an instance that has it."""
    if not poor:
        return None if delete_after is None else "spare"
    if delete_after is None:
        return "warn"
    return "delete" if now >= delete_after and not attached else None
