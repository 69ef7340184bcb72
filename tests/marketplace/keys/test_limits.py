"""Budgets and rates of keys through the API, and the keys of nodes and services."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from marketplace.keys import service as keys
from marketplace.keys.service import BudgetError, KeySettings
from marketplace.providers import service as providers

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office, Shop

LIMITS = {"budget": 12.5, "budget_period": "week", "tokens_per_minute": 9000, "requests_per_minute": 5}


def shown(key: dict[str, Any]) -> dict[str, Any]:
    return {name: key[name] for name in LIMITS}


def test_limits_are_set_shown_changed_and_kept_by_a_rotation(office: Office) -> None:
    ada = office.person()
    made = office.ask("keys.add", {"name": "ci", **LIMITS}, ada).body
    assert shown(made) == LIMITS and (made["kind"], made["owner_id"], made["service"]) == ("user", ada.id, None)
    assert shown(office.ask("keys.list", {}, ada).body["api_keys"][0]) == LIMITS
    raised = office.ask("keys.update", {"id": made["id"], "budget": 20, "budget_period": None}, ada).body
    assert (raised["budget"], raised["budget_period"], raised["tokens_per_minute"]) == (20, "week", 9000)
    monthly = office.ask("keys.update", {"id": made["id"], "budget_period": "month"}, ada).body
    assert (monthly["budget"], monthly["budget_period"]) == (20, "month")
    turned = office.ask("keys.rotate", {"id": made["id"]}, ada).body
    assert shown(turned) == {**LIMITS, "budget": 20, "budget_period": "month"}
    with office.database.read() as unit:
        old, new = keys.find_by_id(unit, made["id"]), keys.find_by_id(unit, turned["id"])
    assert new.spender == old.spender == old.id
    freed = office.ask("keys.update", {"id": turned["id"], "budget": None, "tokens_per_minute": None}, ada).body
    assert (freed["budget"], freed["budget_period"], freed["tokens_per_minute"]) == (None, None, None)
    assert freed["requests_per_minute"] == 5


def test_a_budget_without_a_period_is_for_all_time_and_a_period_alone_says_nothing(office: Office) -> None:
    ada = office.person()
    made = office.ask("keys.add", {"name": "a", "budget": 1}, ada).body
    assert (made["budget"], made["budget_period"]) == (1, "total")
    made = office.ask("keys.add", {"name": "b", "budget_period": "day"}, ada).body
    assert (made["budget"], made["budget_period"]) == (None, None)
    same = office.ask("keys.update", {"id": made["id"], "budget_period": "day"}, ada).body
    assert (same["budget"], same["budget_period"]) == (None, None)
    set_now = office.ask("keys.update", {"id": made["id"], "budget": 3}, ada).body
    assert (set_now["budget"], set_now["budget_period"]) == (3, "total")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("budget", 0),
        ("budget", -1),
        ("budget", "1"),
        ("budget", 0.00000001),
        ("budget_period", "year"),
        ("tokens_per_minute", 0),
        ("allowed_models", ["a*b"]),
        ("kind", "robot"),
        ("service", "mail"),
        ("provider", "acme"),
    ],
)
def test_wrong_limits_are_named(sqlite_office: Office, field: str, value: object) -> None:
    sqlite_office.wait(60)
    ada = sqlite_office.person()
    answer = sqlite_office.ask("keys.add", {"name": "n", field: value}, ada)
    assert (answer.status, answer.code) == (400, "ValidationFailed")
    assert answer.param is not None and answer.param.split(".")[0] == field
    if field not in ("kind", "service", "provider"):
        changed = sqlite_office.ask("keys.update", {"id": ada.key_id, field: value}, ada)
        assert (changed.status, changed.code) == (400, "ValidationFailed")


def test_a_model_may_be_named_by_how_it_begins(office: Office) -> None:
    made = office.ask("keys.add", {"name": "n", "allowed_models": ["llama-*", "tiny"]}, office.person()).body
    assert made["allowed_models"] == ["llama-*", "tiny"]


def test_a_key_with_limits_cannot_lift_them(office: Office) -> None:
    ada = office.person()
    bound = office.ask("keys.add", {"name": "ci", "budget": 1}, ada).body
    for name, body in (
        ("keys.add", {"name": "free"}),
        ("keys.update", {"id": bound["id"], "budget": None}),
        ("keys.update", {"id": ada.key_id, "active": False}),
        ("keys.delete", {"id": ada.key_id}),
        ("keys.rotate", {"id": ada.key_id}),
    ):
        answer = office.ask(name, body, bound["key"])
        assert (answer.status, answer.code) == (403, "CredentialsNotPermitted"), name
    turned = office.ask("keys.rotate", {"id": bound["id"]}, bound["key"]).body
    assert turned["budget"] == 1
    assert office.ask("keys.update", {"id": bound["id"], "budget": None}, office.login(ada)).status == 200


def test_impossible_budgets_are_refused_underneath_too(shop: Shop) -> None:
    account_id = shop.customer()
    with shop.database.write() as unit:
        row, _ = keys.create(
            unit,
            kind="user",
            owner_id="u",
            account_id=account_id,
            name="n",
            pepper=b"p" * 32,
            now=1,
            random=shop.random,
        )
        for budget in (0, -5, 2**63):
            with pytest.raises(BudgetError):
                keys.change(unit, row.id, KeySettings(budget=budget))


@pytest.fixture
def acme(office: Office) -> tuple[Caller, Caller, str]:
    """Somebody of the provider acme, somebody of another provider, and acme's id."""
    found = []
    for name in ("acme", "other"):
        person = office.person("provider")
        with office.database.write() as unit:
            made = providers.create(unit, name=name, now=office.clock(), random=office.random)
            providers.add_member(unit, made.id, person.id, is_root=True, now=office.clock())
        found.append((person, made.id))
    return found[0][0], found[1][0], found[0][1]


