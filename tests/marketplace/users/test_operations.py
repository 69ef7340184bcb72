"""Listing, searching, writing to, adding people and giving them roles."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from marketplace.accounts import activity
from marketplace.accounts import service as accounts
from marketplace.auth import letters
from marketplace.auth.letters import Prepared
from marketplace.notify import outbox as outbox_service
from marketplace.notify.rendering import render
from marketplace.notify.tables import outbox
from marketplace.users import service as users
from tests.marketplace.users.company import Company, found_company

if TYPE_CHECKING:
    from marketplace.store.db import Database
    from tests.marketplace.conftest import Answer, Caller, Office, Shop


@pytest.fixture
def admin(office: Office) -> Caller:
    return office.person("admin")


def mails(office: Office) -> list[dict[str, Any]]:
    with office.database.read() as unit:
        rows = unit.select(select(outbox).order_by(outbox.c.created_at, outbox.c.id)).all()
    return [{**row._mapping, "payload": json.loads(row.payload)} for row in rows]


def ids(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    return [user["id"] for user in answer.body["users"]]


def listed(office: Office, who: Caller, selector: Any = "All", **more: Any) -> list[str]:
    return ids(office.ask("users.list", {"selector": selector, **more}, who))


class TestList:
    def test_newest_first_in_pages_with_a_total(self, office: Office, admin: Caller) -> None:
        people = [office.person() for _ in range(5)]
        found: list[str] = []
        cursor = None
        while True:
            page = office.ask("users.list", {"limit": 2, "cursor": cursor}, admin)
            assert page.body["total"] == 6
            found += ids(page)
            cursor = page.body["next_cursor"]
            if cursor is None:
                break
        assert found == [*(person.id for person in reversed(people)), admin.id]

    def test_what_it_says_of_a_person(self, office: Office, admin: Caller) -> None:
        ada = office.person(balance=5 * 10**9)
        office.login(ada)
        plain = office.ask("users.list", {"selector": {"ById": [ada.id]}}, admin).body["users"][0]
        assert plain["account_info"] is None and plain["last_login_at"] is not None
        assert (plain["id"], plain["email"], plain["role"]) == (ada.id, ada.email, "user")
        told = office.ask("users.list", {"selector": {"ById": [ada.id]}, "with_account_info": True}, admin)
        assert told.body["users"][0]["account_info"] == {
            "balance": 500,
            "credit_limit": 0,
            "is_unlimited": False,
            "total_spent": 0,
            "instance_count": 0,
        }

    def test_by_id_leaves_out_whom_there_is_not(self, office: Office, admin: Caller) -> None:
        ada, grace = office.person(), office.person()
        assert listed(office, admin, {"ById": [ada.id, "nobody", grace.id]}) == [grace.id, ada.id]
        assert listed(office, admin, {"ByID": [ada.id]}) == [ada.id]

    def test_by_spend_counts_use_less_refunds_and_no_funds(
        self, office: Office, admin: Caller, make_shop: Callable[[Database], Shop]
    ) -> None:
        shop = make_shop(office.database)
        thrifty, spender = office.person(balance=10**9), office.person(balance=10**9)
        hold = shop.hold(spender.account_id, 10**6)
        shop.apply(hold, shop.settle(hold.request_id, 200_000, 0, 100_000))  # 0.4 cents
        office.ask(
            "account.transactions_create_external", {"account": {"ByUserIds": [thrifty.id]}, "amount": -50}, admin
        )
        spent = {"ByMinSpend": 0.04}
        assert listed(office, admin, spent) == [spender.id]
        assert listed(office, admin, {"ByMinSpend": 0.0400001}) == []
        assert len(listed(office, admin, {"ByMinSpend": 0})) == 3
        body = office.ask("users.list", {"selector": spent, "with_account_info": True}, admin).body
        assert float(body["users"][0]["account_info"]["total_spent"]) == 0.04 and body["total"] == 1
        with office.database.write() as unit:
            accounts.refund(unit, hold.request_id, 10, key="r", now=office.now, random=office.random)
        assert listed(office, admin, spent) == []

    def test_by_active_executors_is_who_has_machines_running(
        self, office: Office, admin: Caller, make_shop: Callable[[Database], Shop], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shop = make_shop(office.database)
        ada = office.person(balance=10**9)
        shop.apply(shop.hold(ada.account_id, 10**6))  # a request that runs is no machine
        body = {"selector": "ByActiveExecutors", "with_account_info": True}
        assert office.ask("users.list", body, admin).body == {"users": [], "total": 0, "next_cursor": None}
        monkeypatch.setattr(activity, "live_instances", lambda unit, account_ids=None: {ada.account_id: 2})
        (found,) = office.ask("users.list", body, admin).body["users"]
        assert (found["id"], found["account_info"]["instance_count"]) == (ada.id, 2)

    def test_by_provider_is_its_people_and_customers(self, office: Office, admin: Caller) -> None:
        acme = found_company(office, admin, "Acme")
        office.person()
        assert set(listed(office, admin, {"ByProvider": "ACME"})) == {acme.root.id, acme.member.id, acme.customer}
        missing = office.ask("users.list", {"selector": {"ByProvider": "none"}}, admin)
        assert (missing.status, missing.code, missing.param) == (404, "ProviderNotFound", "selector")

    @pytest.mark.parametrize(
        "selector",
        [{"ById": []}, {"ById": "x"}, {"ByMinSpend": -1}, {"ByMinSpend": "1"}, "Mine", {}, {"ById": ["a"], "x": 1}],
    )
    def test_other_selectors_are_400(self, office: Office, admin: Caller, selector: Any) -> None:
        answer = office.ask("users.list", {"selector": selector}, admin)
        assert (answer.status, answer.code) == (400, "ValidationFailed")
        assert str(answer.param).startswith("selector")


class TestProvidersSeeTheirOwnOnly:
    @pytest.fixture
    def acme(self, office: Office, admin: Caller) -> Company:
        return found_company(office, admin, "Acme")

    def test_in_lists(self, office: Office, admin: Caller, acme: Company) -> None:
        other, stranger = found_company(office, admin, "Other"), office.person(balance=10**9)
        own = {acme.root.id, acme.member.id, acme.customer}
        for who in (acme.root, acme.member):
            assert set(listed(office, who)) == own
            assert set(listed(office, who, {"ByProvider": "acme"})) == own
            assert set(listed(office, who, {"ByMinSpend": 0})) == own
            assert listed(office, who, {"ById": [stranger.id, other.root.id, acme.customer]}) == [acme.customer]
            assert office.ask("users.list", {}, who).body["total"] == 3
            for name in ("Other", "nobody's"):
                refused = office.ask("users.list", {"selector": {"ByProvider": name}}, who)
                assert (refused.status, refused.code) == (403, "PermissionDenied")

    def test_in_searches(self, office: Office, admin: Caller, acme: Company) -> None:
        found_company(office, admin, "Other")
        found = office.ask("users.search", {"query": "@", "limit": 100}, acme.root).body["results"]
        assert {person["id"] for person in found} == {acme.root.id, acme.member.id, acme.customer}

    def test_in_messages(self, office: Office, admin: Caller, acme: Company) -> None:
        stranger = office.person()
        body = {"selector": {"ById": [stranger.id, acme.customer]}, "subject": "s", "message": "m"}
        assert office.ask("users.send_message", body, acme.root).body == {"sent_user_ids": [acme.customer]}
        assert {mail["user_id"] for mail in mails(office) if mail["template"] == "message"} == {acme.customer}

    def test_whoever_left_sees_nobody(self, office: Office, admin: Caller, acme: Company) -> None:
        body = {"provider_id": acme.id, "selector": {"ById": acme.member.id}}
        assert office.ask("providers.members_remove", body, admin).status == 204
        assert office.ask("users.list", {}, acme.member).code == "PermissionDenied"
        alone = office.person("provider")
        assert listed(office, alone) == []
        refused = office.ask("users.add", {"email": "x@example.com", "name": "X"}, alone)
        assert (refused.status, refused.code) == (403, "PermissionDenied")


class TestSearch:
    def search(self, office: Office, admin: Caller, query: str, **more: Any) -> list[str]:
        answer = office.ask("users.search", {"query": query, **more}, admin)
        assert answer.status == 200, answer.body
        return [found["name"] for found in answer.body["results"]]

    def test_part_of_a_name_or_address_however_capitalised(self, office: Office, admin: Caller) -> None:
        for email, name in (("one@alpha.example", "Ada Lovelace"), ("Two@Beta.example", "grace")):
            office.ask("users.add", {"email": email, "name": name}, admin)
        assert self.search(office, admin, "LOVE") == ["Ada Lovelace"]
        assert self.search(office, admin, "two@BETA") == ["grace"]
        assert self.search(office, admin, "example") == ["grace", "Ada Lovelace", ""]
        assert self.search(office, admin, "", limit=1) == ["grace"]
        assert self.search(office, admin, "nobody") == []

    def test_nothing_stands_for_anything_but_itself(self, office: Office, admin: Caller) -> None:
        names = ["100% sure", "under_score", "back\\slash", "plain"]
        for number, name in enumerate(names):
            assert office.ask("users.add", {"email": f"{number}@x.example", "name": name}, admin).status == 200
        assert self.search(office, admin, "%") == ["100% sure"]
        assert self.search(office, admin, "_") == ["under_score"]
        assert self.search(office, admin, "\\") == ["back\\slash"]
        assert self.search(office, admin, "' OR 1=1 --") == []

    def test_its_limit(self, office: Office, admin: Caller) -> None:
        for number in range(22):
            office.ask("users.add", {"email": f"{number}@x.example", "name": "n"}, admin)
            office.wait(1)
        assert len(self.search(office, admin, "@x.example")) == 20
        assert len(self.search(office, admin, "@x.example", limit=100)) == 22
        assert office.ask("users.search", {"query": "", "limit": 101}, admin).param == "limit"


class TestMessages:
    def test_each_gets_their_own_mail_once(self, office: Office, admin: Caller) -> None:
        people = [office.person() for _ in range(3)]
        body = {"selector": {"ById": [one.id for one in people[:2]]}, "subject": "Hello", "message": "One\n<b>two</b>"}
        sent = office.ask("users.send_message", body, admin, Idempotency_Key="k")
        again = office.ask("users.send_message", body, admin, Idempotency_Key="k")
        assert sent.body == again.body == {"sent_user_ids": [people[1].id, people[0].id]}
        found = mails(office)
        assert sorted(mail["recipient"] for mail in found) == sorted(one.email for one in people[:2])
        values = {**found[0]["payload"], "platform": "Headrace", "base_url": "https://h.example", "currency": "EUR"}
        rendered = render("message", values)
        assert rendered.subject == "Hello" and "One\n<b>two</b>" in rendered.text
        assert "One\n&lt;b&gt;two&lt;/b&gt;" in rendered.html
        event = office.ask("events.list", {}, admin).body["events"][0]
        assert (event["action"], event["detail"]) == ("users.send_message", {"people": 2})

    @pytest.mark.parametrize("subject", ["Hi\r\nBcc: all@example.com", "a\nb", "\x0b", " ", "", "x" * 201])
    def test_a_subject_is_one_line(self, office: Office, admin: Caller, subject: str) -> None:
        body = {"selector": "All", "subject": subject, "message": "m"}
        answer = office.ask("users.send_message", body, admin)
        assert (answer.status, answer.param) == (400, "subject")
        assert mails(office) == []

    @pytest.mark.parametrize("message", ["", " \n", "bell\x07", "x" * 20_001])
    def test_a_message_is_text(self, office: Office, admin: Caller, message: str) -> None:
        body = {"selector": "All", "subject": "s", "message": message}
        assert office.ask("users.send_message", body, admin).param == "message"

    def test_it_goes_to_a_bounded_number(self, office: Office, admin: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("marketplace.users.operations.MAX_SELECTED", 2)
        body = {"selector": "All", "subject": "s", "message": "m"}
        office.person()
        assert len(office.ask("users.send_message", body, admin).body["sent_user_ids"]) == 2
        office.person()
        refused = office.ask("users.send_message", body, admin)
        assert (refused.status, refused.code, refused.param) == (400, "ValidationFailed", "selector")
        assert len(mails(office)) == 2


class TestAdd:
    def letter(self, office: Office) -> Prepared:
        """What the oldest mail that waits says."""
        with office.database.write() as unit:
            mail = outbox_service.claim(unit, now=office.clock(), random=office.random)
            assert mail is not None
            said = letters.prepare(unit, mail, public_url="https://h.example", now=office.clock(), random=office.random)
        assert said is not None
        return said

    def test_they_get_a_mail_to_choose_a_password(self, office: Office, admin: Caller) -> None:
        answer = office.ask("users.add", {"email": "Grace@Example.com", "name": "Grace"}, admin)
        user_id = answer.body["user_id"]
        assert answer.body == {"user_id": user_id, "email": "Grace@Example.com"}
        with office.database.read() as unit:
            user = users.find(unit, user_id)
        assert user is not None
        assert (user.role, user.password_hash, user.email_verified_at) == ("user", None, None)
        (mail,) = mails(office)
        assert (mail["template"], mail["recipient"], mail["payload"]) == ("welcome", "Grace@Example.com", {})
        letter = self.letter(office)
        assert (letter.template, letter.to) == ("welcome", "Grace@Example.com")
        values = {**letter.values, "platform": "Headrace", "base_url": "https://h.example", "currency": "EUR"}
        rendered = render(letter.template, values)
        assert letter.link in rendered.text and letter.link in rendered.html

    def test_the_mail_lets_them_in(self, office: Office, admin: Caller) -> None:
        office.ask("users.add", {"email": "grace@example.com", "name": "Grace"}, admin)
        link = self.letter(office).link
        assert link.startswith("https://h.example/reset-password#token=")
        token = link.partition("=")[2]
        chosen = office.ask("auth.reset_password", {"token": token, "password": "a new password"})
        assert chosen.status == 200, chosen.body
        entered = office.ask("auth.login", {"email": "grace@example.com", "password": "a new password"})
        assert entered.status == 200 and "token" in entered.body

    def test_an_admin_says_what_the_account_begins_with(self, office: Office, admin: Caller) -> None:
        financial = {"initial_balance": 1000, "credit_limit": 25.5, "unlimited": True}
        added = office.ask("users.add", {"email": "g@example.com", "name": "G", "financial": financial}, admin)
        selector = {"ById": [added.body["user_id"]]}
        told = office.ask("users.list", {"selector": selector, "with_account_info": True}, admin).body["users"][0]
        assert json.loads(json.dumps(told["account_info"], default=float)) == {
            "balance": 1000,
            "credit_limit": 25.5,
            "is_unlimited": True,
            "total_spent": 0,
            "instance_count": 0,
        }

    def test_a_provider_does_not(self, office: Office, admin: Caller) -> None:
        acme = found_company(office, admin, "Acme")
        for financial in ({}, {"initial_balance": 0}, {"unlimited": True}):
            body = {"email": "g@example.com", "name": "G", "financial": financial}
            refused = office.ask("users.add", body, acme.root)
            assert (refused.status, refused.code, refused.param) == (403, "PermissionDenied", "financial")
        added = office.ask("users.add", {"email": "g@example.com", "name": "G"}, acme.root)
        assert added.body["user_id"] in listed(office, acme.member)

    def test_refusals(self, office: Office, admin: Caller) -> None:
        ada = office.person()
        taken = office.ask("users.add", {"email": ada.email.upper(), "name": "A"}, admin)
        assert (taken.status, taken.code, taken.param) == (409, "EmailExists", "email")
        for email in ("nowhere", "a@b\r\nBcc: c@d", "a b@c", "@x"):
            assert office.ask("users.add", {"email": email, "name": "A"}, admin).param == "email"
        for name in ("", " ", "A\nB", "x" * 129):
            assert office.ask("users.add", {"email": "n@example.com", "name": name}, admin).param == "name"
        negative = {"email": "n@example.com", "name": "N", "financial": {"credit_limit": -1}}
        assert office.ask("users.add", negative, admin).param == "financial.credit_limit"
        assert mails(office) == []


class TestRoles:
    def change(self, office: Office, admin: Caller, who: Caller, role: str) -> Answer:
        return office.ask("users.update_role", {"user_id": who.id, "role": role}, admin)

    def test_it_counts_at_once_and_sessions_stay(self, office: Office, admin: Caller) -> None:
        ada = office.person()
        session = office.login(ada)
        assert office.ask("users.list", {}, session).code == "PermissionDenied"
        answer = self.change(office, admin, ada, "readonly_admin")
        assert answer.body == {"user_id": ada.id, "role": "readonly_admin"}
        for credential in (session, ada):
            assert office.ask("users.list", {}, credential).status == 200
            assert office.ask("auth.me", {}, credential).body["role"] == "readonly_admin"
            assert office.ask("capabilities.list", {}, credential).body["is_admin"] is True
        event = office.ask("events.list", {}, ada).body["events"][0]
        assert (event["action"], event["actor_id"]) == ("users.update_role", admin.id)
        assert event["detail"] == {"before": "user", "after": "readonly_admin"}
        self.change(office, admin, ada, "user")
        assert office.ask("users.list", {}, session).code == "PermissionDenied"

    def test_there_is_always_an_admin(self, office: Office, admin: Caller) -> None:
        refused = self.change(office, admin, admin, "user")
        assert (refused.status, refused.code, refused.param) == (409, "UserProtected", "role")
        assert self.change(office, admin, admin, "admin").status == 200
        second = office.person("admin")
        assert self.change(office, admin, admin, "user").status == 200
        assert self.change(office, second, second, "readonly_admin").code == "UserProtected"

    def test_the_role_provider_comes_with_a_provider(self, office: Office, admin: Caller) -> None:
        ada = office.person()
        refused = self.change(office, admin, ada, "provider")
        assert (refused.status, refused.code, refused.param) == (400, "InvalidTransition", "role")
        acme = found_company(office, admin, "Acme")
        assert self.change(office, admin, acme.member, "user").code == "InvalidTransition"
        assert self.change(office, admin, acme.member, "admin").status == 200
        assert self.change(office, admin, acme.member, "provider").status == 200

    def test_refusals(self, office: Office, admin: Caller) -> None:
        missing = office.ask("users.update_role", {"user_id": "nobody", "role": "user"}, admin)
        assert (missing.status, missing.code, missing.param) == (404, "UserNotFound", "user_id")
        assert office.ask("users.update_role", {"user_id": admin.id, "role": "king"}, admin).param == "role"
