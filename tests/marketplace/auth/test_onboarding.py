"""From a stranger to somebody with an account, a forgotten password, and what strangers learn on the way: nothing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import func, select

from marketplace.auth import email_tokens
from marketplace.auth.email_tokens import HOUR_US, Purpose
from marketplace.auth.tables import email_token
from marketplace.events.tables import event
from marketplace.ledger.money import NANO
from marketplace.ledger.tables import account, ledger_tx
from marketplace.notify.tables import outbox
from marketplace.settings import service as settings
from marketplace.store.db import ReadUnit
from marketplace.teams import service as teams
from marketplace.teams.rules import Actor
from marketplace.users import service as users
from marketplace.users.service import User

if TYPE_CHECKING:
    from tests.marketplace.conftest import Answer, Office, Post

ADA = {"name": "Ada", "email": "Ada@example.com", "password": "a long enough password"}
SIGN_IN = {"email": "ada@example.com", "password": ADA["password"]}


def register(office: Office, **values: str) -> Answer:
    office.wait(600)  # rate limits are another test's
    return office.ask("users.register", {**ADA, **values})


def ask(office: Office, name: str, body: dict[str, str]) -> Answer:
    office.wait(600)
    return office.ask(name, body)


def change(office: Office, **values: object) -> None:
    with office.database.write() as unit:
        settings.change(unit, values, office.clock())


def find(office: Office, email: str = "ada@example.com") -> User:
    with office.database.read() as unit:
        user = users.find_by_email(unit, email)
    assert user is not None
    return user


def count(office: Office, *conditions: object) -> int:
    with office.database.read() as unit:
        return int(unit.select(select(func.count()).select_from(ledger_tx).where(*conditions)).scalar_one())  # type: ignore[arg-type] # conditions of a test


def test_from_a_stranger_to_a_session_with_a_bonus(office: Office, post: Post) -> None:
    assert register(office).body == {"accepted": True}
    refused = ask(office, "auth.login", SIGN_IN)
    assert (refused.status, refused.code) == (403, "EmailNotVerified")
    (letter,) = post.deliver()
    assert letter.to == "Ada@example.com" and letter.link.startswith(f"{office.context.public_url}/verify-email#token=")
    assert "Confirm your e-mail address" in letter.subject and "Ada" not in letter.text.replace("Ada@", "")
    verified = ask(office, "auth.verify_email", {"token": letter.link.partition("#token=")[2]})
    assert verified.body == {"verified": True}

    token = ask(office, "auth.login", SIGN_IN).body["token"]
    assert office.ask("auth.me", {}, token).body["name"] == "Ada"
    assert office.ask("account.info", {}, token).body["balance"] == 100
    (line,) = office.ask("account.transactions_list", {}, token).body["transactions"]
    assert (line["amount"], line["info"]) == (100, {"PromoTransaction": {"description": "Signup bonus"}})
    actions = [item["action"] for item in office.ask("events.list", {}, token).body["events"]]
    assert actions == ["auth.login", "users.verify_email", "users.register"]
    assert post.deliver() == []


def test_a_wrong_password_does_not_learn_that_the_address_is_unverified(office: Office) -> None:
    register(office)
    answer = ask(office, "auth.login", {**SIGN_IN, "password": "something else"})
    assert (answer.status, answer.code) == (401, "InvalidCredentials")


def test_the_bonus_is_what_the_settings_say(office: Office, post: Post) -> None:
    change(office, signup_bonus=0)
    register(office)
    assert ask(office, "auth.verify_email", {"token": post.token()}).status == 200
    assert count(office) == 0
    change(office, signup_bonus=3 * NANO)
    register(office, email="bob@example.com")
    assert ask(office, "auth.verify_email", {"token": post.token()}).status == 200
    with office.database.read() as unit:
        posted = unit.select(select(account.c.posted).where(account.c.id == find(office, "bob@example.com").account_id))
        assert posted.scalar_one() == 3 * NANO


def test_whoever_was_invited_is_in_the_team_once_the_address_is_verified(office: Office, post: Post) -> None:
    owner = office.person()
    with office.database.write() as unit:
        team = teams.create(unit, name="Cryptography", owner_id=owner.id, now=office.clock(), random=office.random)
        actor = Actor(owner.id, "Owner")
        teams.invite(unit, team.id, actor, "ADA@example.com", "Admin", inviter=owner.id, now=office.clock())
    register(office)
    with office.database.read() as unit:
        assert teams.role_of(unit, team.id, find(office).id) is None
    assert ask(office, "auth.verify_email", {"token": post.token()}).status == 200
    with office.database.read() as unit:
        assert teams.role_of(unit, team.id, find(office).id) == "Admin"


def test_registration_can_be_closed(office: Office, post: Post) -> None:
    change(office, registration_open=False)
    answer = register(office)
    assert (answer.status, answer.code) == (403, "RegistrationClosed")
    assert register(office, email=office.person().email).code == "RegistrationClosed"
    assert post.deliver() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("email", "no address"),
        ("email", "a@b.c, victim@example.com"),
        ("email", "a@b.c\r\nBcc: victim@example.com"),
        ("email", '"a b"@example.com'),
        ("email", "<a@example.com>"),
        ("password", "short"),
        ("password", "x" * 1025),
        ("name", ""),
        ("name", "Ada\r\nBcc: victim@example.com"),
        ("name", "x" * 129),
    ],
)
def test_what_cannot_be_is_named(sqlite_office: Office, field: str, value: str) -> None:
    answer = register(sqlite_office, **{field: value})
    assert (answer.status, answer.code, answer.param) == (400, "ValidationFailed", field)


@pytest.mark.parametrize("operation", ["users.register", "auth.resend_verification", "auth.request_password_reset"])
def test_strangers_learn_nothing(office: Office, post: Post, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known, unverified and unknown addresses: the same answer, the same hashing, one mail to be sent each."""
    from marketplace.users import rules

    hashed: list[str] = []
    hasher = rules._hasher

    class Counting:
        def hash(self, password: str) -> str:
            hashed.append(password)
            return hasher.hash(password)

        verify = hasher.verify

    register(office, email="pending@example.com")
    post.deliver()
    monkeypatch.setattr(rules, "_hasher", Counting())
    answers, work = [], []
    for email in (office.person().email, "pending@example.com", "unknown@example.com"):
        hashed.clear()
        with office.database.read() as unit:
            before = unit.select(select(func.count()).select_from(outbox)).scalar_one()
        body = {**ADA, "email": email} if operation == "users.register" else {"email": email}
        answer = ask(office, operation, body)
        with office.database.read() as unit:
            after = unit.select(select(func.count()).select_from(outbox)).scalar_one()
        answers.append((answer.status, answer.body, sorted(answer.headers)))
        work.append((len(hashed), after - before))
    assert answers[0] == answers[1] == answers[2] and answers[0][:2] == (200, {"accepted": True})
    assert work == [(1 if operation == "users.register" else 0, 1)] * 3