def test_keys_of_nodes_are_the_provider_s(office: Office, acme: tuple[Caller, Caller, str]) -> None:
    mine, stranger, provider_id = acme
    made = office.ask("keys.add", {"name": "rack 7", "kind": "node", "allowed_addresses": ["10.0.0.0/8"]}, mine).body
    assert made["key"].startswith("hr_n_") and (made["kind"], made["owner_id"]) == ("node", provider_id)
    listed = office.ask("keys.list", {"kind": "node"}, mine).body["api_keys"]
    assert [key["id"] for key in listed] == [made["id"]]
    assert office.ask("keys.list", {}, mine).body["api_keys"][0]["kind"] == "user"
    turned = office.ask("keys.rotate", {"id": made["id"], "overlap_s": 0}, mine).body
    assert turned["key"].startswith("hr_n_") and turned["allowed_addresses"] == ["10.0.0.0/8"]
    assert office.ask("keys.list", {"kind": "node"}, stranger).body["api_keys"] == []
    assert office.ask("keys.list", {"kind": "node", "provider": "acme"}, stranger).code == "ProviderNotFound"
    assert office.ask("keys.add", {"name": "x", "kind": "node", "provider": "acme"}, stranger).code == (
        "ProviderNotFound"
    )
    assert office.ask("keys.delete", {"id": turned["id"]}, stranger).code == "KeyNotFound"
    user = office.person()
    for name, body in (("keys.add", {"name": "x", "kind": "node"}), ("keys.list", {"kind": "node"})):
        answer = office.ask(name, body, user)
        assert (answer.status, answer.code) == (403, "PermissionDenied")
    admin = office.person("admin")
    every = office.ask("keys.list", {"kind": "node"}, admin).body["api_keys"]
    assert {key["id"] for key in every} == {made["id"], turned["id"]}
    assert office.ask("keys.delete", {"id": turned["id"]}, admin).status == 200
    refused = office.ask("auth.me", {}, made["key"], address="10.0.0.1")
    assert refused.status in (401, 403)


def test_keys_of_services_are_the_admins(office: Office, acme: tuple[Caller, Caller, str]) -> None:
    mine, _, provider_id = acme
    admin = office.person("admin")
    wanted = {"name": "storage", "kind": "service", "service": "storage", "provider": "ACME"}
    made = office.ask("keys.add", wanted, admin).body
    assert made["key"].startswith("hr_s_")
    assert (made["kind"], made["owner_id"], made["service"]) == ("service", provider_id, "storage")
    with office.database.read() as unit:
        row = keys.find_by_id(unit, made["id"])
    assert (row.service, row.provider, row.account_id) == ("storage", provider_id, None)
    for asked in ({"kind": "service"}, {"kind": "service", "provider": "acme"}):
        assert [key["id"] for key in office.ask("keys.list", asked, admin).body["api_keys"]] == [made["id"]]
    turned = office.ask("keys.rotate", {"id": made["id"]}, admin).body
    assert turned["service"] == "storage" and turned["key"].startswith("hr_s_")
    assert office.ask("keys.add", wanted, mine).code == "PermissionDenied"
    assert office.ask("keys.list", {"kind": "service"}, mine).code == "PermissionDenied"
    assert office.ask("keys.delete", {"id": made["id"]}, mine).code == "KeyNotFound"
    assert made["id"] not in json.dumps(office.ask("keys.list", {"kind": "node"}, mine).body)
    assert office.ask("keys.delete", {"id": made["id"]}, admin).status == 200


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kind": "service"}, "service"),
        ({"kind": "node", "service": "x"}, "service"),
        ({"kind": "node", "team_id": "t"}, "team_id"),
        ({"kind": "node", "provider": None}, "provider"),
        ({"kind": "node", "budget": 1}, "budget"),
        ({"kind": "node", "allowed_models": ["m"]}, "allowed_models"),
        ({"kind": "service", "service": "s", "tokens_per_minute": 1}, "tokens_per_minute"),
        ({"kind": "service", "service": "two words"}, "service"),
        ({"kind": "team", "provider": None}, "team_id"),
        ({"kind": "user", "provider": None, "team_id": "t"}, "team_id"),
    ],
)
def test_what_does_not_fit_together_is_named(
    office: Office, acme: tuple[Caller, Caller, str], changes: dict[str, Any], field: str
) -> None:
    answer = office.ask("keys.add", {"name": "n", "provider": "acme", **changes}, office.person("admin"))
    assert (answer.status, answer.code, answer.param) == (400, "ValidationFailed", field)


def test_limits_of_inference_cannot_be_put_on_a_node_later(office: Office, acme: tuple[Caller, Caller, str]) -> None:
    mine = acme[0]
    made = office.ask("keys.add", {"name": "rack", "kind": "node"}, mine).body
    answer = office.ask("keys.update", {"id": made["id"], "budget": 5}, mine)
    assert (answer.status, answer.param) == (400, "budget")
    renamed = office.ask("keys.update", {"id": made["id"], "name": "rack 8", "budget": None}, mine)
    assert renamed.body["name"] == "rack 8"
