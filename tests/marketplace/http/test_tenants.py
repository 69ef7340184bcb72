"""Nobody sees what is another tenant's, whatever they send, and nothing that is sent makes a defect of ours."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marketplace.http.operation import Operation
from marketplace.operations import TABLE

if TYPE_CHECKING:
    from tests.marketplace.conftest import Caller, Office

_TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
_NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
_LEAVES = st.none() | st.booleans() | _NUMBERS | _TEXT
_SELECTORS = st.sampled_from(["ByToken", "Mine", "All", {"ByTeam": "t"}, {"ByUserIds": ["u"]}, {"ByTeamIds": []}])
_VALUES = st.recursive(
    _LEAVES | _SELECTORS | st.sampled_from(["2026-11-21T01:00:00Z", "000000", "a@example.com", 1, 10**9]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def world(sqlite_office: Office) -> tuple[Caller, Caller, Caller, list[str]]:
    """A person, a team and an admin, and texts that only somebody else may read."""
    secret = [sqlite_office.person(balance=10**9), sqlite_office.team()]
    texts = [part for one in secret for part in (one.id, one.account_id, one.key_id) if part]
    for one in secret[:1]:
        sqlite_office.ask("keys.add", {"name": "of somebody else"}, one)
        texts += [one.email, "of somebody else"]
        page = sqlite_office.ask("account.transactions_list", {}, one).body
        texts += [line["id"] for line in page["transactions"]]
    return sqlite_office.person(), sqlite_office.team(), sqlite_office.person("admin"), texts


@pytest.mark.parametrize("operation", TABLE, ids=lambda operation: operation.name)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_body_is_a_defect_or_opens_another_tenant(
    operation: Operation[Any], data: st.DataObject, sqlite_office: Office, world: Any
) -> None:
    person, team, admin, texts = world
    if operation.rate == "login":
        sqlite_office.wait(3600)
    fields = [info.alias or name for name, info in operation.request.model_fields.items()]
    body = dict(operation.example)
    for field in fields:
        if data.draw(st.booleans()):
            body[field] = data.draw(
                _VALUES | st.sampled_from(texts) | st.sampled_from(texts).map(lambda x: {"ByTeam": x})
            )
    for who in (person, team, admin) if operation.permission else (None,):
        sqlite_office.wait(10)
        answer = sqlite_office.ask(operation.name, body, who)
        assert answer.status < 500, (body, answer.body)
        if who is not admin and answer.status == 200:
            told = json.dumps(answer.body, default=str)
            asked = json.dumps(body)
            assert not [text for text in texts if text in told and text not in asked], told
