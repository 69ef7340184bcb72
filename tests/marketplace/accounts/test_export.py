"""Transactions as CSV: what the list says, in pages that nobody sees."""

from __future__ import annotations

import asyncio
import csv
import io
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from marketplace.accounts import export
from marketplace.http.app import write
from marketplace.http.dispatch import Incoming

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office, Shop

NAME = "account.transactions_export"


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.fixture
def busy(office: Office, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> tuple[Office, Caller]:
    """Somebody with usage, payments and a key that is called like a formula; pages are small."""
    monkeypatch.setattr(export, "PAGE", 3)
    ada = office.person(balance=10**10)
    office.ask("keys.update", {"id": ada.key_id, "name": "=cmd()"}, ada)
    shop.now = office.now
    for number in range(5):
        hold = shop.hold(ada.account_id, 10**6)
        fields = {name: getattr(hold, name) for name in hold.__struct_fields__}
        shop.apply(type(hold)(**{**fields, "key_id": ada.key_id}), shop.settle(hold.request_id, 10 + number, 2, 3))
        shop.top_up(ada.account_id, 1 + number)
    office.now = shop.now
    return office, ada


def test_it_says_what_the_list_says(busy: tuple[Office, Caller]) -> None:
    office, ada = busy
    listed = office.ask("account.transactions_list_v2", {"limit": 1000}, ada).body["transactions"]
    answer = office.ask(NAME, {}, ada)
    assert answer.status == 200 and answer.headers["Content-Type"] == "text/csv; charset=utf-8"
    assert answer.headers["Content-Disposition"] == 'attachment; filename="transactions.csv"'
    found = rows(answer.body)
    assert [row["id"] for row in found] == [line["id"] for line in listed] and len(found) == 11
    assert [Decimal(row["amount_cents"]) for row in found] == [Decimal(line["amount"]) for line in listed]
    assert [row["created_at"] for row in found] == [line["created_at"] for line in listed]
    assert [row["kind"] for row in found] == [next(iter(line["info"])) for line in listed]
    used = [row for row in found if row["kind"] == "ServiceUsage"]
    assert {row["key_name"] for row in used} == {"'=cmd()"} and {row["model"] for row in used} == {"tiny"}
    assert sum(int(row["prompt_tokens"]) for row in used) == 60


def test_a_range_and_whose_it_is(busy: tuple[Office, Caller]) -> None:
    office, ada = busy
    whole = rows(office.ask(NAME, {}, ada).body)
    some = office.ask(NAME, {"from": whole[6]["created_at"], "to": whole[2]["created_at"]}, ada)
    assert rows(some.body) == whole[3:7]
    assert rows(office.ask(NAME, {}, office.person()).body) == []
    stranger = office.ask(NAME, {"selector": {"ByTeam": "t"}}, office.person())
    assert (stranger.status, stranger.code) == (403, "NotTeamMember")
    backwards = office.ask(NAME, {"from": "2026-02-01T00:00:00Z", "to": "2026-01-01T00:00:00Z"}, ada)
    assert (backwards.status, backwards.param) == (400, "to")


def test_it_is_sent_a_page_at_a_time(busy: tuple[Office, Caller]) -> None:
    office, ada = busy
    answer = office.desk.serve(office.OPERATIONS[NAME], Incoming(headers={"x-api-key": ada.key}))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(write(send, answer))
    assert b"content-length" not in dict(sent[0]["headers"])
    parts = [message["body"] for message in sent[1:]]
    assert (
        len(parts) == 5
        and parts[-1] == b""
        and [message.get("more_body", False) for message in sent[1:]] == ([True] * 4 + [False])
    )
    assert rows(b"".join(parts).decode()) == rows(office.ask(NAME, {}, ada).body)
