"""The directory's pages: each from one index, whoever spent how much, and nobody twice while others come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from marketplace.users import directory
from marketplace.users.directory import Selection
from tests.marketplace.plans import explain

if TYPE_CHECKING:
    from sqlalchemy import Select

    from tests.marketplace.office import Caller, Office
    from tests.marketplace.shop import Shop

CENT = 10**7


def spend(shop: Shop, who: Caller, cents: int) -> None:
    """Settle one request that costs so much."""
    price = shop.price(cents * CENT * 1_000_000, 0, 0)
    hold = shop.hold(who.account_id, cents * CENT, price_id=price)
    shop.apply(hold, shop.settle(hold.request_id, 1, 0, 0))


def listed(office: Office, admin: Caller, selector: Any, limit: int = 2) -> tuple[list[str], int]:
    """Everybody on all pages of a list, and how many it says they are."""
    found: list[str] = []
    body: dict[str, Any] = {"selector": selector, "limit": limit}
    for _ in range(50):
        answer = office.ask("users.list", body, admin)
        assert answer.status == 200, answer.body
        found += [person["id"] for person in answer.body["users"]]
        if answer.body["next_cursor"] is None:
            return found, answer.body["total"]
        body["cursor"] = answer.body["next_cursor"]
    raise AssertionError("the pages do not end")


def test_whoever_spent_so_much_is_listed_and_counted_without_the_erased(office: Office, shop: Shop) -> None:
    admin = office.person("admin")
    people = [office.person(balance=10**12) for _ in range(6)]
    shop.now = office.now
    for number, who in enumerate(people):
        if number:
            spend(shop, who, 10 * number)
    office.now = shop.now
    assert listed(office, admin, {"ByMinSpend": 20}) == ([who.id for who in reversed(people[2:])], 4)
    assert listed(office, admin, {"ByMinSpend": 51}) == ([], 0)
    assert listed(office, admin, {"ByMinSpend": 0}) == ([*(who.id for who in reversed(people)), admin.id], 7)
    for gone in (people[0], people[3]):
        assert office.ask("users.delete", {"user_id": gone.id, "reason": "asked for it"}, admin).status == 200
    left = [people[number].id for number in (5, 4, 2)]
    assert listed(office, admin, {"ByMinSpend": 20}) == (left, 3)
    assert listed(office, admin, {"ByMinSpend": 0})[1] == 5


def test_nobody_is_listed_twice_or_left_out_while_people_come(office: Office) -> None:
    admin = office.person("admin")
    there = [admin.id, *(office.person().id for _ in range(7))]
    found: list[str] = []
    body: dict[str, Any] = {"limit": 3}
    while True:
        answer = office.ask("users.list", body, admin)
        found += [person["id"] for person in answer.body["users"]]
        office.person()
        if answer.body["next_cursor"] is None:
            break
        body["cursor"] = answer.body["next_cursor"]
    assert found == there[::-1]


@pytest.mark.parametrize("cursor", [None, "WzUsInUiXQ"])
def test_pages_of_people_are_read_from_an_index(office: Office, cursor: str | None) -> None:
    everybody = explain(office.database, directory.page_query(Selection(), cursor, 100))
    spenders = explain(office.database, directory.page_query(Selection(min_spend=5), cursor, 100))
    if office.database.dialect == "postgresql":
        assert "Index Scan Backward using ix_users_living" in everybody and "Sort" not in everybody, everybody
        assert "Scan Backward using ix_account_spent" in spenders and "Sort" not in spenders, spenders
        return
    begin = "" if cursor is None else " ((created_at,id)<(?,?))"
    assert f"users USING INDEX ix_users_living{begin}" in everybody and "TEMP B-TREE" not in everybody, everybody
    assert "SEARCH account USING COVERING INDEX ix_account_spent" in spenders and "TEMP B-TREE" not in spenders
    assert ("(created_at,owner_id)<(?,?)" in spenders) == (cursor is not None), spenders
    assert "SEARCH users USING INDEX sqlite_autoindex_users" in spenders, spenders


def test_a_search_reads_the_index_in_the_order_of_its_answer(office: Office) -> None:
    query: Select[*tuple[Any, ...]] = directory.search_query(office.database.dialect, "ada", 20, None)
    told = explain(office.database, query)
    assert "ix_users_living" in told and "Sort" not in told and "TEMP B-TREE" not in told, told