def test_the_mails_say_what_the_answers_do_not(office: Office, post: Post) -> None:
    known = office.person()
    register(office, email=known.email.upper())
    (letter,) = post.deliver()
    assert letter.to == known.email and "tried to register" in letter.subject and letter.link == ""
    assert office.login(known)
    for operation, email in (
        ("auth.resend_verification", known.email),
        ("auth.resend_verification", "unknown@example.com"),
        ("auth.request_password_reset", "unknown@example.com"),
    ):
        assert ask(office, operation, {"email": email}).status == 200
        assert post.deliver() == []
    with office.database.read() as unit:
        outcomes = unit.select(select(outbox.c.outcome, outbox.c.recipient).order_by(outbox.c.id)).all()
    assert [tuple(row) for row in outcomes] == [("sent", ""), ("dropped", ""), ("dropped", ""), ("dropped", "")]


def test_the_newest_registration_counts_until_one_is_verified(office: Office, post: Post) -> None:
    register(office)
    earlier = post.token()
    register(office, name="Ada L.", password="another long password")
    assert ask(office, "auth.verify_email", {"token": earlier}).code == "InvalidEmailToken"
    assert ask(office, "auth.verify_email", {"token": post.token()}).status == 200
    assert ask(office, "auth.login", SIGN_IN).status == 401
    assert ask(office, "auth.login", {**SIGN_IN, "password": "another long password"}).status == 200
    assert find(office).name == "Ada L." and count(office, ledger_tx.c.kind == "bonus") == 1


