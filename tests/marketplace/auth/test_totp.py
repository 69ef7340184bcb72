"""Two-factor login: set up, used, misused, switched off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyotp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from marketplace.auth.tables import totp as table
from marketplace.auth.totp import LOCK_US, STEP_S, matching_step
from marketplace.settings import service as settings

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office

SECRET = "JBSWY3DPEHPK3PXPJBSWY3DPEHPK3PXP"


class Device:
    """An authenticator app."""

    def __init__(self, office: Office, who: Caller) -> None:
        self.office = office
        self.who = who
        answer = office.ask("auth.totp_setup", {}, who)
        assert answer.status == 200
        self.totp = pyotp.parse_uri(answer.body["totp_uri"])
        assert isinstance(self.totp, pyotp.TOTP)
        assert self.totp.secret == answer.body["secret"] and self.totp.name == who.email

    def code(self) -> str:
        """The digits that it shows now; never those of a step that was used."""
        self.office.wait(STEP_S)
        assert isinstance(self.totp, pyotp.TOTP)
        return self.totp.at(self.office.now // 1_000_000)

    def wrong(self) -> str:
        """Digits that no step near now has."""
        return next(
            code
            for code in (f"{number:06d}" for number in range(10))
            if matching_step(self.totp.secret, code, self.office.now // 1_000_000 // STEP_S) is None
        )

    def switch_on(self) -> None:
        assert self.office.ask("auth.totp_confirm", {"code": self.code()}, self.who).body == {"totp_enabled": True}

    def partial(self) -> str:
        answer = self.office.ask("auth.login", {"email": self.who.email, "password": self.office.PASSWORD})
        assert answer.body.keys() == {"partial_token"}
        return str(answer.body["partial_token"])


def test_the_whole_way(office: Office) -> None:
    ada = office.person()
    device = Device(office, ada)
    assert office.ask("auth.me", {}, ada).body["totp_enabled"] is False
    office.login(ada)  # a setup that nobody confirmed changes nothing
    device.switch_on()
    assert office.ask("auth.me", {}, ada).body["totp_enabled"] is True
    again = office.ask("auth.totp_setup", {}, ada)
    assert (again.status, again.code) == (409, "TotpAlreadyEnabled")
    entered = office.ask("auth.totp_complete", {"partial_token": device.partial(), "code": device.code()})
    assert entered.body.keys() == {"token", "expires_at"}
    assert office.ask("auth.me", {}, entered.body["token"]).body["id"] == ada.id
    assert office.ask("auth.totp_disable", {"code": device.code()}, ada).body == {"totp_enabled": False}
    office.login(ada)
    off = office.ask("auth.totp_disable", {"code": device.code()}, ada)
    assert (off.status, off.code) == (400, "InvalidTransition")


def test_a_code_counts_once(office: Office) -> None:
    device = Device(office, office.person())
    device.switch_on()
    code, partial = device.code(), device.partial()
    assert office.ask("auth.totp_complete", {"partial_token": partial, "code": code}).status == 200
    replayed = office.ask("auth.totp_complete", {"partial_token": device.partial(), "code": code})
    assert (replayed.status, replayed.code) == (400, "InvalidTotpCode")
    used = office.ask("auth.totp_complete", {"partial_token": partial, "code": device.code()})
    assert (used.status, used.code) == (401, "InvalidPartialToken")


def test_five_wrong_codes_end_the_login_and_lock_the_factor(office: Office) -> None:
    device = Device(office, office.person())
    device.switch_on()
    partial = device.partial()
    body = {"partial_token": partial, "code": device.wrong()}
    assert [office.ask("auth.totp_complete", body).code for _ in range(6)] == [
        *["InvalidTotpCode"] * 5,
        "InvalidPartialToken",
    ]
    fresh = device.partial()
    locked = office.ask("auth.totp_complete", {"partial_token": fresh, "code": device.code()})
    assert (locked.status, locked.code) == (429, "RateLimited") and int(locked.headers["Retry-After"]) == 900
    office.wait(LOCK_US / 1_000_000)
    entered = office.ask("auth.totp_complete", {"partial_token": device.partial(), "code": device.code()})
    assert entered.status == 200


def test_how_many_wrong_codes_and_how_often_is_a_setting(office: Office) -> None:
    with office.database.write() as unit:
        settings.change(unit, {"totp_tries": 2, "totp_burst": 1, "totp_per_minute": 1}, office.clock())
    person = office.person()
    device = Device(office, person)
    device.switch_on()
    assert office.ask("auth.totp_disable", {"code": device.wrong()}, person).code == "RateLimited"
    body = {"partial_token": device.partial(), "code": device.wrong()}
    answers = [office.ask("auth.totp_complete", body).code for _ in range(3)]
    assert answers == ["InvalidTotpCode", "InvalidTotpCode", "InvalidPartialToken"]
    locked = office.ask("auth.totp_complete", {"partial_token": device.partial(), "code": device.code()})
    assert (locked.status, locked.code) == (429, "RateLimited")


def test_a_partial_token_lives_five_minutes(office: Office) -> None:
    device = Device(office, office.person())
    device.switch_on()
    partial = device.partial()
    office.wait(300)
    late = office.ask("auth.totp_complete", {"partial_token": partial, "code": device.code()})
    assert (late.status, late.code) == (401, "InvalidPartialToken")
    assert office.ask("auth.me", {}, partial).status == 401


def test_a_new_secret_replaces_one_that_was_not_confirmed(office: Office) -> None:
    ada = office.person()
    first, second = Device(office, ada), Device(office, ada)
    wrong = office.ask("auth.totp_confirm", {"code": first.code()}, ada)
    assert (wrong.status, wrong.code, wrong.param) == (400, "InvalidTotpCode", "code")
    second.switch_on()


def test_the_secret_is_kept_sealed_and_bound_to_its_person(office: Office) -> None:
    ada, eve = office.person(), office.person()
    device, other = Device(office, ada), Device(office, eve)
    with office.database.write() as unit:
        rows = {row.user_id: row.sealed for row in unit.select(select(table))}
        assert device.totp.secret.encode() not in rows[ada.id]
        unit.execute(table.update().where(table.c.user_id == eve.id).values(sealed=rows[ada.id]))
    moved = office.ask("auth.totp_confirm", {"code": device.code()}, eve)
    assert (moved.status, moved.code) == (500, "InternalError")
    assert other.totp.secret != device.totp.secret


@pytest.mark.parametrize("code", ["12345", "1234567", "12345a", "１２３４５６", ""])
def test_a_code_has_six_digits(office: Office, code: str) -> None:
    answer = office.ask("auth.totp_confirm", {"code": code}, office.person())
    assert (answer.status, answer.param) == (400, "code")


@given(st.integers(10, 10**9), st.integers(-5, 5))
def test_a_code_is_good_one_step_either_way(step: int, drift: int) -> None:
    code = pyotp.TOTP(SECRET).generate_otp(step + drift)
    found = matching_step(SECRET, code, step)
    assert found == step + drift if abs(drift) <= 1 else found is None or found != step + drift
