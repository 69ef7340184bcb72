"""What a newcomer does, from the first form to the last trace of them: over HTTP, against a whole running gateway."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from decimal import Decimal
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pyotp
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from gateway import chores
from gateway.settings import Paths
from marketplace.workers import payments as payment_worker

if TYPE_CHECKING:
    from tests.gateway.inference.conftest import House, MakeHouse

PASSWORD = "correct horse battery"
LIMIT_S = 15.0


class Visitor:
    """Somebody at the management API."""

    def __init__(self, house: House, credential: str = "") -> None:
        self.house = house
        self.credential = credential

    def ask(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """The answer to a request that is granted."""
        status, told = self.try_to(path, body, method)
        assert status == 200, told
        return told

    def try_to(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        """Status and body of whatever is answered."""
        headers = [f"authorization: Bearer {self.credential}"] if self.credential else []
        content = b"" if method == "GET" else json.dumps(body or {}).encode()
        reply = self.house.ask(self.house.headed(*headers, method=method, path=path, body=content))
        return reply.status, json.loads(reply.body, parse_float=Decimal)

    def tool(self, name: str) -> Any:
        """What an MCP tool returns to the official client."""

        async def main() -> Any:
            headers = {"Authorization": f"Bearer {self.credential}"}
            async with httpx2.AsyncClient(headers=headers, timeout=LIMIT_S) as http:
                url = f"http://127.0.0.1:{self.house.port}/mcp"
                async with Client(streamable_http_client(url, http_client=http)) as client:
                    return await client.call_tool(name, {})

        answer = asyncio.run(main())
        assert not answer.is_error, answer
        return answer.structured_content


def admin(house: House) -> Visitor:
    """The first admin, signed in."""
    login = {"email": house.first.admin_email, "password": house.first.admin_password}
    return Visitor(house, Visitor(house).ask("/api/v1/auth/login", login)["token"])


def letter(house: House, subject: str) -> EmailMessage:
    """The one letter with such a subject, once it is there."""
    until, pause = time.monotonic() + LIMIT_S, threading.Event()
    while True:
        folder: Path = Paths(house.settings.data).mail
        letters = [message_from_bytes(path.read_bytes(), policy=policy.default) for path in folder.glob("*.eml")]
        found = [one for one in letters if isinstance(one, EmailMessage) and re.search(subject, str(one["Subject"]))]
        if found:
            assert len(found) == 1
            return found[0]
        assert time.monotonic() < until, f"no letter {subject!r} among {[str(one['Subject']) for one in letters]}"
        pause.wait(0.01)


def text_of(mail: EmailMessage) -> str:
    """What it says to those who read text."""
    part = mail.get_body(("plain",))
    assert part is not None
    text: str = part.get_content()
    return text


def newcomer(house: House, email: str = "ada@example.com") -> Visitor:
    """Somebody who registered, followed the link in the mail, and signed in."""
    visitor = Visitor(house)
    visitor.ask("/api/v1/users/register", {"name": "Ada", "email": email, "password": PASSWORD})
    mail = letter(house, "Confirm your e-mail address")
    assert mail["To"] == email
    found = re.search(r"(http://\S+/verify-email)#token=(\S+)", text_of(mail))
    assert found is not None
    page, token = found.groups()
    assert page == f"{house.gateway._management.public_url}/verify-email"
    status, refused = visitor.try_to("/api/v1/auth/login", {"email": email, "password": PASSWORD})
    assert (status, refused["error"]["code"]) == (403, "EmailNotVerified")
    assert visitor.ask("/api/v1/auth/verify-email", {"token": token}) == {"verified": True}
    status, refused = visitor.try_to("/api/v1/auth/verify-email", {"token": token})
    assert (status, refused["error"]["code"]) == (400, "InvalidEmailToken")
    return Visitor(house, visitor.ask("/api/v1/auth/login", {"email": email, "password": PASSWORD})["token"])


def test_from_registering_to_being_erased(make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chores, "MAIL_S", 0.02)
    house = make_house(clerk=True)
    ada = newcomer(house)
    me = ada.ask("/api/v1/auth/me")
    assert (me["email"], me["role"], me["totp_enabled"]) == ("ada@example.com", "user", False)
    assert ada.ask("/api/v1/account/info")["balance"] == 100, "the signup bonus, once"

    # A second factor: from now on a password is half a login.
    clock = pyotp.TOTP(ada.ask("/api/v1/auth/totp/setup")["secret"])
    assert ada.ask("/api/v1/auth/totp/confirm", {"code": clock.now()}) == {"totp_enabled": True}
    half = Visitor(house).ask("/api/v1/auth/login", {"email": "ada@example.com", "password": PASSWORD})
    assert half.keys() == {"partial_token"}
    later = clock.at(int(time.time()) + clock.interval)  # a code works once; the next one is accepted a step early
    whole = Visitor(house).ask("/api/v1/auth/totp/complete", {"partial_token": half["partial_token"], "code": later})
    ada = Visitor(house, whole["token"])

    # A team, its key, and money for it.
    team = ada.ask("/api/v1/teams/create", {"name": "research"})
    made = ada.ask("/api/v1/api-keys/add", {"name": "ci", "team_id": team["id"]})
    key = made["key"]
    assert key.startswith("hr_t_") and ada.ask("/api/v1/api-keys/list", {"team_id": team["id"]})["api_keys"]
    top_up = {"account": {"ByTeamIds": [team["id"]]}, "amount": 500, "description": "bank transfer 4711"}
    assert ada.try_to("/api/v1/account/transactions/create/external", top_up)[0] == 403
    operator = admin(house)
    operator.ask("/api/v1/account/transactions/create/external", top_up)

    # The key spends it.
    keymap = house.gateway.keys
    house.eventually(lambda: any(one.key_id == made["id"] for one in keymap._keys.values()), "the key is known")
    house.eventually(lambda: house.money(team["account_id"]) > 0, "the money arrives")
    answer = house.client(api_key=key).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "What is the capital of France?"}]
    )
    assert answer.usage is not None
    house.idle()

    # And everybody who is asked says the same of it.
    by_team = {"selector": {"ByTeam": team["id"]}}
    usage, funded = ada.ask("/api/v2/account/transactions/list", by_team)["transactions"]
    used = usage["info"]["ServiceUsage"]
    assert (used["service"], used["model"], used["key_name"], used["requests"]) == ("inference", "tiny", "ci", 1)
    assert used["prompt_tokens"] == answer.usage.prompt_tokens
    assert used["completion_tokens"] == answer.usage.completion_tokens
    assert funded["info"] == {"External": {"description": "bank transfer 4711"}} and funded["amount"] == 500
    caller = Visitor(house, key)
    (record,) = caller.ask("/v1/usage", method="GET")["data"]
    credit = caller.ask("/v1/credits", method="GET")["data"]
    assert record["cost"] * 100 == -usage["amount"] == credit["total_usage"] * 100 > 0
    assert (record["prompt_tokens"], record["key_name"]) == (answer.usage.prompt_tokens, "ci")
    assert caller.ask("/v1/key", method="GET")["data"]["usage"] == record["cost"]
    balance = caller.ask("/api/v1/account/info")["balance"]
    assert balance == 500 + usage["amount"] == credit["balance"] * 100
    assert caller.tool("get_account_info")["balance"] == pytest.approx(float(balance))
    assert ada.ask("/api/v1/account/info")["balance"] == 100, "the team pays, not its founder"

    # The end: rehearsed first, which changes nothing; then really, and nobody of that address is left.
    erase = {"user_id": me["id"], "reason": "asked for it"}
    rehearsed = operator.ask("/api/v1/users/delete", {**erase, "dry_run": True})
    assert rehearsed["dry_run"] is True and rehearsed["report"]["hard_deleted"]["second_factors"] == 1
    assert ada.ask("/api/v1/auth/me")["totp_enabled"] is True
    erased = operator.ask("/api/v1/users/delete", erase)
    assert erased["dry_run"] is False
    counted = ("hard_deleted", "anonymized")
    assert [erased["report"][kind] for kind in counted] == [rehearsed["report"][kind] for kind in counted]
    assert ada.try_to("/api/v1/auth/me")[0] == 401
    assert Visitor(house).try_to("/api/v1/auth/login", {"email": "ada@example.com", "password": PASSWORD})[0] == 401
    assert operator.ask("/api/v1/users/search", {"query": "ada@"})["results"] == []
    house.eventually(lambda: not any(one.key_id == made["id"] for one in keymap._keys.values()), "the key is forgotten")
    assert caller.try_to("/v1/credits", method="GET")[0] == 401
    kept = operator.ask("/api/v1/account/transactions/list", by_team)["transactions"]
    spent = next(one for one in kept if one["id"] == usage["id"])
    named = usage["info"]["ServiceUsage"]
    assert spent["info"]["ServiceUsage"].pop("key_name") == made["id"] and named.pop("key_name") == "ci"
    assert spent == usage and funded in kept, "what was charged stays charged; what its key was called is forgotten"


def test_a_running_gateway_tells_of_low_balances_and_ends_what_nobody_pays(
    make_house: MakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAIL_S", "FUNDS_S", "PAYMENTS_S"):
        monkeypatch.setattr(chores, name, 0.02)
    monkeypatch.setattr(payment_worker, "PAUSE_US", 0)
    house = make_house(clerk=True)
    operator = admin(house)
    mine = {"account": {"ByUserIds": [operator.ask("/api/v1/auth/me")["id"]]}}

    def seen() -> bool:
        return house.rows("SELECT count(*) FROM low_balance WHERE armed")[0][0] == 1

    house.eventually(seen, "the watch has seen the account")
    operator.ask("/api/v1/account/transactions/create/external", {**mine, "amount": -600})
    mail = letter(house, "low balance")
    assert mail["To"] == house.first.admin_email and "4 USD can still be spent" in " ".join(text_of(mail).split())

    paid = operator.ask("/api/v2/payment_intent/create", {"amount_cents": 1000})
    assert paid["status"] == "pending"
    operator.ask("/api/v1/app-settings/update", {"settings": {"payment_lifetime": 0}})

    def canceled() -> bool:
        return house.rows("SELECT state FROM payment") == [("canceled",)]

    house.eventually(canceled, "the payment that nobody made has ended")
    assert operator.ask("/api/v1/account/info")["pending"] == 0
