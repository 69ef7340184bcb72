"""Settings over the API: who may, what is refused, what is recorded, when it counts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from marketplace.settings import service
from marketplace.settings.cache import POLL_US
from marketplace.settings.rules import DEFAULTS

if TYPE_CHECKING:
    from tests.marketplace.conftest import Office


def test_admins_list_them_and_one_who_only_reads_changes_nothing(office: Office) -> None:
    reader, person = office.person("readonly_admin"), office.person()
    listed = office.ask("app_settings.list", {}, reader).body
    assert listed["settings"] == listed["defaults"]
    assert listed["settings"]["erase_stray_grace_period"] == 259_200
    assert (listed["settings"]["signup_bonus"], listed["settings"]["payment_maximum"]) == (100, 1_000_000)
    for name in ("app_settings.update", "app_settings.refresh"):
        body: dict[str, Any] = {"settings": {}} if name.endswith("update") else {}
        assert office.ask(name, body, reader).code == "PermissionDenied"
    assert office.ask("app_settings.list", {}, person).code == "PermissionDenied"


def test_a_change_is_recorded_with_old_and_new(office: Office) -> None:
    admin = office.person("admin")
    changed = office.ask(
        "app_settings.update", {"settings": {"vm_readiness_timeout": 900, "low_balance_threshold": 2.5}}, admin
    )
    assert changed.status == 200
    assert changed.body["settings"]["vm_readiness_timeout"] == 900
    listed = office.ask("app_settings.list", {}, admin).body
    assert str(listed["settings"]["low_balance_threshold"]) == "2.5"
    assert listed["defaults"]["vm_readiness_timeout"] == 600
    events = office.ask("events.list", {}, admin).body["events"]
    assert {item["action"] for item in events} == {"settings.update"}
    assert {item["subject_id"]: item["detail"] for item in events} == {
        "vm_readiness_timeout": {"old": 600, "new": 900},
        "low_balance_threshold": {"old": 5 * 10**9, "new": 25_000_000},
    }
    again = office.ask("app_settings.update", {"settings": {"vm_readiness_timeout": 900}}, admin)
    assert again.status == 200
    assert len(office.ask("events.list", {}, admin).body["events"]) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vm_readiness_timeout", -1),
        ("vm_readiness_timeout", 1.5),
        ("vm_readiness_timeout", True),
        ("vm_readiness_timeout", None),
        ("vm_readiness_timeout", 10**12),
        ("allow_custom_instances", 1),
        ("allow_custom_instances", "yes"),
        ("server_currency", "eur"),
        ("server_currency", "JPY"),
        ("quota_status", 418),
        ("signup_bonus", -1),
        ("signup_bonus", 0.00000001),
        ("signup_bonus", "100"),
        ("payment_minimum", 100_000_000),
        ("provider_share", 10_001),
        ("read_per_minute", 0),
        ("no_such_setting", 1),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(sqlite_office: Office, name: str, value: object) -> None:
    sqlite_office.wait(60)
    admin = sqlite_office.person("admin")
    answer = sqlite_office.ask("app_settings.update", {"settings": {name: value, "read_burst": 50}}, admin)
    assert (answer.status, answer.code, answer.param) == (400, "ValidationFailed", f"settings.{name}")
    with sqlite_office.database.read() as unit:
        assert service.current(unit) == DEFAULTS


def test_null_is_a_value_where_it_means_something(office: Office) -> None:
    admin = office.person("admin")
    for value in (402, None):
        answer = office.ask("app_settings.update", {"settings": {"quota_status": value}}, admin)
        assert (answer.status, answer.body["settings"]["quota_status"]) == (200, value)


def test_rates_follow_within_a_second_and_at_once_after_a_refresh(office: Office) -> None:
    admin = office.person("admin")
    assert office.ask("app_settings.list", {}, admin).headers["RateLimit-Limit"] == "100"
    office.ask("app_settings.update", {"settings": {"read_burst": 42}}, admin)
    assert office.ask("app_settings.list", {}, admin).headers["RateLimit-Limit"] == "100"
    office.wait(POLL_US / 1_000_000)
    assert office.ask("app_settings.list", {}, admin).headers["RateLimit-Limit"] == "42"
    office.ask("app_settings.update", {"settings": {"read_burst": 43}}, admin)
    refreshed = office.ask("app_settings.refresh", {}, admin)
    assert refreshed.body["settings"]["read_burst"] == 43 and refreshed.body["refreshed_at"].startswith("2027-")
    assert office.ask("app_settings.list", {}, admin).headers["RateLimit-Limit"] == "43"
    assert "settings.refresh" in [item["action"] for item in office.ask("events.list", {}, admin).body["events"]]


def test_changes_at_once_are_made_one_after_the_other(office: Office) -> None:
    admin = office.person("admin")
    together = threading.Barrier(4)

    def change(burst: int) -> None:
        together.wait()
        assert office.ask("app_settings.update", {"settings": {"write_burst": burst}}, admin).status == 200

    threads = [threading.Thread(target=change, args=(100 + number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    details = [item["detail"] for item in office.ask("events.list", {}, admin).body["events"]]
    follows = {item["old"]: item["new"] for item in details}
    at = DEFAULTS.write_burst
    for _ in details:
        at = follows[at]
    assert len(details) == 4
    assert at == office.ask("app_settings.list", {}, admin).body["settings"]["write_burst"]
