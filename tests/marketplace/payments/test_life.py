"""What becomes of payments: letters about them, those that nobody makes, refunds that fail or find no money, teams."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from marketplace.http.dispatch import Desk
from marketplace.ledger.ledger import WRITEOFF
from marketplace.ledger.tables import account
from marketplace.payments import service
from marketplace.payments.stripe_provider import REFUND
from marketplace.payments.tables import payment_customer
from marketplace.settings.rules import DEFAULTS
from marketplace.workers.payments import KEYS_US, PAUSE_US, reconcile
from tests.marketplace.office import Answer, Caller, Office, Post
from tests.marketplace.payments.at_stripe import at_stripe, balance, begin, clean, paid, refunded, tell

if TYPE_CHECKING:
    from marketplace.store.db import Database
    from tests.marketplace.shop import Shop

DAY_S = 86_400


def bought(office: Office, who: Caller, event_id: str = "evt_paid") -> str:
    """A payment of 20 that was made."""
    payment = begin(office, who)
    assert tell(office, event_id, "payment_intent.succeeded", paid(payment)).body["outcome"] == "credited"
    return payment


def give_back(office: Office, admin: Caller, payment: str, cents: int, reason: str = "") -> Answer:
    body = {"payment_intent_id": payment, "amount_cents": cents, "reason": reason}
    return office.ask("payments.refund", body, admin)


def failed(refund_id: str) -> dict[str, Any]:
    return {"id": "re_1", "object": "refund", "status": "failed", "metadata": {REFUND: refund_id}}


def on_platform(office: Office, name: str) -> int:
    with office.database.read() as unit:
        return int(unit.select(select(account.c.posted).where(account.c.id == name)).scalar() or 0)


class TestLetters:
    def test_a_receipt_and_one_for_each_refund_once(self, office: Office, post: Post) -> None:
        at_stripe(office)
        person, admin = office.person(), office.person("admin")
        payment = bought(office, person)
        (receipt,) = post.deliver()
        assert receipt.to == person.email and receipt.subject == f"Receipt R-{payment} from Headrace"
        for text in (receipt.text, receipt.html):
            assert "20.00 USD" in text and f"R-{payment}" in text
        assert tell(office, "evt_2", "payment_intent.succeeded", paid(payment)).body["outcome"] == "unchanged"
        give_back(office, admin, payment, 705, "unused <credit>")
        (letter,) = post.deliver()
        assert letter.to == person.email and letter.subject == f"Refund of receipt R-{payment} from Headrace"
        assert "7.05 USD of your payment of 20.00 USD" in letter.text and "Reason: unused <credit>" in letter.text
        assert "unused &lt;credit&gt;" in letter.html
        tell(office, "evt_3", "charge.refunded", refunded(payment, 1000))  # 2.95 more were given back at Stripe
        (letter,) = post.deliver()
        assert "2.95 USD" in letter.text and "made at the payment provider" in letter.text
        reconcile(office.context)
        assert post.deliver() == []

    def test_no_letter_says_that_money_goes_back_before_it_does(self, office: Office, post: Post) -> None:
        lines, person, admin = at_stripe(office), office.person(), office.person("admin")
        payment = bought(office, person)
        post.deliver()
        lines.silent_after = 1
        assert give_back(office, admin, payment, 500).body["refunds"][0]["status"] == "pending"
        assert post.deliver() == []
        office.wait(PAUSE_US / 1_000_000)
        reconcile(office.context)
        assert len(post.deliver()) == 1
        lines.refuses = True
        assert give_back(office, admin, payment, 500).code == "PaymentRefused"
        assert post.deliver() == []


class TestNobodyPays:
    def test_a_payment_is_ended_after_its_time(self, office: Office) -> None:
        at_stripe(office)
        person = office.person()
        payment = begin(office, person)
        office.wait(DEFAULTS.payment_lifetime - 2 * DAY_S)
        reconcile(office.context)
        assert office.ask("payments.list", {}, person).body["payments"][0]["status"] == "pending"
        assert office.ask("account.info", {}, person).body["pending"] == 2000
        office.wait(2 * DAY_S)
        reconcile(office.context)
        assert office.ask("payments.list", {}, person).body["payments"][0]["status"] == "canceled"
        assert office.ask("account.info", {}, person).body["pending"] == 0
        event = office.ask("events.list", {}, person).body["events"][0]
        assert (event["action"], event["actor_kind"]) == ("payments.canceled", "system")
        assert event["detail"] == {"payment": payment}
        # It was made in the last moment after all: money that arrived is theirs.
        assert tell(office, "late", "payment_intent.succeeded", paid(payment)).body["outcome"] == "credited"
        assert balance(office, person) == 2000 and clean(office)

    def test_a_payment_by_hand_too(self, office: Office) -> None:
        person, admin = office.person(), office.person("admin")
        payment = begin(office, person)
        office.wait(DEFAULTS.payment_lifetime)
        reconcile(office.context)
        refused = office.ask("payments.confirm", {"payment_intent_id": payment}, admin)
        assert (refused.status, refused.code, balance(office, person)) == (400, "InvalidTransition", 0)

    def test_one_that_stripe_may_never_have_heard_of_is_not_asked_for_under_a_forgotten_key(
        self, office: Office
    ) -> None:
        lines, person = at_stripe(office), office.person()
        lines.silent_after = 1
        assert office.ask("payment_intent.create", {"amount_cents": 2000}, person).status == 503
        lines.made.clear()
        office.wait(KEYS_US / 1_000_000)
        reconcile(office.context)
        assert lines.made == {}
        assert office.ask("payments.list", {}, person).body["payments"][0]["status"] == "canceled"


class TestRefundsThatGoWrong:
    def test_what_the_account_cannot_cover_is_written_off(
        self, office: Office, make_shop: Callable[[Database], Shop]
    ) -> None:
        at_stripe(office)
        person, admin, shop = office.person(), office.person("admin"), make_shop(office.database)
        payment = bought(office, person)
        taken = {"account": {"ByUserIds": [person.id]}, "amount": -1400.5, "description": "used"}
        assert office.ask("account.transactions_create_external", taken, admin).status == 200
        left = shop.state(person.account_id).posted
        short = give_back(office, admin, payment, 1000)
        assert (short.status, short.code) == (402, "InsufficientFunds")
        # Made at Stripe, it is gone all the same.
        assert tell(office, "evt_r", "charge.refunded", refunded(payment, 1000)).body["outcome"] == "refunded"
        assert shop.state(person.account_id).posted == 0
        assert on_platform(office, WRITEOFF) == left - 10**10 < 0
        refund_id = office.ask("payments.list", {}, person).body["payments"][0]["refunds"][0]["refund_id"]
        assert tell(office, "evt_f", "refund.failed", failed(refund_id)).body["outcome"] == "refund_undone"
        assert shop.state(person.account_id).posted == left and on_platform(office, WRITEOFF) == 0
        assert clean(office)

    def test_a_refund_that_fails_later_is_undone_once_and_told(self, office: Office, post: Post) -> None:
        at_stripe(office)
        person, admin = office.person(), office.person("admin")
        payment = bought(office, person)
        made = give_back(office, admin, payment, 500).body["refunds"][0]
        post.deliver()
        assert (made["status"], balance(office, person)) == ("succeeded", 1500)
        outcomes = [
            tell(office, event, "refund.failed", failed(made["refund_id"])).body["outcome"] for event in ("a", "a", "b")
        ]
        assert outcomes == ["refund_undone", "duplicate", "ignored"]
        assert balance(office, person) == 2000
        (letter,) = post.deliver()
        assert letter.subject == f"Refund of receipt R-{payment} from Headrace failed"
        assert "5.00 USD of your payment of 20.00 USD could not be given back" in letter.text
        (shown,) = office.ask("payments.list", {}, person).body["payments"]
        assert (shown["refunded_cents"], shown["refunds"][0]["status"]) == (0, "failed")
        told = office.ask("events.list", {}, person).body["events"]
        acts = [event["action"].removeprefix("payments.") for event in reversed(told)]
        assert acts == ["create", "credited", "refund", "refund_succeeded", "refund_undone"]
        assert give_back(office, admin, payment, 2000).status == 200  # all of it may be given back again
        assert tell(office, "c", "refund.failed", failed("unknown")).body["outcome"] == "ignored"
        assert balance(office, person) == 0 and clean(office)


class TestTeams:
    @pytest.fixture
    def owner(self, office: Office) -> Caller:
        return office.person()

    @pytest.fixture
    def team(self, office: Office, owner: Caller) -> Caller:
        return office.team(owner)

    def test_a_member_pays_for_the_team_and_has_the_receipt(
        self, office: Office, post: Post, owner: Caller, team: Caller
    ) -> None:
        at_stripe(office)
        stranger = office.person()
        made = office.ask("payment_intent.create", {"amount_cents": 2000, "team_id": team.id}, owner)
        payment = made.body["payment_intent_id"]
        tell(office, "e", "payment_intent.succeeded", paid(payment))
        assert (balance(office, team), balance(office, owner)) == (2000, 0)
        assert [letter.to for letter in post.deliver()] == [owner.email]
        by_team = {"selector": {"ByTeam": team.id}}
        (shown,) = office.ask("payments.list", by_team, owner).body["payments"]
        assert shown["payer"] == {"Team": team.id}
        assert office.ask("payments.list", {}, owner).body["payments"] == []
        for name, body in (("payments.list", by_team), ("payment_intent.create", {"amount_cents": 1, **by_id(team)})):
            refused = office.ask(name, body, stranger)
            assert (refused.status, refused.code) == (403, "NotTeamMember")
        assert clean(office)

    def test_what_a_key_of_the_team_pays_is_told_to_its_owners(
        self, office: Office, post: Post, owner: Caller, team: Caller
    ) -> None:
        at_stripe(office)
        payment = bought(office, team)
        assert balance(office, team) == 2000
        (letter,) = post.deliver()
        assert letter.to == owner.email and f"R-{payment}" in letter.text


def by_id(team: Caller) -> dict[str, str]:
    return {"team_id": team.id}


def test_an_erased_person_is_known_to_no_provider_and_their_payments_stay(office: Office, post: Post) -> None:
    lines = at_stripe(office)
    lines.create_customer = lambda account_id: f"cus_{account_id}"  # type: ignore[method-assign]  # no network here
    person, admin = office.person(), office.person("admin")
    made = office.ask("payment_intent.create", {"amount_cents": 2000, "save_card": True}, person)
    payment = made.body["payment_intent_id"]
    with office.database.read() as unit:
        assert service.customer(unit, "stripe", person.account_id) == f"cus_{person.account_id}"
    report = office.ask("users.delete", {"user_id": person.id, "reason": "asked", "dry_run": False}, admin).body
    assert report["report"]["hard_deleted"]["payment_customers"] == 1
    with office.database.read() as unit:
        found = service.find(unit, payment)
        assert found is not None and found.created_by is None
        assert unit.select(select(payment_customer)).all() == []
    tell(office, "e", "payment_intent.succeeded", paid(payment))  # it was under way
    assert post.deliver() == [] and clean(office)


def test_a_worker_that_is_to_stop_leaves_the_rest_for_later(office: Office) -> None:
    lines, person = at_stripe(office), office.person()
    for _ in range(3):
        begin(office, person)
    office.wait(PAUSE_US / 1_000_000)
    looks = iter([False, True])
    assert reconcile(office.context, lambda: next(looks)).asked == 1
    office.context = dataclasses.replace(office.context, payments=lines)
    office.desk = Desk(office.context)
    assert reconcile(office.context).asked == 2
