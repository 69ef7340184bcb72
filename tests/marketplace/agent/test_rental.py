"""The whole way: a server, the agent as a process of its own, and what is rented through REST really runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route, Router

from marketplace.accounts import service as accounts
from marketplace.agent.drivers.podman_runtime import runtime_folder
from marketplace.agent.serving import served, tcp_listener
from marketplace.catalog import service as catalog
from marketplace.catalog.service import Variant
from marketplace.instances.tables import instance
from marketplace.ledger.money import NANO, round_half_up
from marketplace.ledger.rental_tables import rental_meter
from marketplace.ledger.rentals import HOUR_US
from marketplace.networks import service as networks
from marketplace.nodes.tables import node
from marketplace.store.db import Database
from tests.marketplace.office import Caller, Office
from tests.marketplace.rack import Rack

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
COST = 3_600 * NANO
"""nano-units an hour: a unit a second"""


class RealOffice(Office):
    """The management API on the time of the wall."""

    def clock(self) -> int:
        self.now = max(self.now + 1, time.time_ns() // 1000)
        return self.now

    def wait(self, seconds: float) -> None:
        """Time passes by itself."""


class House:
    """A server whose door for nodes listens, and one node."""

    def __init__(self, database: Database, images: Path, more: list[Route]) -> None:
        office = RealOffice(database)
        office.now = 0
        self.office = office
        self.rack = Rack(office)
        self.renter = office.person(balance=1_000_000 * NANO)
        with database.write() as unit:
            small = Variant(
                name="h200.small",
                type_name="h200",
                gpu_count=0,
                vcpu=1,
                dram=256 * MIB,
                disk=256 * MIB,
                cost_per_hour=COST,
            )
            catalog.add_variant(unit, small, office.clock())

        async def image(request: Request) -> Response:
            return FileResponse(images / request.path_params["name"])

        self.app = Router([*self.rack.door.routes(), Route("/images/{name}", image), *more], redirect_slashes=False)

    async def ask(self, name: str, body: dict[str, Any], who: Caller | None = None) -> Any:
        """An operation, while the event loop serves the agent."""
        return await asyncio.to_thread(self.office.ask, name, body, who or self.renter)

    async def rent(self, config: dict[str, Any]) -> str:
        selector = {"ByInstanceTypeAndLocation": {"instance_type": "h200.small", "datacenters": None}}
        answer = await self.ask("instances.rent", {"selector": selector, "config": config, "name": "box-1"})
        assert answer.status == 201, answer.body
        return str(answer.body["instance_ids"][0])

    async def shown(self, id: str) -> dict[str, Any]:
        answer = await self.ask("instances.list", {"selector": {"ById": [id]}})
        assert answer.status == 200, answer.body
        return dict(answer.body["instances"][0])

    async def until(self, id: str, **wanted: Any) -> None:
        """Wait until these columns of the instance are so."""

        async def look() -> dict[str, Any]:
            return {name: self.column(id, name) for name in wanted}

        await until(look, lambda found: found == wanted)

    async def begun(self, id: str) -> dict[str, Any]:
        """The instance once it is no longer being made."""

        async def look() -> Any:
            return self.column(id, "status")

        await until(look, lambda status: status not in ("Initializing", "Deactivating"))
        return await self.shown(id)

    async def settled(self, id: str, power: str) -> None:
        """Wait until its newest wish has been carried out."""
        await self.until(id, power=power, gen_applied=self.column(id, "gen"))

    async def act(self, action: str, id: str) -> None:
        answer = await self.ask(f"instances.{action}", {"selector": {"ById": [id]}})
        assert answer.status == 200, answer.body

    def column(self, id: str, name: str) -> Any:
        with self.office.database.read() as unit:
            return unit.select(select(instance.c[name]).where(instance.c.id == id)).scalar_one()

    def ports(self, id: str) -> list[int]:
        """Numbers of its published ports."""
        with self.office.database.read() as unit:
            return [one.host for one in networks.ports_of(unit, [id])[id]]

    def spent(self) -> int:
        with self.office.database.read() as unit:
            return 1_000_000 * NANO - accounts.get(unit, self.renter.account_id).posted

    def billed(self, id: str) -> int:
        """What its ready time costs."""
        return round_half_up(COST * (self.cost_until(id) - self.column(id, "ready_at")), HOUR_US)

    def cost_until(self, id: str) -> int:
        """When it began to cost nothing more."""
        with self.office.database.read() as unit:
            wanted = select(rental_meter.c.stopped_at).where(rental_meter.c.resource_id == id)
            return int(unit.select(wanted).scalar_one())


async def until(look: Callable[[], Awaitable[Any]], true: Callable[[Any], Any], within_s: float = 150) -> Any:
    """Look again and again at what other processes bring about."""
    end = time.monotonic() + within_s
    while not true(found := await look()):
        assert time.monotonic() < end, found
        await asyncio.sleep(0.1)
    return found


@contextlib.asynccontextmanager
async def agent(house: House, url: str, data: Path, driver: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """`headrace node`, until it is told to go; its machines are ended with it."""
    words = [sys.executable, "-m", "gateway.cli", "node", "--server", url, "--data", str(data), "--driver", driver]
    words += ["--insecure-registry", url.removeprefix("http://")]
    words += ["--accelerator", "tcg", "--run-as", "nobody", "--private-images", "--address", "127.0.0.1"]
    idle = False
    with (data.parent / "agent.log").open("wb") as log:
        environment = {**os.environ, "HEADRACE_NODE_KEY": house.rack.key}
        process = await asyncio.to_thread(subprocess.Popen, words, cwd=ROOT, env=environment, stdout=log, stderr=log)

        async def nodes() -> Any:
            with house.office.database.read() as unit:
                return unit.select(select(node.c.id)).scalars().all()

        try:
            await until(nodes, lambda found: found or process.poll() is not None, 90)
            assert process.poll() is None, (data.parent / "agent.log").read_text()
            with house.office.database.write() as unit:
                unit.execute(node.update().values(instance_type="h200"))
            yield process
            idle = True
        finally:
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 0, (data.parent / "agent.log").read_text()
            assert not idle or not runtime_folder(data / "containers").exists(), "nobody needs it any more"
            await asyncio.to_thread(end_machines, data)


def end_machines(data: Path) -> None:
    """They outlive their agent, and not their test."""
    for pidfile in data.glob("instances/*/qemu.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pidfile.read_text()), signal.SIGKILL)
    storage, run = data / "containers/storage", runtime_folder(data / "containers")
    if run.exists():
        podman = ["podman", "--root", storage, "--runroot", run]
        subprocess.run([*podman, "rm", "--all", "--force", "--time", "0"], check=True, capture_output=True)
        subprocess.run(["umount", storage / "overlay"], check=False, capture_output=True)
        shutil.rmtree(run, ignore_errors=True)


@contextlib.asynccontextmanager
async def house_of(database: Database, images: Path, *more: Route) -> AsyncIterator[tuple[House, str]]:
    house = House(database, images, list(more))
    listener = tcp_listener("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with served(house.app, listener):
        try:
            yield house, url
        finally:
            house.rack.door.close()


@pytest.mark.parametrize("fresh_database", ["sqlite"], indirect=True)
def test_a_virtual_machine_and_a_container_are_rented_reached_and_billed(
    database: Database, guest_disk: Path, renter: Any, registry: Any, tmp_path: Path
) -> None:
    """Both on one node, at the same time."""
    routes = registry.Registry(login=("ann", "a secret")).routes()

    async def run() -> None:
        data = tmp_path / "n"
        async with house_of(database, guest_disk.parent, *routes) as (house, url), agent(house, url, data, "both"):
            try:
                vm, box = await asyncio.gather(
                    life_of_a_machine(house, f"{url}/images/{guest_disk.name}", renter),
                    life_of_a_container(house, f"{url.removeprefix('http://')}/box:1"),
                )
            except AssertionError as error:
                raise AssertionError((tmp_path / "agent.log").read_text()) from error
            assert min(house.billed(vm), house.billed(box)) > 0
            assert house.cost_until(vm) == house.column(vm, "stop_at"), "its end was asked for"
            assert house.cost_until(box) < house.column(box, "stop_at"), "its node saw that it had ended, and said so"
            assert house.spent() == house.billed(vm) + house.billed(box)
            assert house.rack.audit().clean
            assert "cannot be published" not in (tmp_path / "agent.log").read_text()

    asyncio.run(run())


async def life_of_a_machine(house: House, image: str, renter: Any) -> str:
    """A virtual machine, from its rent to its end."""
    config = {"image_url": image, "ssh_key": {"PublicKeys": [renter.public]}, "ports": ["22"]}
    vm = await house.rent({"VirtualMachine": config})
    shown = await house.begun(vm)
    assert shown["status"] == "Active", shown["failure"]
    (port,) = house.ports(vm)
    assert await renter.ssh(port, "hostname") == "box-1"
    for action, power in (("pause", "Paused"), ("resume", "Running")):
        await house.act(action, vm)
        await house.settled(vm, power)
    assert await renter.ssh(port, "echo again") == "again"
    for action, power in (("stop", "Shutoff"), ("start", "Running")):
        await house.act(action, vm)
        await house.settled(vm, power)
    await house.act("reset", vm)
    await house.until(vm, reset_applied=1)
    await house.act("terminate", vm)
    await house.until(vm, status="Inactive")
    return vm


async def life_of_a_container(house: House, image: str) -> str:
    """One that cannot be pulled, three whose command cannot be run or ends at once, and one that serves and then ends
    by itself; only that one costs anything."""
    refused = await house.rent({"Docker": {"image": image}})
    shown = await house.begun(refused)
    assert "check its name and credentials" in shown["failure"]["user_message"]
    assert house.column(refused, "ready_at") is None

    login = {"UsernamePassword": {"username": "ann", "password": "a secret"}}
    await commands_that_fail(house, image, login)

    script = (
        "mkdir -p /w/cgi-bin; echo $GREETING > /w/index.html; httpd -p 80 -h /w; "
        "printf '#!/bin/sh\\necho; touch /end' > /w/cgi-bin/end; chmod 755 /w/cgi-bin/end; "
        "until [ -e /end ]; do sleep 0.2; done; echo told to end; exit 4"
    )
    config = {
        "image": image,
        "command": ["/bin/sh", "-c", script],
        "env": [["GREETING", "hello"]],
        "ports": ["80/tcp"],
        "registry_auth": login,
    }
    box = await house.rent({"Docker": config})
    shown = await house.begun(box)
    assert shown["status"] == "Active", shown["failure"]
    (port,) = house.ports(box)
    async with httpx2.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/")).text == "hello\n"
    async with httpx2.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/cgi-bin/end")).status_code == 200
    await house.until(box, status="Inactive")
    said = "The container's command failed: it ended with status 4. Its last words: told to end"
    assert house.column(box, "failure_message") == said
    return box


async def commands_that_fail(house: House, image: str, login: dict[str, Any]) -> None:
    """Over REST, in words that a person can act on."""
    for command, said in (
        (["/bin/nothere"], "The container's command is not in its image."),
        (["/bin/sh", "-c", "echo no model; exit 3"], "it ended at once with status 3. Its last words: no model"),
        (["/bin/sh", "-c", ":"], "The container's command ended at once with status 0: "),
    ):
        failed = await house.rent({"Docker": {"image": image, "command": command, "registry_auth": login}})
        shown = await house.begun(failed)
        assert (shown["status"], shown["failure"]["cause"]) == ("Failed", "DockerCommandFailed"), shown
        assert said in shown["failure"]["user_message"] and shown["failure"]["id"].startswith("f-")
        assert house.column(failed, "ready_at") is None
