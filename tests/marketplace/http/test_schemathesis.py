"""The whole document against the whole API: whatever is sent, by whomever, is answered as the document says.

Bodies are generated from the document, right ones and wrong ones, half of them with ids that exist. Each is sent as a
user, a provider, an admin, a team, a service and nobody; what takes a session gets one. No answer is a defect (5xx),
and each has a documented status and content type, and a body that fits its schema.
"""

from __future__ import annotations

import re
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.python import asgi
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Router

from marketplace.http import app
from marketplace.http.operation import Operation
from marketplace.operations import TABLE
from tests.marketplace.http.grounds import Grounds

if TYPE_CHECKING:
    from marketplace.users.rules import Role
    from tests.marketplace.conftest import Caller, Office

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
CREDENTIALS = ("authorization", "x-api-key")
EXAMPLES, MANY = 1, 60
NO_SUCCESS = frozenset(
    {
        *("auth.login", "auth.totp_complete", "auth.totp_confirm", "auth.totp_disable", "auth.verify_email"),
        *("auth.reset_password", "auth.oauth_start", "auth.oauth_link", "auth.oauth_exchange", "payments.webhook"),
        "providers.create",
    }
)
"""Operations whose example lacks a secret that no document tells, or names what is taken."""
every_row = pytest.mark.parametrize("operation", TABLE, ids=lambda operation: operation.name)


class World:
    """A shop with people in it, and the API in front of it."""

    def __init__(self, office: Office) -> None:
        self.office = office
        router = Router(app.routes(TABLE, office.context), redirect_slashes=False)
        self.document = schemathesis.openapi.from_asgi("/api/openapi.json", router)
        self.http = asgi.get_client(router)
        roles: tuple[Role, ...] = ("user", "provider", "admin")
        self.callers: dict[str, Caller] = {role: office.person(role, balance=10**12) for role in roles}
        self.callers["team"] = office.team(owner=self.callers["user"])
        self.callers["service"] = office.service()
        self.grounds = Grounds(office, self.callers["user"], self.callers["admin"])
        self.known: dict[str, Any] = {}

    def refresh(self, operation: Operation[Any]) -> None:
        """Things that exist and that a request may change or end, by the names that fields have for them."""
        office, user, admin, now = self.office, self.callers["user"], self.callers["admin"], self.office.clock()
        office.wait(3600)
        self.grounds.wake()
        other, team = office.person(balance=10**12), office.team(owner=user)
        provider = office.service(provider=f"company {now}").id
        key = office.ask("keys.add", {"name": f"key {now}"}, user).body["id"]
        payment = office.ask("payment_intent.create", {"amount_cents": 2000}, user).body["payment_intent_id"]
        prepared = [
            ("teams.members_add", {"team_id": team.id, "email": other.email}, user),
            ("teams.members_add", {"team_id": team.id, "email": admin.email, "role": "Owner"}, user),
            ("providers.members_add", {"provider_id": provider, "selector": {"ById": other.id}}, admin),
        ]
        if operation.name == "payments.refund":
            prepared.append(("payments.confirm", {"payment_intent_id": payment}, admin))
        for name, body, who in prepared:
            assert office.ask(name, body, who).status == 200, name
        self.known = {
            **dict.fromkeys(("user_id", "ById", "ByUserIds"), other.id),
            **dict.fromkeys(("team_id", "ByTeam", "ByTeamIds"), team.id),
            "ByEmail": other.email,
            "email": f"new{now}@example.com",
            "id": key,
            "request_id": f"request-{now}",
            "provider_id": provider,
            "payment_intent_id": payment,
            "X-On-Behalf-Of": f"user:{other.id}",
            **self.grounds.known(operation.name),
        }

    def credentials(self, operation: Operation[Any]) -> list[dict[str, str]]:
        """Headers of everybody who sends a request; where nobody is asked who they are, one credential is enough."""
        if operation.permission is None:
            return [{}, {"X-API-Key": self.callers["admin"].key}]
        found: list[dict[str, str]] = [{}, *({"X-API-Key": who.key} for who in self.callers.values())]
        if "session" in operation.credentials and "user_key" not in operation.credentials:
            found.append({"Authorization": f"Bearer {self.office.login(self.callers['user'])}"})
        return found

    def put_known(self, data: Any, random: Random, share: float) -> Any:
        """The data, with what exists in a share of the places that name such things."""
        if isinstance(data, dict):
            return {
                name: self._instead_of(name, value)
                if name in self.known and random.random() < share
                else self.put_known(value, random, share)
                for name, value in data.items()
            }
        return [self.put_known(item, random, share) for item in data] if isinstance(data, list) else data

    def _instead_of(self, name: str, value: Any) -> Any:
        known = self.known[name]
        return [known] if isinstance(value, list) and known is not None else known


