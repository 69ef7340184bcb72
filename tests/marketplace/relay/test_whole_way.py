"""A renter, a server, a relay, an agent without a way in, and a machine that answers behind all of them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.routing import Router

from marketplace.agent.client import ServerClient
from marketplace.agent.credentials import Credentials
from marketplace.agent.disks import RetainedDisks
from marketplace.agent.drivers.fake import FakeDriver, Hypervisor
from marketplace.agent.keeper import Keeper
from marketplace.agent.leases import LeaseBook
from marketplace.agent.node import Agent, Surroundings
from marketplace.agent.records import Records
from marketplace.ledger.money import NANO
from marketplace.nodes.tables import node
from marketplace.relay.relay import Relay
from tests.marketplace.office import Caller, Office
from tests.marketplace.rack import Rack, inventory
from tests.marketplace.relay.ground import PUBLIC, echo, free_port, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that look by themselves look often."""
    monkeypatch.setattr("marketplace.agent.node.LOOK_S", 0.02)
    monkeypatch.setattr("marketplace.agent.node.ROUND_S", 0.05)
    monkeypatch.setattr("marketplace.agent.relayed._RETRY_S", (0.02,))


def agent_of(rack: Rack, folder: Path) -> Agent:
    """A real agent, whose machines are in memory."""
    drivers: Any = {"VirtualMachine": FakeDriver(Hypervisor())}
    agents: list[Agent] = []
    keeper = Keeper(
        records=Records(folder / "instances", durable=False),
        disks=RetainedDisks(folder / "retained"),
        drivers=drivers,
        now=rack.office.clock,
        changed=lambda: agents[0].poke() if agents else None,
    )
    around = Surroundings(
        machine_id="m", boot_id="b", inventory=lambda: inventory("far"), drivers=drivers, now=rack.office.clock
    )
    app = Router([*rack.door.routes()], redirect_slashes=False)
    client = ServerClient("http://server", Credentials(api_key=rack.key), transport=httpx2.ASGITransport(app))
    agents.append(Agent(client, keeper, LeaseBook(), around))
    return agents[0]


def behind_a_relay(rack: Rack, control: int, published: int) -> bytes:
    """Put the provider's only node behind a relay; return the relay's secret."""
    office, who = rack.office, rack.operator()
    home = {"provider": "acme", "name": "hidden", "country_code": "IT", "tunnel": "relay", "tunnel_host": PUBLIC}
    ports = {"relay_port": control, "port_from": published, "port_to": published}
    made = office.ask("datacenters.add", {**home, **ports}, office.person("admin"))
    assert made.status in (200, 201), made.body
    (found,) = office.ask("nodes.list", {"selector": "All"}, who).body["nodes"]
    assert office.ask("nodes.update", {"node_id": found["id"], "datacenter": "hidden"}, who).status == 200
    with office.database.write() as unit:
        unit.execute(node.update().where(node.c.id == found["id"]).values(instance_type="h200"))
    return bytes.fromhex(made.body["relay_secret"])


async def ask(host: str, port: int, text: bytes) -> bytes:
    """What somebody out there is answered."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(text)
    writer.write_eof()
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer


async def rent_and_visit(rack: Rack, ada: Caller, folder: Path) -> None:
    office, agent = rack.office, agent_of(rack, folder)
    control, published = free_port(), free_port()
    running = asyncio.create_task(agent.run())
    try:
        async with asyncio.timeout(20):
            await agent.registered.wait()
        secret = await asyncio.to_thread(behind_a_relay, rack, control, published)
        relay = Relay(secret, range(published, published + 1), publish=PUBLIC, now=office.clock)
        await relay.start(PUBLIC, control)
        box = await asyncio.to_thread(rack.rented, ada)
        shown = await asyncio.to_thread(rack.show, ada, box)
        assert (shown["host_address"], shown["port_mappings"]) == (PUBLIC, [[22, published]])
        await until(lambda: published in relay.published())
        async with echo(published, greeting=b"SSH-2.0-far\r\n"):
            assert await ask(PUBLIC, published, b"hello") == b"SSH-2.0-far\r\nhello.end"
        assert (await asyncio.to_thread(rack.terminate, ada, box)).status == 200
        await until(lambda: published not in relay.published())
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(PUBLIC, published)
        await relay.close()
    finally:
        rack.door.close()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def test_what_is_rented_behind_a_relay_answers_at_the_address_that_is_shown(office: Office, tmp_path: Path) -> None:
    rack = Rack(office)
    asyncio.run(rent_and_visit(rack, office.person(balance=1000 * NANO), tmp_path))
    assert rack.audit().clean
