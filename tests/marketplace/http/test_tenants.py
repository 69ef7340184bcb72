"""Nobody sees what is another tenant's, whatever they send, and nothing that is sent makes a defect of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

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


_SHAPES: list[Callable[[str], Any]] = [
    lambda text: text,
    lambda text: {"ByTeam": text},
    lambda text: {"ById": [text]},
    lambda text: {"ById": text},
    lambda text: {"ByEmail": text},
    lambda text: {"ByUserIds": [text]},
    lambda text: {"ByTeamIds": [text]},
]


_FREE = ("name", "description")
"""What a caller may call its own things as it likes: that it reads a text there says nothing."""


class World(NamedTuple):
    """Callers, a team of the person's, and texts that only somebody else may read."""

    person: Caller
    team: Caller
    admin: Caller
    own: str
    texts: list[str]


@pytest.fixture(scope="module")
def world(sqlite_office: Office) -> World:
    """Two tenants: one that asks, and one with everything that there is to read."""
    ada = sqlite_office.person(balance=10**9)
    theirs = sqlite_office.team(owner=ada, name="their team")
    texts = [part for one in (ada, theirs) for part in (one.id, one.account_id, one.key_id)]
    texts += [ada.email, "their team", "of somebody else", "invited@example.org", "team key of somebody else"]
    sqlite_office.ask("keys.add", {"name": "of somebody else"}, ada)
    sqlite_office.ask("keys.add", {"name": "team key of somebody else", "team_id": theirs.id}, ada)
    sqlite_office.ask("teams.members_add", {"team_id": theirs.id, "email": "invited@example.org"}, ada)
    for who in (ada, theirs):
        texts += [line["id"] for line in sqlite_office.ask("account.transactions_list", {}, who).body["transactions"]]
        texts += [event["id"] for event in sqlite_office.ask("events.list", {}, who).body["events"]]
    person = sqlite_office.person()
    own = sqlite_office.team(owner=person, name="own team")
    return World(person, sqlite_office.team(name="another"), sqlite_office.person("admin"), own.id, texts)


@pytest.mark.parametrize("operation", TABLE, ids=lambda operation: operation.name)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_body_is_a_defect_or_opens_another_tenant(
    operation: Operation[Any], data: st.DataObject, sqlite_office: Office, world: World
) -> None:
    person, team, admin, own, texts = world
    if operation.rate == "login":
        sqlite_office.wait(3600)
    fields = [info.alias or name for name, info in operation.request.model_fields.items()]
    body = dict(operation.example)
    for field in fields:
        if data.draw(st.booleans()):
            shape = data.draw(st.sampled_from(_SHAPES))
            known = st.nothing() if field in _FREE else st.sampled_from(texts).map(shape)
            body[field] = data.draw(_VALUES | known)
    # Whoever adds somebody to a team by e-mail is told their id and name: everything else is asked in the team, too.
    if "team_id" in fields and operation.name != "teams.members_add" and data.draw(st.booleans()):
        body["team_id"] = own
    for who in (person, team, admin) if operation.permission else (None,):
        sqlite_office.wait(10)
        answer = sqlite_office.ask(operation.name, body, who)
        assert answer.status < 500, (body, answer.body)
        if who is not admin and answer.status == 200:
            told = json.dumps(answer.body, default=str)
            asked = json.dumps(body)
            assert not [text for text in texts if text in told and text not in asked], told
