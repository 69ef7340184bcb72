"""Replicas on the machines of a Ray cluster. Ray chooses the machine, starts the engine's process there and says when
it has gone; requests and tokens go straight between the gateway and the engine, over a connection of their own.

The gateway's machine is part of the cluster. A replica that is lost, with its process, its actor or its machine, is
started again like one of this machine, wherever Ray then finds room.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from engine.config import EngineConfig
from engine.network import Endpoint, read_address
from engine.sizing import MIB
from engine.tokenizer import Tokenizer
from engine.weights.builtin import BUILTIN_MODELS
from gateway.fleet.offers import Served, sized
from gateway.fleet.remote import EngineHost, Order, Report
from gateway.fleet.replicas import Child, Replica
from gateway.settings import Paths, SettingError, Settings

log = logging.getLogger(__name__)

ON_NODE = "on Ray's node "
"""Begins the line of an engine's log that says where it was started."""
LOOK_S = 0.2
"""How long an actor waits for news of its process before it says that there is none."""
LOST_S = 20.0
"""An actor that has not answered for so long is given up."""
PLACE_S = 10.0
"""Between two complaints that no machine has room."""
CONNECT_S = 5.0
"""For one attempt to connect; who has vanished does not refuse."""
LOST = -9
"""Exit status of a process of which nothing is known but that it has gone."""


def ray() -> Any:
    """The package, which only services that use it have."""
    return importlib.import_module("ray")


class Actor(EngineHost):
    """What runs as a Ray actor: an engine's host, at the address that Ray knows its machine by."""

    def __init__(self, order: Order) -> None:
        """Nothing is started."""
        super().__init__(order, ray().util.get_node_ip_address())

    def start(self) -> Report:
        """Start the engine, and say where that is."""
        report = super().start()
        node = ray().get_runtime_context().get_node_id()
        return report._replace(said=f"{ON_NODE}{node} ({self._host})\n{report.said}")


class RemoteChild:
    """An engine process in an actor. Ray may take its time to find a machine for it."""

    stdin = None

    def __init__(self, actor: Any, log_file: BinaryIO, wants: str) -> None:
        """What the process says is written to `log_file`; `wants` tells what a machine needs to have for it."""
        self.pid = 0
        self.address = ""
        """Where it listens; empty before it is ready."""
        self.lost = ""
        """Why nothing is known of it any more."""
        self._actor = actor
        self._log = log_file
        self._wants = wants

    async def wait(self) -> int:
        """Follow the process to its end, or until its actor is lost."""
        try:
            report = await self._placed()
            self.pid = report.pid
            while report.status is None:
                async with asyncio.timeout(LOST_S):
                    report = await self._actor.look.remote(LOOK_S)
                self._log.write(report.said.encode())
                self.address = report.address
        except TimeoutError:
            self.lost = f"its machine has not answered for {LOST_S:g} s"
            return LOST
        except ray().exceptions.RayError as error:
            self.lost = f"its actor or its machine is lost: {type(error).__name__}"
            log.info("an engine's actor is lost: %s", " ".join(str(error).split()))
            return LOST
        return report.status

    async def _placed(self) -> Report:
        """Wait for a machine, and say so meanwhile."""
        starting = asyncio.ensure_future(_result(self._actor.start.remote()))
        try:
            while not (await asyncio.wait({starting}, timeout=PLACE_S))[0]:
                log.warning("no machine of the Ray cluster has room for an engine with %s yet", self._wants)
            report = starting.result()
        finally:
            starting.cancel()
        self._log.write(report.said.encode())
        return report

    def send_signal(self, signal: int, /) -> None:
        """Have the actor send it; who has gone hears nothing."""
        self._actor.signal.remote(signal)

    async def release(self) -> None:
        """End the actor, and with it the process."""
        await asyncio.to_thread(ray().kill, self._actor)

    def close(self) -> None:
        """Nothing is written any more."""
        self._log.close()


async def _result(reference: Any) -> Report:
    report: Report = await reference
    return report