@pytest.fixture(scope="module")
def world(sqlite_office: Office) -> World:
    return World(sqlite_office)


def send(world: World, operation: Operation[Any], case: schemathesis.Case, statuses: set[int]) -> None:
    """Send a request as everybody."""
    world.office.wait(3600)  # rate limits are another test's
    world.grounds.wake()
    sent = {name: value for name, value in (case.headers or {}).items() if name.lower() not in CREDENTIALS}
    for headers in world.credentials(operation):
        case.headers = {**sent, **headers}
        answer = case.call(session=world.http)
        case.validate_response(answer, checks=CHECKS)
        statuses.add(answer.status_code)


def ask_example(world: World, operation: Operation[Any]) -> set[int]:
    """Send the example of an operation as everybody; returns the statuses of the answers."""
    statuses: set[int] = set()
    world.refresh(operation)
    example = world.put_known(dict(operation.example), Random(0), 1.0)
    named = {name: example.pop(name) for name in re.findall(r"{(\w+)}", operation.path)}
    headers = {name: world.known[name] for name in operation.headers if name in world.known}
    body = {} if operation.method == "GET" else {"body": example, "media_type": "application/json"}
    described = world.document[operation.path][operation.method]
    send(world, operation, described.Case(path_parameters=named, headers=headers, **body), statuses)
    return statuses


def answered(operation: Operation[Any], statuses: set[int]) -> bool:
    """Whether somebody was let in, and somebody refused: else a request showed nothing."""
    refused = operation.permission is None or bool(statuses & {401, 403})
    return refused and (operation.name in NO_SUCCESS or bool(statuses & {200, 201, 204}))


def explore(world: World, operation: Operation[Any], examples: int) -> set[int]:
    """Send generated requests, most of them right ones, as everybody; returns the statuses of the answers."""
    described = world.document[operation.path][operation.method]
    statuses: set[int] = set()
    right, wrong = (described.as_strategy(generation_mode=mode) for mode in GenerationMode)

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(case=st.one_of(right, right, wrong), seed=st.integers(0, 2**32))
    def try_out(case: schemathesis.Case, seed: int) -> None:
        random = Random(seed)
        case.body = world.put_known(case.body, random, 0.5)
        case.path_parameters = world.put_known(case.path_parameters, random, 0.8)
        # Most versions that can be made up are refused before anything else is looked at.
        sent = {name: value for name, value in (case.headers or {}).items() if random.random() < 0.3}
        case.headers = {**sent, **world.put_known(dict.fromkeys(operation.headers, ""), random, 0.7)}
        send(world, operation, case, statuses)

    try_out()
    return statuses


@every_row
def test_what_is_answered_is_what_the_document_says(world: World, operation: Operation[Any]) -> None:
    statuses = ask_example(world, operation)
    assert answered(operation, statuses), statuses
    assert explore(world, operation, EXAMPLES), "nothing was sent"


@pytest.mark.slow
@every_row
def test_what_is_answered_to_much_more(world: World, operation: Operation[Any]) -> None:
    statuses = ask_example(world, operation)
    assert answered(operation, statuses), statuses
    assert explore(world, operation, MANY), "nothing was sent"


def test_the_shop_is_still_in_order(world: World) -> None:
    """After everything that was tried: the books are clean, and the admin's key works."""
    from marketplace.ledger.audit import audit

    with world.office.database.read() as unit:
        report = audit(unit, now=world.office.now)
    assert report.clean, report.failed
    assert world.office.ask("auth.me", {}, world.callers["admin"]).status == 200
