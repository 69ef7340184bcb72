"""What every game of the compute side is played with: its world, who is in it, and how it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from sqlalchemy import func, select

from marketplace.instances.tables import instance
from marketplace.placement.tables import claim
from marketplace.store.db import Database
from tests.marketplace.life.host import Host, run
from tests.marketplace.life.invariants import whole_audit
from tests.marketplace.life.world import World
from tests.marketplace.office import Caller

one = st.integers(0, 5)
"""Which of what there is."""
kill = st.none() | st.none() | st.none() | st.integers(0, 60)
"""The statement at which the server dies; mostly it does not."""


class Game(RuleBasedStateMachine):
    """A world, its beginning and its end, and who is in it. `make` gives an empty database."""

    make: ClassVar[Callable[[], Database]]
    steps: ClassVar[int] = 0
    reached: ClassVar[Counter[str]] = Counter()
    """Statuses that instances had, and how requests to rent were answered: what games have seen."""
    world: World
    off: set[tuple[str, str]]
    """GPUs that people switched off: node and PCI slot"""
    keys: int
    """requests to rent so far"""

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.end_well()
        finally:
            self.world.close()

    def host(self, number: int) -> Host:
        return self.world.hosts[number % 2]

    def renter(self, number: int) -> Caller:
        return self.world.renters[number % 3]

    def live(self, who: Caller | None = None) -> list[Any]:
        wanted = select(instance).where(instance.c.ended_at.is_(None)).order_by(instance.c.created_at)
        if who is not None:
            wanted = wanted.where(instance.c.account_id == who.account_id)
        with self.world.database.read() as unit:
            return list(unit.select(wanted).all())

    def owner(self, row: Any) -> Caller:
        (who,) = [who for who in self.world.renters if who.account_id == row.account_id]
        return who

    @rule(number=one, times=st.integers(1, 4))
    def all_is_well(self, number: int, times: int) -> None:
        """A node works for a while, and what runs on it becomes ready."""
        host = self.host(number)
        for _ in range(times):
            for machine in host.machines.values():
                machine.ready = True
            run(self.world.loop, host)

    def end_well(self) -> None:
        """I15: once every fault is over, what is to end has ended, and nothing of it is left."""
        world = self.world
        for host in world.hosts:
            host.heal()
        self.settle(3)
        for row in self.live():
            world.ask("instances.terminate", {"selector": {"ById": [row.id]}}, self.owner(row))
        self.settle(8)
        assert [(row.id, row.status, row.phase, row.want) for row in self.live()] == [], "I15"
        with world.database.read() as unit:
            facts = world.facts(unit)
            assert whole_audit(facts) == []
        self.reached.update(row.status for row in facts.instances.values())
        self.reached.update(f"reservation {row.state}" for row in facts.reservations.values())
        self.reached.update(f"environment {row.state}" for row in facts.environments.values())
        self.reached["leases"] += len(facts.leases)
        self.reached["covered"] += sum(row.quota_id is not None for row in facts.instances.values())
        assert [row.instance_id for row in facts.claims] == [], "I15: claims of what is over"
        assert list(facts.things) == [], "I12: machines of nobody"
        assert world.wrong() == []

    def settle(self, times: int) -> None:
        """Let time pass without faults, until nothing is left or so often."""
        for _ in range(times):
            if not self.left():
                return
            self.world.office.wait(61)
            for host in self.world.hosts:
                run(self.world.loop, host, 2)
            self.world.work()

    def left(self) -> bool:
        """Whether anything is claimed, or runs where it should not."""
        with self.world.database.read() as unit:
            claimed = select(func.count()).select_from(claim).where(claim.c.released_at.is_(None))
            found = int(unit.select(claimed).scalar_one())
        return found > 0 or any(host.machines for host in self.world.hosts)
