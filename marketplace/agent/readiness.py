"""How machines show that they are ready: they phone home with their one-time token, or SSH greets on their port."""

from __future__ import annotations

import asyncio
import hmac
import logging

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from marketplace.agent.keeper import Keeper
from marketplace.agent.records import Record
from marketplace.agent.wire import VmSpec

_log = logging.getLogger(__name__)

GUEST_VIEW_OF_NODE = "10.0.2.2"
"""the address at which a guest behind QEMU's user network reaches this machine's loopback"""


def phone_home_url(port: int, id: str, token: str) -> str:
    """What a guest calls when it is up."""
    return f"http://{GUEST_VIEW_OF_NODE}:{port}/phone_home/{id}/{token}"


def guest_app(keeper: Keeper) -> Starlette:
    """What guests may call: nothing but this, each with its own token."""

    async def phone_home(request: Request) -> Response:
        id, token = request.path_params["id"], request.path_params["token"]
        record = keeper.records.get(id)
        expected = _token(record)
        if not expected or not hmac.compare_digest(token.encode(), expected.encode()):
            return PlainTextResponse("unknown\n", 404)
        if record is not None and record.stage == "Creating":
            return PlainTextResponse("not yet\n", 503)  # its creation is not written down yet; guests try again
        keeper.mark_ready(id, "phone_home")
        return PlainTextResponse("ok\n")

    return Starlette(routes=[Route("/phone_home/{id}/{token}", phone_home, methods=["POST"])])


async def look(keeper: Keeper) -> None:
    """Try once, at all machines that are up and not ready, whether SSH greets."""
    waiting = [record for record in keeper.records.all().values() if _waits(record)]
    await asyncio.gather(*(_look_at(keeper, record) for record in waiting))


def untold(keeper: Keeper) -> list[Record]:
    """Machines that are ready, without the server knowing it."""
    return [
        record for record in keeper.records.all().values() if record.ready_via is not None and not record.ready_told
    ]


def waits(keeper: Keeper) -> bool:
    """Whether anything is not ready yet."""
    return any(_waits(record) for record in keeper.records.all().values())


async def _look_at(keeper: Keeper, record: Record) -> None:
    driver = keeper.driver(record)
    if driver is None or record.spec is None:
        return
    via = await driver.readiness(record.id, record.spec)
    if via is not None:
        keeper.mark_ready(record.id, via)


def _waits(record: Record) -> bool:
    return record.stage == "Created" and record.ready_via is None and isinstance(record.spec, VmSpec)


def _token(record: Record | None) -> str:
    """The token of a machine that may still phone home."""
    if record is None or not isinstance(record.spec, VmSpec) or record.stage not in ("Creating", "Created"):
        return ""
    return record.spec.readiness_token
