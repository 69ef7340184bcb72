"""What a saved environment may become, pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from marketplace.environments.tables import saved_environment
from marketplace.events.transitions import Machine, Moves

State = Literal["Retained", "Claimed", "Consumed", "Erased"]

MOVES: Moves = MappingProxyType(
    {
        ("Retained", "claim"): "Claimed",
        ("Claimed", "return"): "Retained",
        ("Claimed", "consume"): "Consumed",
        ("Retained", "erase"): "Erased",
        ("Claimed", "erase"): "Erased",
    }
)
MACHINE = Machine("environments", saved_environment, "state", MOVES)
