"""Whoever asks for instances may wait for news of them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from starlette.routing import Router

from marketplace.http import app
from marketplace.operations import TABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.marketplace.conftest import Caller, Office
    from tests.marketplace.rack import Rack

LIST = [operation for operation in TABLE if operation.name == "instances.list"]


async def ask(office: Office, who: Caller, body: dict[str, Any], meanwhile: Callable[[int], None]) -> Any:
    """Ask for instances, with something happening between two looks; `meanwhile` is told how often it was looked."""
    router, sent, looks = Router(app.routes(LIST, office.context)), [], [0]

    async def sleep(_: float) -> None:
        looks[0] += 1
        await asyncio.get_running_loop().run_in_executor(None, meanwhile, looks[0])

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": LIST[0].path,
        "headers": [(b"x-api-key", who.key.encode())],
        "client": ("198.51.100.1", 5),
        "query_string": b"",
        "root_path": "",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app.asyncio, "sleep", sleep)
        await router(scope, receive, send)
    assert sent[0]["status"] == 200
    return json.loads(sent[1]["body"]), looks[0]


def test_the_answer_comes_with_the_news(rack: Rack, ada: Caller, office: Office) -> None:
    node = rack.node()
    machine = rack.rented(ada)
    node.run(machine)
    office.wait(60)

    def ready(look: int) -> None:
        if look == 2:
            node.ready(machine)

    body = {"selector": {"ById": [machine]}, "wait_s": 20}
    answer, looks = asyncio.run(ask(office, ada, body, ready))
    assert answer["instances"][0]["status"] == "Active" and looks == 2

    never = asyncio.run(ask(office, ada, {**body, "wait_s": 0}, ready))
    assert never[1] == 0, "who does not wait is answered at once"


def test_who_waits_in_vain_is_answered_when_the_time_is_over_or_too_much_was_asked(
    rack: Rack, ada: Caller, office: Office
) -> None:
    rack.node()
    machine = rack.rented(ada)
    office.wait(60)
    body = {"selector": {"ById": [machine]}, "wait_s": 20}
    # A look per moment of a clock that stands still: in the end more than anybody may ask.
    answer, looks = asyncio.run(ask(office, ada, body, lambda _: None))
    assert answer["instances"][0]["status"] == "Initializing" and looks > 10