def test_whom_an_admin_added_is_not_taken_over_by_registering(office: Office, post: Post) -> None:
    with office.database.write() as unit:
        users.create(
            unit, email=ADA["email"], role="user", password_hash=None, now=office.clock(), random=office.random
        )
    register(office)
    assert find(office).password_hash is None and find(office).name == ""
    (letter,) = post.deliver()
    assert "/reset-password#token=" in letter.link
    reset = {"token": letter.link.partition("#token=")[2], "password": "chosen by the reader"}
    assert ask(office, "auth.reset_password", reset).body == {"reset": True}
    assert ask(office, "auth.login", {**SIGN_IN, "password": "chosen by the reader"}).status == 200
    assert count(office, ledger_tx.c.kind == "bonus") == 1


def test_a_new_password_ends_every_session_and_every_other_token(office: Office, post: Post) -> None:
    bob = office.person()
    session = office.login(bob)
    tokens = []
    for _ in range(2):
        ask(office, "auth.request_password_reset", {"email": bob.email.upper()})
        tokens.append(post.token())
    change_to = {"token": tokens[0], "password": "the next password"}
    assert ask(office, "auth.reset_password", {**change_to, "password": "short"}).param == "password"
    assert ask(office, "auth.reset_password", change_to).status == 200
    assert office.ask("auth.me", {}, session).code == "InvalidToken"
    assert ask(office, "auth.login", {"email": bob.email, "password": office.PASSWORD}).status == 401
    assert ask(office, "auth.login", {"email": bob.email, "password": "the next password"}).status == 200
    for token in tokens:
        assert ask(office, "auth.reset_password", {"token": token, "password": "one more password"}).code == (
            "InvalidEmailToken"
        )
    (notice,) = post.deliver()
    assert notice.to == bob.email and "was changed" in notice.subject and notice.link == ""
    assert count(office, ledger_tx.c.kind == "bonus") == 0


