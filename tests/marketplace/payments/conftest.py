"""Stripe on this machine, and the management API at a port where its messages arrive."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from starlette.routing import Router

from marketplace.http import app
from marketplace.http.dispatch import Desk
from marketplace.operations import TABLE
from marketplace.payments.stripe_provider import StripeProvider
from tests.marketplace.office import Office
from tests.marketplace.payments.at_stripe import SECRET

KEY = "sk_test_12345"


class LocalStripe:
    """A server that answers as Stripe does; it can be switched off and on again, and forgets everything by that."""

    def __init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[str] | None = None
        self.http = httpx2.Client(timeout=20, headers={"Authorization": f"Bearer {KEY}"})
        self.start()

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        script = Path(__file__).with_name("localstripe_server.py")
        argv = [sys.executable, str(script), *([str(self.port)] if self.port else [])]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def stop(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait(20)
        self._process.stdout.close()

    def close(self) -> None:
        self.stop()
        self.http.close()

    def provider(self) -> StripeProvider:
        return StripeProvider(KEY, SECRET, api_base=self.base, retries=0)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self.http.request(method, f"{self.base}{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else None

    def pay(self, reference: str) -> None:
        """What the payer does in their browser."""
        self.ask("POST", f"/v1/payment_intents/{reference}", {"payment_method": "pm_card_visa"})
        assert self.ask("POST", f"/v1/payment_intents/{reference}/confirm")["status"] == "succeeded"

    def event(self, reference: str) -> dict[str, Any]:
        """The message that a payment was made."""
        listed = self.ask("GET", "/v1/events?type=payment_intent.succeeded&limit=100")["data"]
        return next(item for item in listed if item["data"]["object"]["id"] == reference)


@pytest.fixture(scope="module")
def local_stripe() -> Iterator[LocalStripe]:
    """Stripe, for a whole module; whoever stops it starts it again."""
    made = LocalStripe()
    yield made
    made.close()


@pytest.fixture
def shop_front(office: Office, local_stripe: LocalStripe) -> Office:
    """An office, at the real time, whose payments go through that Stripe."""
    office.now = time.time_ns() // 1000
    office.context = dataclasses.replace(office.context, payments=local_stripe.provider())
    office.desk = Desk(office.context)
    return office


@pytest.fixture
def address(shop_front: Office) -> Iterator[str]:
    """Where the office can be reached over HTTP."""
    answers = app.routes(TABLE, shop_front.context, lambda path, status: None)
    config = uvicorn.Config(Router(answers), lifespan="off", ws="none", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()
