"""Any order of what people, nodes, engines, operators and time do to the compute side; after each step, everything that
must hold does."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from sqlalchemy import select

from marketplace.nodes.tables import gpu
from marketplace.reservations.tables import reservation
from tests.marketplace.life.game import kill, one
from tests.marketplace.life.operators import Nodes, Operators
from tests.marketplace.life.renters import VARIANTS, Renters
from tests.marketplace.life.world import World


class LifeMachine(Renters, Nodes, Operators):
    """The whole compute side."""

    @initialize(running=st.lists(st.tuples(one, st.sampled_from(VARIANTS), st.booleans()), min_size=1, max_size=3))
    def begin(self, running: list[tuple[int, str, bool]]) -> None:
        self.world = World(type(self).make())
        self.off = set()
        self.keys = 0
        for who, variant, container in running:
            self.rent_well(who, variant, container)

    @rule(seconds=st.sampled_from([1, 15, 31, 61, 700, 3700, 90_000]))
    def time_passes(self, seconds: int) -> None:
        self.world.office.wait(seconds)

    @rule(twice=st.booleans(), kill=kill)
    def workers(self, twice: bool, kill: int | None) -> None:
        """Workers tick; killed at any statement, they tick again."""
        with self.world.killed_after(kill):
            self.world.work()
        if twice:
            self.world.work()

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "world"):
            return
        type(self).steps += 1
        self.reached.update({row.status for row in self.live()})
        with self.world.database.read() as unit:
            states = unit.select(select(reservation.c.state).distinct()).scalars()
            self.reached.update(f"reservation {state}" for state in states)
        assert self.world.wrong() == []

    @invariant()
    def switched_off_stays_off(self) -> None:
        """I14: GPUs are on or off as people set them, whatever nodes register."""
        if not hasattr(self, "world"):
            return
        with self.world.database.read() as unit:
            off = unit.select(select(gpu.c.node_id, gpu.c.pci_slot).where(gpu.c.enabled.is_(False))).all()
        assert {(node_id, slot) for node_id, slot in off} == self.off, "I14"
