"""From the models on offer to what serves them: supervisors of engine processes, deployments, the catalogue."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.sizing import MIB
from engine.tokenizer import Tokenizer
from gateway.admission.capacity import Capacity
from gateway.fleet.catalogue import Model
from gateway.fleet.deployment import Deployment
from gateway.fleet.leases import Terms
from gateway.fleet.offers import Served, needs_of, sized
from gateway.fleet.pool import Pool
from gateway.fleet.recommended import NONE, recommended_sampling
from gateway.fleet.replicas import ENGINE_COMMAND, Replica
from gateway.settings import Paths, SettingError, Settings

MakeReplica = Callable[[Served, int, Tokenizer], Replica]
"""The supervisor of a model's replica of this number."""


def supervisors(settings: Settings, served: Sequence[Served], terms: Terms) -> MakeReplica:
    """Who makes the supervisors that the settings describe, on this machine or through Ray. Raises SettingError."""
    if not settings.ray:
        return Supervisors(settings, served, terms)
    from gateway.fleet.ray import RaySupervisors  # only who asks for it has to have it

    return RaySupervisors(settings, served)


def deploy(settings: Settings, served: Sequence[Served], make: MakeReplica) -> list[tuple[Deployment, Model]]:
    """What serves each model, and how it is offered. Nothing is started. Raises WeightsError when a tokenizer cannot be
    read."""
    budget = settings.memory_mib * MIB
    made: list[tuple[Deployment, Model]] = []
    for one in served:
        tokenizer = Tokenizer.load(one.source)
        engine, count = one.offer.engine, one.offer.replicas
        pool = Pool(
            [make(one, index, tokenizer) for index in range(count)],
            places=engine.max_running,
            page_size=engine.page_size,
            routing=settings.routing,
        )
        deployment = Deployment(
            one.name, pool, needs_of(one, budget), one.offer.manners, clock=time.monotonic, on_device=on_device(engine)
        )
        capacity = Capacity(one.name, engine.max_running * count, engine.max_queued * count)
        recommended = recommended_sampling(one.source) if settings.sampling_defaults == "model" else NONE
        made.append((deployment, Model(one.name, deployment, tokenizer, capacity, recommended=recommended)))
    return made


class Supervisors:
    """Makes the supervisors that the settings describe: processes on this machine."""

    def __init__(self, settings: Settings, served: Sequence[Served], terms: Terms) -> None:
        """`terms` say who gives the engines their GPUs."""
        self._settings = settings
        self._numbers = {one.name: number for number, one in enumerate(served)}
        self._terms = terms
        self._paths = Paths(settings.data)
        self._devices = iter(gpus_here())
        self._budget = settings.memory_mib * MIB

    def __call__(self, served: Served, index: int, tokenizer: Tokenizer) -> Replica:
        """The supervisor of one replica. SettingError where there is no GPU for it."""
        settings, number = self._settings, self._numbers[served.name]
        engine = sized(shared(served.offer.engine, served.offer.replicas), self._budget)
        device = "cuda" if settings.lease_socket else engine.device
        environment: dict[str, str] = {}
        if served.offer.replicas > 1 and on_device(engine) and not settings.lease_socket:
            gpus = list(islice(self._devices, engine.tensor_parallel))
            if len(gpus) < engine.tensor_parallel:
                raise SettingError(f"--replicas: there is no GPU for replica {index + 1} of {served.name}")
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return Replica(
            msgspec.structs.replace(engine, model=str(served.source.path), served_name=served.name, device=device),
            socket_path=self._paths.engine_socket(index, number),
            log_path=self._paths.engine_log(index, number),
            tokenizer=tokenizer,
            command=shlex.split(settings.engine_command) or ENGINE_COMMAND,
            drain_s=settings.drain_s,
            terms=self._terms,
            environment=environment,
        )


def shared(engine: EngineConfig, replicas: int) -> EngineConfig:
    """The settings of one replica among several on this machine: its share of the cores, where it may take all."""
    if replicas == 1 or engine.threads or on_device(engine):
        return engine
    return msgspec.structs.replace(engine, threads=max(1, len(os.sched_getaffinity(0)) // replicas))


def on_device(engine: EngineConfig) -> bool:
    """Whether the engine runs on a GPU, without asking a library of one: the gateway loads none."""
    return engine.device == "cuda" or (engine.device == "auto" and bool(gpus_here()))


def gpus_here() -> list[str]:
    """The GPUs that engines may use: those that the environment names, or all of the machine's."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    found = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*")]
    return sorted((name for name in found if name.isdigit()), key=int)
