"""What a reservation may become, pure, and what it costs."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from marketplace.events.transitions import Machine, Moves
from marketplace.ledger.money import check_amount, round_half_up
from marketplace.reservations.tables import reservation

State = Literal["Held", "Bound", "Unbound", "Expired", "Cancelled"]
PPM = 1_000_000
HOUR_S = 3600

MOVES: Moves = MappingProxyType(
    {
        ("Held", "bind"): "Bound",
        ("Held", "cancel"): "Cancelled",
        ("Bound", "unbind"): "Unbound",
        ("Unbound", "bind"): "Bound",
        ("Bound", "expire"): "Expired",
        ("Unbound", "expire"): "Expired",
        ("Bound", "extend"): "Bound",
    }
)
MACHINE = Machine("reservations", reservation, "state", MOVES)


def price(cost_per_hour: int, duration_s: int, factor: int) -> int:
    """What a reservation costs, in nano-units, rounded once, half up. `factor` is in millionths of the price on demand.
    MoneyError."""
    return check_amount(round_half_up(cost_per_hour * duration_s * factor, HOUR_S * PPM))
