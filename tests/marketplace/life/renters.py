"""Games of renters: they rent, on every kind of terms, ask things of their machines, and pay."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule
from sqlalchemy import func, select

from marketplace.accounts import service as accounts
from marketplace.environments.tables import saved_environment
from marketplace.instances.tables import instance
from marketplace.ledger.money import NANO
from marketplace.reservations.tables import reservation
from tests.marketplace.life.game import Game, kill, one
from tests.marketplace.life.invariants import beyond_budget, overcommitted
from tests.marketplace.life.world import CANARY, DOCKER, VM
from tests.marketplace.office import Answer, Caller

VARIANTS = ("h200.0", "h200.1", "h200.2", "h200.part")
ACTIONS = ("pause", "resume", "stop", "start", "reset", "terminate")
_STATUSES = ("Initializing", "Active", "Deactivating", "Inactive", "Failed")


class Renters(Game):
    """What renters do."""

    @rule(
        who=one,
        variant=st.sampled_from(VARIANTS),
        container=st.booleans(),
        named=st.none() | one,
        terms=st.sampled_from(["none", "none", "new", "existing", "environment", "covered", "disk", "network"]),
        kill=kill,
        again=st.booleans(),
    )
    def rent(
        self, who: int, variant: str, container: bool, named: int | None, terms: str, kill: int | None, again: bool
    ) -> None:
        """Somebody rents; the server may die of it; the client may ask again with the same key."""
        caller = self.renter(who)
        body: dict[str, Any] = {
            "selector": {"ByInstanceTypeAndLocation": {"instance_type": variant}},
            "config": DOCKER if container or variant == "h200.part" else VM,
            **self.terms(caller, terms),
        }
        if terms == "disk":
            mount = {"volume": {"ById": [self.world.volumes[caller.account_id]]}, "mount_path": "/data"}
            body["config"] = {
                kind: {**config, "volumes": {"Mounts": [mount]}} for kind, config in body["config"].items()
            }
        if named is not None:
            body["selector"] = {"ByNodeId": {"node_id": self.host(named).node_id, "instance_type": variant}}
        self.keys += 1
        with self.world.database.read() as unit:
            before = self.world.facts(unit)
        crowded = {host.node_id for host in self.world.hosts if overcommitted(before, host.node_id)}
        answers: list[Answer] = []
        with self.world.killed_after(kill):
            self.ask_rent(body, caller, answers)
        if again:
            self.ask_rent(body, caller, answers)
        assert len({json.dumps(answer.body["instance_ids"]) for answer in answers if answer.status == 201}) <= 1, "I13"
        for answer in answers:
            self.reached[f"rent {answer.status}"] += 1
            if answer.status == 201:
                self.check_admission(answer.body["instance_ids"][0], crowded)
        with self.world.database.read() as unit:
            made = unit.select(select(func.count()).select_from(instance)).scalar_one() - len(before.instances)
        assert made <= 1, "I13: one request rented twice"

    @rule(who=one, variant=st.sampled_from(VARIANTS), container=st.booleans())
    def rent_well(self, who: int, variant: str, container: bool) -> None:
        """Somebody rents, and all goes well."""
        self.rent(who, variant, container, named=None, terms="none", kill=None, again=False)
        self.all_is_well(0, 2)
        self.all_is_well(1, 2)

    def ask_rent(self, body: dict[str, Any], caller: Caller, answers: list[Answer]) -> None:
        self.world.office.wait(10)
        answers.append(self.world.ask("instances.rent", body, caller, Idempotency_Key=f"rent-{self.keys}"))

    def terms(self, caller: Caller, terms: str) -> dict[str, Any]:
        if terms == "network":
            return {"network": "lab"}
        with self.world.database.read() as unit:
            if terms == "new":
                return {"reservation": {"New": {"type_id": self.world.type_ids[0]}}}
            if terms == "existing":
                mine = (reservation.c.account_id == caller.account_id, reservation.c.state == "Unbound")
                found = unit.select(select(reservation.c.id).where(*mine)).scalars().first()
                return {} if found is None else {"reservation": {"Existing": found}}
            if terms == "environment":
                kept = saved_environment
                mine = (kept.c.account_id == caller.account_id, kept.c.state == "Retained")
                found = unit.select(select(kept.c.id).where(*mine)).scalars().first()
                return {} if found is None else {"reuse_environment_id": found}
        return {"require_quota_coverage": True} if terms == "covered" else {}

    def check_admission(self, instance_id: str, crowded: set[str]) -> None:
        """I3: what was admitted is within its quota, or within what no quota holds."""
        with self.world.database.read() as unit:
            facts = self.world.facts(unit)
        row = facts.instances[instance_id]
        if row.quota_id is not None:
            assert not beyond_budget(facts, row.quota_id), f"I3: {instance_id} is beyond its quota"
        elif row.node_id not in crowded:
            assert not overcommitted(facts, row.node_id), f"I3: {instance_id} took what quotas hold"

    @rule(number=one, action=st.sampled_from(ACTIONS), kill=kill)
    def act(self, number: int, action: str, kill: int | None) -> None:
        """Somebody asks something of a machine of theirs."""
        live = self.live()
        if live:
            row = live[number % len(live)]
            with self.world.killed_after(kill):
                self.world.ask(f"instances.{action}", {"selector": {"ById": [row.id]}}, self.owner(row))

    @rule(number=one, new=st.booleans(), long=st.booleans(), kill=kill)
    def reserve(self, number: int, new: bool, long: bool, kill: int | None) -> None:
        """Somebody reserves what runs, or makes a reservation longer."""
        live = self.live()
        if live:
            row = live[number % len(live)]
            body = {"executor_id": row.id, "reservation_type_id": self.world.type_ids[long]}
            if row.team_id is not None:
                body["team_id"] = row.team_id
            with self.world.killed_after(kill):
                self.world.ask(f"reservations.{'create' if new else 'update'}", body, self.owner(row))

    @rule(who=one, kill=kill)
    def delete_disk(self, who: int, kill: int | None) -> None:
        """Somebody deletes their disk, and has another from then on, if it was free."""
        caller, world = self.renter(who), self.world
        mine = {"team_id": caller.id} if caller is world.team else {}
        with world.killed_after(kill):
            answer = world.ask("volumes.delete", {"volume_id": world.volumes[caller.account_id], **mine}, caller)
            assert answer.status in (200, 404, 409), answer.body
        made = {"name": f"data-{world.now}", "size_gb": 1, "datacenter": "acme-1", "volume_type_name": "disk", **mine}
        answer = world.ask("volumes.create", made, caller)
        if answer.status == 201:
            world.volumes[caller.account_id] = str(answer.body["volume"]["id"])

    @rule(who=one, amount=st.sampled_from([1, 100]))
    def top_up(self, who: int, amount: int) -> None:
        office = self.world.office
        with self.world.database.write() as unit:
            key = f"top-{office.now}"
            account_id = self.renter(who).account_id
            accounts.top_up(unit, account_id, amount * NANO, key=key, now=office.clock(), random=office.random)

    @rule(who=one, terms=st.sampled_from(["new", "existing", "environment"]), variant=st.sampled_from(VARIANTS[:2]))
    def rent_on_terms(self, who: int, terms: str, variant: str) -> None:
        """Somebody rents on a reservation or on a saved disk, and all goes well for a while."""
        self.rent(who, variant, container=False, named=None, terms=terms, kill=None, again=False)
        self.all_is_well(0, 1)
        self.all_is_well(1, 2)

    @rule(who=one)
    def look(self, who: int) -> None:
        """I9 and I10: people see what is theirs, and nothing secret of it."""
        caller = self.renter(who)
        answer = self.world.ask("instances.list", {"selector": {"ByStatus": list(_STATUSES)}}, caller)
        assert answer.status == 200, answer.body
        mine = {caller.account_id} | ({self.world.team.account_id} if caller is self.world.people[1] else set())
        with self.world.database.read() as unit:
            whose = {row.id: row.account_id for row in unit.select(select(instance.c.id, instance.c.account_id))}
        assert {whose[shown["id"]] for shown in answer.body["instances"]} <= mine, "I9"
        assert CANARY not in json.dumps(answer.body, default=str), "I10"
        refused = self.world.ask("nodes.list", {}, caller)
        assert refused.status == 403 or refused.body["nodes"] == [], "I9"
