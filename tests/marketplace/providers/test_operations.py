"""Making and changing providers, and who acts for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.marketplace.users.company import found_company

if TYPE_CHECKING:
    from tests.marketplace.conftest import Answer, Caller, Office


@pytest.fixture
def admin(office: Office) -> Caller:
    return office.person("admin")


def create(office: Office, admin: Caller, name: str, **more: Any) -> str:
    answer = office.ask("providers.create", {"name": name, **more}, admin)
    assert answer.status == 200, answer.body
    return str(answer.body["provider"]["id"])


def names(office: Office, who: Caller, selector: Any = "All", **more: Any) -> list[str]:
    answer = office.ask("providers.list", {"selector": selector, **more}, who)
    assert answer.status == 200, answer.body
    return [item["name"] for item in answer.body["providers"]]


def add(office: Office, admin: Caller, provider_id: str, who: Caller, *, is_root: bool = False) -> Answer:
    body = {"provider_id": provider_id, "selector": {"ByEmail": who.email.upper()}, "is_root": is_root}
    return office.ask("providers.members_add", body, admin)


def remove(office: Office, admin: Caller, provider_id: str, who: Caller) -> Answer:
    return office.ask("providers.members_remove", {"provider_id": provider_id, "selector": {"ById": who.id}}, admin)


def test_a_provider_is_made_listed_and_changed(office: Office, admin: Caller) -> None:
    made = create(office, admin, "Acme", logo_url="https://acme.example/l.svg", website="https://acme.example")
    create(office, admin, "Beta")
    assert names(office, admin) == ["Beta", "Acme"]
    assert names(office, admin, {"ById": [made, "none"]}) == ["Acme"]
    assert names(office, admin, {"ByName": ["ACME", "none"]}) == ["Acme"]
    changed = office.ask("providers.update", {"provider_id": made, "name": "ACME", "logo_url": None}, admin)
    assert changed.body["provider"]["name"] == "ACME" and changed.body["provider"]["logo_url"] is None
    assert changed.body["provider"]["website"] == "https://acme.example"
    same = office.ask("providers.update", {"provider_id": made, "name": None}, admin)
    assert same.body["provider"] == changed.body["provider"]
    actions = [event["action"] for event in office.ask("events.list", {"selector": "All"}, admin).body["events"]]
    assert actions == ["providers.update", "providers.update", "providers.create", "providers.create"]


def test_pages(office: Office, admin: Caller) -> None:
    for number in range(3):
        create(office, admin, f"p{number}")
    first = office.ask("providers.list", {"limit": 2}, admin).body
    second = office.ask("providers.list", {"limit": 2, "cursor": first["next_cursor"]}, admin).body
    assert [item["name"] for item in first["providers"] + second["providers"]] == ["p2", "p1", "p0"]
    assert second["next_cursor"] is None


def test_a_name_is_one_providers(office: Office, admin: Caller) -> None:
    create(office, admin, "Acme")
    other = create(office, admin, "Beta")
    for answer in (
        office.ask("providers.create", {"name": "aCME"}, admin),
        office.ask("providers.update", {"provider_id": other, "name": "ACME"}, admin),
    ):
        assert (answer.status, answer.code, answer.param) == (409, "ProviderNameExists", "name")
    assert names(office, admin) == ["Beta", "Acme"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", ""), ("name", "a\nb"), ("logo_url", "javascript:alert(1)"), ("website", "ftp://x"), ("website", 1)],
)
def test_what_a_provider_cannot_have_is_400(office: Office, admin: Caller, field: str, value: Any) -> None:
    made = create(office, admin, "Acme")
    for name, body in (("providers.create", {"name": "New"}), ("providers.update", {"provider_id": made})):
        answer = office.ask(name, {**body, field: value}, admin)
        assert (answer.status, answer.code, answer.param) == (400, "ValidationFailed", field)


def test_people_come_and_go(office: Office, admin: Caller) -> None:
    made, ada = create(office, admin, "Acme"), office.person()
    session = office.login(ada)
    assert office.ask("auth.me", {}, session).body["provider"] == "Headrace"
    assert office.ask("capabilities.list", {}, session).body["provider_name"] is None

    member = add(office, admin, made, ada).body["member"]
    assert (member["user_id"], member["role"], member["is_root"]) == (ada.id, "provider", False)
    assert office.ask("auth.me", {}, session).body["provider"] == "Acme"
    told = office.ask("capabilities.list", {}, session).body
    assert told["provider_name"] == "Acme" and told["is_admin"] is False
    assert {"providers": {"read": True}} in told["features"]

    again = add(office, admin, made, ada, is_root=True).body["member"]
    assert again == {**member, "is_root": True}
    listed = office.ask("providers.list", {"with_members": True}, ada).body["providers"]
    assert [item["name"] for item in listed] == ["Acme"] and listed[0]["members"] == [again]

    assert remove(office, admin, made, ada).status == 204
    assert office.ask("auth.me", {}, session).body["role"] == "user"
    assert office.ask("auth.me", {}, session).body["provider"] == "Headrace"
    gone = remove(office, admin, made, ada)
    assert (gone.status, gone.code, gone.param) == (404, "UserNotFound", "selector")


def test_somebody_acts_for_one_provider(office: Office, admin: Caller) -> None:
    acme, beta, ada = create(office, admin, "Acme"), create(office, admin, "Beta"), office.person()
    add(office, admin, acme, ada)
    refused = add(office, admin, beta, ada)
    assert (refused.status, refused.code, refused.param) == (409, "OtherProvider", "selector")
    assert remove(office, admin, beta, ada).code == "UserNotFound"
    assert office.ask("auth.me", {}, ada).body["provider"] == "Acme"


def test_admins_stay_admins(office: Office, admin: Caller) -> None:
    made = create(office, admin, "Acme")
    assert add(office, admin, made, admin).body["member"]["role"] == "admin"
    assert office.ask("capabilities.list", {}, admin).body["provider_name"] == "Acme"
    assert remove(office, admin, made, admin).status == 204
    assert office.ask("auth.me", {}, admin).body["role"] == "admin"


def test_who_is_missing_is_404(office: Office, admin: Caller) -> None:
    made, ada = create(office, admin, "Acme"), office.person()
    for selector in ({"ById": "none"}, {"ByEmail": "none@example.com"}, {"ByEmail": "nowhere"}):
        body = {"provider_id": made, "selector": selector}
        for name in ("providers.members_add", "providers.members_remove"):
            answer = office.ask(name, body, admin)
            assert (answer.status, answer.code, answer.param) == (404, "UserNotFound", "selector")
    for name in ("providers.members_add", "providers.members_remove", "providers.update"):
        body = {"provider_id": "none"} | ({} if name == "providers.update" else {"selector": {"ById": ada.id}})
        answer = office.ask(name, body, admin)
        assert (answer.status, answer.code, answer.param) == (404, "ProviderNotFound", "provider_id")


def test_a_providers_people_see_their_own_only(office: Office, admin: Caller) -> None:
    acme, beta = found_company(office, admin, "Acme"), found_company(office, admin, "Beta")
    assert names(office, acme.member) == ["Acme"]
    assert names(office, acme.member, {"ById": [beta.id]}) == []
    assert names(office, acme.member, {"ById": [beta.id, acme.id]}) == ["Acme"]
    assert names(office, acme.member, {"ByName": ["Beta"]}) == []
    assert names(office, office.person("provider")) == []
    for name in ("providers.create", "providers.update", "providers.members_add", "providers.members_remove"):
        assert office.ask(name, dict(office.OPERATIONS[name].example), acme.root).code == "PermissionDenied"