class RayReplica(Replica):
    """A replica whose engine runs where Ray finds room. `socket_path` names it; no socket appears there."""

    _connect_s = CONNECT_S

    def __init__(self, config: EngineConfig, *, resources: Mapping[str, float], order: Order, **options: Any) -> None:
        """`resources` are Ray's num_cpus and num_gpus; the order's config is replaced by the present one at each start.
        The other options are Replica's."""
        super().__init__(config, **options)
        self._resources = dict(resources)
        self._order = order
        self._child: RemoteChild | None = None

    async def _spawn(self) -> Child:
        output = os.fdopen(self._open_log(), "wb", buffering=0)
        order = self._order._replace(config=msgspec.json.encode(self.config).decode())
        actor = (
            ray()
            .remote(Actor)
            .options(**self._resources, scheduling_strategy="SPREAD", max_restarts=0, max_task_retries=0)
            .remote(order)
        )
        wants = ", ".join(f"{name}={amount:g}" for name, amount in self._resources.items())
        self._child = RemoteChild(actor, output, wants)
        return self._child

    def _listens(self) -> bool:
        child = self._child
        if child is None or not child.address:
            return False
        self.pid = child.pid
        self.client.address = Endpoint(*read_address(child.address), self._order.secret.encode())
        return True

    async def _kill(self, process: Child, exited: asyncio.Task[int]) -> None:
        assert isinstance(process, RemoteChild)
        await process.release()
        await asyncio.wait({exited})
        process.close()

    def _reason(self, status: int) -> str:
        child = self._child
        return child.lost if child is not None and child.lost else super()._reason(status)


class RaySupervisors:
    """Makes the supervisors that the settings describe: processes on the machines of a Ray cluster."""

    def __init__(self, settings: Settings, served: Sequence[Served]) -> None:
        """Connects to the cluster, or starts one here. Raises SettingError."""
        self._settings = settings
        self._numbers = {one.name: number for number, one in enumerate(served)}
        self._paths = Paths(settings.data)
        join(settings.ray)

    def __call__(self, served: Served, index: int, tokenizer: Tokenizer) -> Replica:
        """The supervisor of one replica."""
        settings, number = self._settings, self._numbers[served.name]
        engine = sized(served.offer.engine, settings.memory_mib * MIB)
        on_gpus = engine.device == "cuda" or (engine.device == "auto" and ray().cluster_resources().get("GPU", 0) > 0)
        return RayReplica(
            msgspec.structs.replace(
                engine,
                model=name_anywhere(served),
                served_name=served.name,
                device="cuda" if on_gpus else "cpu",
            ),
            resources=resources_of(engine, on_gpus),
            order=Order(shlex.split(settings.engine_command), "{}", settings.drain_s, secrets.token_hex(32)),
            socket_path=self._paths.engine_socket(index, number),
            log_path=self._paths.engine_log(index, number),
            tokenizer=tokenizer,
            drain_s=settings.drain_s,
        )


def resources_of(engine: EngineConfig, on_gpus: bool) -> dict[str, float]:
    """What Ray reserves for one replica on one machine: its GPUs and a core to drive them, or the cores that it may
    take (one where it takes all)."""
    if on_gpus:
        return {"num_cpus": 1, "num_gpus": engine.tensor_parallel}
    return {"num_cpus": max(1, engine.threads) * engine.tensor_parallel, "num_gpus": 0}


def name_anywhere(served: Served) -> str:
    """What the model is called on any machine: built-in names and hub ids as they are, each machine having its own
    cache; files by their path, which has to be the same everywhere."""
    model = served.offer.engine.model
    is_file = model not in BUILTIN_MODELS and Path(model).expanduser().exists()
    return str(served.source.path) if is_file else model


def join(address: str) -> None:
    """Connect this process to the cluster at `address`, or start one on this machine for "local". Where it is connected
    already, it stays so. Raises SettingError."""
    if importlib.util.find_spec("ray") is None:
        raise SettingError("--ray needs the package ray: pip install 'headrace[scale]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing here calls home unless its operator says so
    if ray().is_initialized():
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        options["include_dashboard"] = False
    try:
        ray().init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SettingError(f"--ray {address}: {' '.join(str(error).split())}") from error
