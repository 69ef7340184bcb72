"""`POST /v1/load_model`, `/v1/sleep_model` and `/v1/unload_model`: an admin moves a model; `GET /v1/model_states` shows
where each one is. For keys of admins.

A model finishes its requests before it sleeps or goes, and a request for it brings it back: nothing is dropped.
"""

from __future__ import annotations

import asyncio

import msgspec
import orjson

from engine.generation import EngineError
from gateway.admission.keymap import KeyState
from gateway.fleet.budget import mib
from gateway.fleet.deployment import Deployment, NotNowError
from gateway.fleet.fleet import BusyError, Fleet
from gateway.inference import errors
from gateway.inference.audit import record
from gateway.inference.decode import FieldPolicy, decode
from gateway.inference.errors import ApiError
from gateway.inference.http import Exchange
from gateway.inference.pipeline import Services, authenticate, name_ignored
from marketplace.store.db import Database
from marketplace.users import service as users

_POLICY = FieldPolicy(denied={}, inert={})
BODY_BYTES = 4096


class MoveAsk(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which model is to move."""

    model: str


async def load(services: Services, fleet: Fleet, database: Database, exchange: Exchange) -> None:
    """Have a model awake; others that nobody uses make room. Raises ApiError."""
    key, deployment = await _asked(services, fleet, database, exchange)
    try:
        await fleet.load(deployment)
    except NotNowError as error:
        reason = f" ({deployment.last_error})" if deployment.last_error else ""
        raise errors.unavailable(error.message + reason, error.retry_after_s) from error
    await record(database, exchange, key, "models.load", deployment.name)
    await exchange.json(200, orjson.dumps(_state(deployment)))


async def sleep(services: Services, fleet: Fleet, database: Database, exchange: Exchange) -> None:
    """Have a model give back what memory it can, once its requests have ended. Raises ApiError."""
    key, deployment = await _asked(services, fleet, database, exchange)
    try:
        await fleet.sleep(deployment)
    except BusyError as error:
        raise _busy(error) from error
    except EngineError as error:
        raise errors.unavailable(f"The engine of '{deployment.name}' does not sleep: {error.message}") from error
    await record(database, exchange, key, "models.sleep", deployment.name)
    await exchange.json(200, orjson.dumps(_state(deployment)))


async def unload(services: Services, fleet: Fleet, database: Database, exchange: Exchange) -> None:
    """End a model's engines, once its requests have ended. Raises ApiError."""
    key, deployment = await _asked(services, fleet, database, exchange)
    try:
        await fleet.unload(deployment)
    except BusyError as error:
        raise _busy(error) from error
    await record(database, exchange, key, "models.unload", deployment.name)
    await exchange.json(200, orjson.dumps(_state(deployment)))


async def states(services: Services, fleet: Fleet, database: Database, exchange: Exchange) -> None:
    """Where every model is. Raises ApiError."""
    key = await _authenticate_admin(services, database, exchange)
    shown = [_state(deployment) for deployment in fleet if key.may_use(deployment.name)]
    body = {"object": "list", "data": shown, "memory_budget": _budget(fleet)}
    await exchange.json(200, orjson.dumps(body))


async def _asked(
    services: Services, fleet: Fleet, database: Database, exchange: Exchange
) -> tuple[KeyState, Deployment]:
    """An admin's key, and the model that they name. Raises ApiError."""
    key = await _authenticate_admin(services, database, exchange)
    ask, ignored = decode(await exchange.body(BODY_BYTES, services.limits.body_timeout_s), MoveAsk, _POLICY)
    name_ignored(exchange, ignored)
    deployment = fleet.find(ask.model)
    if deployment is None or not key.may_use(ask.model):
        raise errors.model_not_found(ask.model)
    return key, deployment


async def _authenticate_admin(services: Services, database: Database, exchange: Exchange) -> KeyState:
    key = await authenticate(services, exchange)

    def is_admin() -> bool:
        with database.read() as unit:
            user = users.find(unit, key.owner_id)
        return user is not None and user.role == "admin"

    if key.kind != "user" or not await asyncio.to_thread(is_admin):
        raise ApiError(403, "Only keys of admins may move models.", code="permission_denied")
    return key


def _busy(error: BusyError) -> ApiError:
    return ApiError(409, f"The model stays as it is: {error}.", code="model_in_use", headers=errors.retry_after(5.0))


def _budget(fleet: Fleet) -> str | None:
    return mib(fleet.budget) if fleet.budget else None


def _state(deployment: Deployment) -> dict[str, object]:
    holding = deployment.holding
    return {
        "object": "model_state",
        "id": deployment.name,
        "state": deployment.moving or deployment.rest.value,
        "requests": deployment.visits,
        "replicas": len(deployment.pool.replicas),
        "ready_replicas": deployment.pool.ready_replicas,
        "memory": mib(holding.bytes(deployment.rest)),
        "woke_in_s": deployment.woke_in_s,
        "last_error": deployment.last_error or deployment.pool.last_error,
    }
