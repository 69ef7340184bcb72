"""A provider's site: its people, a datacenter and, where a test needs them, rows of nodes and of instances on them.

Rows are written as agents and rentals leave them, for tests of what is about them and not of how they come to be.
"""

from __future__ import annotations

import itertools
from typing import Any

from sqlalchemy import insert

from marketplace.catalog import datacenters
from marketplace.instances.tables import instance
from marketplace.nodes.tables import gpu, node
from marketplace.providers import service as providers
from marketplace.store.ids import new_id
from tests.marketplace.office import Caller, Office


class Site:
    """A provider with one person who acts for it, and one datacenter."""

    def __init__(self, office: Office, name: str = "acme", *, datacenter: str = "eu-1") -> None:
        self.office = office
        self.name = name
        self.datacenter = datacenter
        self.operator = office.person("provider")
        self._numbers = itertools.count(1)
        with office.database.write() as unit:
            made = providers.create(unit, name=name, now=office.clock(), random=office.random)
            self.provider_id = made.id
            providers.add_member(unit, made.id, self.operator.id, is_root=True, now=office.clock())
            self.datacenter_id = datacenters.create(
                unit, provider_id=made.id, name=datacenter, now=office.clock(), random=office.random
            )

    def node(self, *, gpus: int = 0, modules: str = "OpenOrProprietary", **values: Any) -> str:
        """A node that is ready; returns its id."""
        number, node_id = next(self._numbers), self._id()
        row = {
            "id": node_id,
            "provider_id": self.provider_id,
            "datacenter_id": self.datacenter_id,
            "machine_id": f"{self.name}-machine-{number}",
            "boot_id": "boot",
            "hostname": f"{self.name}-g{number:02d}",
            "ip_address": f"198.51.100.{number}",
            "status": "Ready",
            "health": "",
            "hibernated": False,
            "listed": True,
            "drain_state": "None",
            "drain_notified": False,
            "cpu_mode": "Pinned",
            "overcommit_percent": 100,
            "inventory": "{}",
            "inventory_digest": "",
            "capabilities": "{}",
            "agent_version": "1",
            "session_id": node_id,
            "epoch": 1,
            "last_seen": self.office.now,
            "generation": 1,
            "desired_rev": 1,
            "observed_digest": "",
            "dram_reserve": 0,
            "inference_floor": 0,
            "reclaim_notice_s": 30,
            "next_fence": 1,
            "registered_at": self.office.clock(),
        }
        with self.office.database.write() as unit:
            unit.execute(insert(node).values({**row, **values}))
            for place in range(gpus):
                unit.execute(insert(gpu).values(**_gpu(node_id, place, modules)))
        return node_id

    def instance(self, node_id: str, who: Caller, *, team_id: str | None = None, **values: Any) -> str:
        """An active virtual machine of somebody's; returns its id."""
        number, instance_id = next(self._numbers), self._id()
        over = values.get("status") in ("Inactive", "Failed")
        row = {
            "id": instance_id,
            "name": f"{self.name}-i{number}",
            "account_id": who.account_id,
            "user_id": who.id if who.email else None,
            "team_id": team_id,
            "cluster_name": "default",
            "node_id": node_id,
            "provider_id": self.provider_id,
            "kind": "VirtualMachine",
            "gpu_count": 0,
            "vcpu": 1,
            "dram": 1 << 30,
            "disk": 1 << 30,
            "cpu_policy": "Dedicated",
            "config": "{}",
            "username": "ubuntu",
            "has_password": False,
            "ssh_key_auth": True,
            "status": "Active",
            "failing": False,
            "want": "Running",
            "gen": 1,
            "reset_seq": 0,
            "gen_applied": 1,
            "reset_applied": 0,
            "phase": "Running",
            "power": "Running",
            "missing_rounds": 0,
            "addresses": "[]",
            "created_at": self.office.clock(),
            "ready_at": self.office.now,
            "ended_at": self.office.now if over else None,
            "cost_per_hour": 0,
            "provider_share": 0,
            "billing_exempt": False,
        }
        with self.office.database.write() as unit:
            unit.execute(insert(instance).values({**row, **values}))
        return instance_id

    def _id(self) -> str:
        return new_id(self.office.clock(), self.office.random)


def _gpu(node_id: str, place: int, modules: str) -> dict[str, Any]:
    return {
        "id": f"{node_id}-{place}",
        "node_id": node_id,
        "pci_slot": f"0000:{0x10 + place:02x}:00.0",
        "uuid": f"GPU-{node_id}-{place}",
        "number": place,
        "numa": 0,
        "brand": "H200",
        "architecture": "Hopper",
        "kernel_modules": modules,
        "vram": 141 << 30,
        "pci_valid": True,
        "present": True,
        "healthy": True,
        "enabled": True,
        "mig_enabled": False,
        "mig": "{}",
    }
