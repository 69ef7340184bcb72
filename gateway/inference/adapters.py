"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, under the names that vLLM gave them: adapters come and go
while the service runs. For keys of admins.

An adapter is offered under its own name as a model, at a price of that name or else at its base's. It is kept in the
settings of its engines, so that one that starts again has it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
import orjson

from engine.generation import EngineError
from engine.lora_names import named
from gateway.admission.keymap import KeyState
from gateway.fleet.budget import Rest
from gateway.fleet.catalogue import Catalogue, Model
from gateway.fleet.deployment import Deployment
from gateway.fleet.replicas import Replica
from gateway.inference import errors
from gateway.inference.audit import record
from gateway.inference.decode import FieldPolicy, decode
from gateway.inference.errors import ApiError
from gateway.inference.http import Exchange
from gateway.inference.pipeline import Services, authenticate, name_ignored, visit_to
from gateway.settings import SettingError
from marketplace.store.db import Database
from marketplace.users import service as users

T = TypeVar("T", bound=msgspec.Struct)
_POLICY = FieldPolicy(denied={}, inert={})
BODY_BYTES = 65_536


class LoadAsk(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What is to be loaded."""

    lora_name: str
    lora_path: str
    """A folder that the engine can read"""
    base_model: str = ""
    """Which model it is of; not needed where there is one"""


class UnloadAsk(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What is to be unloaded."""

    lora_name: str


def offer(catalogue: Catalogue, base: Model, settings: Sequence[str]) -> None:
    """Offer the adapters that a model's engines load at their start. Raises SettingError."""
    try:
        for name in named(settings):
            catalogue.add(base.adapted(name))
    except ValueError as error:
        raise SettingError(f"--lora: {error}") from error


async def load(services: Services, fleet: Iterable[Deployment], database: Database, exchange: Exchange) -> None:
    """Load an adapter into every engine of its base, or into none. Raises ApiError."""
    key, ask = await _read(services, database, exchange, LoadAsk)
    base = _base(services.catalogue, ask.base_model)
    if not key.may_use(base.name):
        raise errors.model_not_found(base.name)
    name = ask.lora_name
    if not name or "=" in name or len(name) > 200 or not name.isprintable():
        raise errors.invalid(
            "lora_name", "lora_name must have 1 to 200 characters that can be shown, none of them '='."
        )
    if not ask.lora_path:
        raise errors.invalid("lora_path", "lora_path must name a folder.")
    if services.catalogue.find(ask.lora_name) is not None:
        raise errors.invalid("lora_name", f"A model '{ask.lora_name}' is on offer already.")
    visit = await visit_to(base)
    try:
        replicas = _deployment(fleet, base).pool.replicas
        await _load_all(replicas, ask)
        if services.catalogue.find(ask.lora_name) is not None:  # by now: of another base
            await _forget(replicas, ask.lora_name)
            raise errors.invalid("lora_name", f"A model '{ask.lora_name}' is on offer already.")
    finally:
        visit.leave()
    for replica in replicas:
        replica.config = msgspec.structs.replace(
            replica.config, lora=(*replica.config.lora, f"{ask.lora_name}={ask.lora_path}")
        )
    services.catalogue.add(base.adapted(ask.lora_name))
    services.catalogue.take_prices(await asyncio.to_thread(services.catalogue.read_prices, database))
    detail = {"base_model": base.name, "lora_path": ask.lora_path}
    await record(database, exchange, key, "models.load_adapter", ask.lora_name, **detail)
    await exchange.json(200, orjson.dumps({"object": "lora_adapter", "id": ask.lora_name, "base_model": base.name}))


async def unload(services: Services, fleet: Iterable[Deployment], database: Database, exchange: Exchange) -> None:
    """Offer an adapter no more, and unload it; requests that use it go on. Raises ApiError."""
    key, ask = await _read(services, database, exchange, UnloadAsk)
    model = services.catalogue.find(ask.lora_name)
    if model is None or not model.adapter or not key.may_use(model.base):
        raise ApiError(404, f"There is no adapter '{ask.lora_name}'.", code="model_not_found", param="lora_name")
    # A model that is away is not loaded for this: what it could not be loaded with may be this very adapter.
    deployment = _deployment(fleet, model)
    visit = None if deployment.rest is Rest.AWAY and not deployment.moving else await visit_to(model)
    failure: EngineError | None = None
    try:
        services.catalogue.remove(model.name)
        for replica in deployment.pool.replicas:
            kept = tuple(one for one in replica.config.lora if not one.startswith(f"{model.name}="))
            replica.config = msgspec.structs.replace(replica.config, lora=kept)
            try:
                if replica.client.connected:
                    await replica.client.adapter(model.name)
            except EngineError as error:  # the others forget it all the same
                failure = error
    finally:
        if visit is not None:
            visit.leave()
    await record(database, exchange, key, "models.unload_adapter", model.name)
    if failure is not None:
        raise errors.unavailable(
            f"An engine did not unload it: {failure.message}. It is not offered any more."
        ) from failure
    await exchange.json(200, orjson.dumps({"object": "lora_adapter", "id": model.name, "deleted": True}))


async def _read(services: Services, database: Database, exchange: Exchange, kind: type[T]) -> tuple[KeyState, T]:
    """An admin's key and the body of their request. Raises ApiError."""
    key = await authenticate(services, exchange)
    if not await asyncio.to_thread(_of_admin, database, key):
        raise ApiError(403, "Only keys of admins may load and unload adapters.", code="permission_denied")
    ask, ignored = decode(await exchange.body(BODY_BYTES, services.limits.body_timeout_s), kind, _POLICY)
    name_ignored(exchange, ignored)
    return key, ask


def _of_admin(database: Database, key: KeyState) -> bool:
    if key.kind != "user":
        return False
    with database.read() as unit:
        user = users.find(unit, key.owner_id)
    return user is not None and user.role == "admin"


def _base(catalogue: Catalogue, name: str) -> Model:
    bases = [model for model in catalogue if not model.adapter]
    if not name and len(bases) > 1:
        raise errors.missing("base_model")
    for model in bases:
        if model.name == name or not name:
            return model
    raise errors.model_not_found(name)


def _deployment(fleet: Iterable[Deployment], model: Model) -> Deployment:
    return next(deployment for deployment in fleet if deployment.name == model.base)


async def _load_all(replicas: Sequence[Replica], ask: LoadAsk) -> None:
    """Raises ApiError; then none has it."""
    done: list[Replica] = []
    try:
        for replica in replicas:
            await replica.client.adapter(ask.lora_name, ask.lora_path)
            done.append(replica)
    except EngineError as error:
        await _forget(done, ask.lora_name)
        if error.code == "invalid":
            raise errors.invalid("lora_path", f"The adapter is not loaded: {error.message}.") from error
        raise errors.unavailable("An engine of the model does not answer. Please retry shortly.") from error


async def _forget(replicas: Iterable[Replica], name: str) -> None:
    """Undo a load. An engine that goes meanwhile forgets it anyway."""
    for replica in replicas:
        with contextlib.suppress(EngineError):
            await replica.client.adapter(name)