def test_a_new_password_ends_a_login_that_waits_for_its_second_step(office: Office, post: Post) -> None:
    import pyotp

    bob = office.person()
    secret = office.ask("auth.totp_setup", {}, bob).body["secret"]

    def code() -> str:
        office.wait(60)
        return pyotp.TOTP(secret).at(office.now // 1_000_000)

    assert office.ask("auth.totp_confirm", {"code": code()}, bob).status == 200
    partial = office.ask("auth.login", {"email": bob.email, "password": office.PASSWORD}).body["partial_token"]
    office.ask("auth.request_password_reset", {"email": bob.email})
    reset = {"token": post.token(), "password": "the next password"}
    assert office.ask("auth.reset_password", reset).status == 200
    late = office.ask("auth.totp_complete", {"partial_token": partial, "code": code()})
    assert (late.status, late.code) == (401, "InvalidPartialToken")
    again = office.ask("auth.login", {"email": bob.email, "password": "the next password"})
    assert "partial_token" in again.body  # the second factor stays on


@pytest.mark.parametrize(("purpose", "hours"), [("verify", 24), ("reset", 1)])
def test_tokens_expire_and_serve_one_purpose(office: Office, purpose: Purpose, hours: int) -> None:
    bob = office.person()
    other: Purpose = "reset" if purpose == "verify" else "verify"
    with office.database.write() as unit:
        token = email_tokens.issue(unit, bob.id, purpose, now=office.now, random=office.random)
        assert email_tokens.use(unit, token, other, office.now) is None
        assert email_tokens.use(unit, token, purpose, office.now + hours * HOUR_US) is None
        assert email_tokens.use(unit, token + "A", purpose, office.now) is None
        stored = unit.select(select(email_token)).one()
        assert token.encode() not in stored.digest and len(stored.digest) == 32
        assert email_tokens.use(unit, token, purpose, office.now + hours * HOUR_US - 1) == bob.id
        assert email_tokens.use(unit, token, purpose, office.now) is None


def test_mails_for_one_address_are_limited_whoever_asks(office: Office) -> None:
    statuses = [
        office.ask("auth.request_password_reset", {"email": "v@example.com"}, address=f"198.51.100.{n}").status
        for n in range(6)
    ]
    assert statuses == [200] * 5 + [429]
    for operation in ("auth.resend_verification", "auth.request_password_reset"):
        refused = office.ask(operation, {"email": "V@example.com"}, address="203.0.113.1")
        assert (refused.status, refused.code) == (429, "RateLimited") and int(refused.headers["Retry-After"]) <= 300
    office.wait(300)
    assert office.ask("users.register", {**ADA, "email": "v@example.com"}, address="203.0.113.1").status == 200


def test_eight_at_once_verify_and_reset_and_one_bonus_is_given(office: Office, post: Post) -> None:
    """Every link that was ever sent, each followed several times at the same moment."""
    register(office)
    links = [("auth.verify_email", {"token": post.token()})]
    ask(office, "auth.resend_verification", {"email": ADA["email"]})
    links.append(("auth.verify_email", {"token": post.token()}))
    for n in range(2):
        ask(office, "auth.request_password_reset", {"email": ADA["email"]})
        links.append(("auth.reset_password", {"token": post.token(), "password": f"new password {n}"}))
    start = threading.Barrier(8)
    answers: list[tuple[str, int, str]] = []

    def follow(operation: str, body: dict[str, str], number: int) -> None:
        start.wait(10)
        answer = office.ask(operation, body, address=f"198.51.100.{number}")
        answers.append((body["token"], answer.status, "" if answer.status == 200 else answer.code))

    threads = [threading.Thread(target=follow, args=(*links[number % 4], number)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 8 and {answer[1:] for answer in answers} <= {(200, ""), (400, "InvalidEmailToken")}
    worked = [token for token, status, _ in answers if status == 200]
    assert worked and len(set(worked)) == len(worked)
    resets = [body["token"] for operation, body in links if operation == "auth.reset_password"]
    assert sum(token in resets for token in worked) == 1
    assert count(office, ledger_tx.c.idempotency_key == f"bonus:{find(office).id}") == 1 == count(office)
    with office.database.read() as unit:
        state = unit.select(select(account.c.posted).where(account.c.id == find(office).account_id)).scalar_one()
        confirmed = unit.select(select(event.c.id).where(event.c.action == "users.verify_email")).all()
        left = unit.select(select(email_token.c.purpose)).all()
    assert state == NANO and len(confirmed) == 1 and left == []


def test_an_address_that_somebody_takes_between_two_looks_is_known(
    office: Office, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(office, "users.register", ADA).status == 200
    find_by_email, missed = users.find_by_email, iter([True])

    def late(unit: ReadUnit, email: str) -> User | None:
        return None if next(missed, False) else find_by_email(unit, email)

    monkeypatch.setattr(users, "find_by_email", late)
    answer = office.ask("users.register", ADA, address="198.51.100.9")
    assert answer.status == 200 and next(missed, None) is None, answer.body
    assert find(office).email_verified_at is None


def test_eight_at_once_register_one_address(office: Office, post: Post) -> None:
    start = threading.Barrier(8)
    answers: list[int] = []

    def one(number: int) -> None:
        start.wait(10)
        answers.append(office.ask("users.register", ADA, address=f"198.51.100.{number}").status)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(answers) == [200] * 5 + [429] * 3
    assert find(office).email_verified_at is None
    tokens = [letter.link.partition("#token=")[2] for letter in post.deliver()]
    assert len(set(tokens)) == 5
    assert ask(office, "auth.verify_email", {"token": tokens[0]}).status == 200
