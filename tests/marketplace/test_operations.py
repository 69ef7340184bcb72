"""Every row of the table: who may call it, in which version, with what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from marketplace.http.errors import Code
from marketplace.http.openapi import codes
from marketplace.http.operation import Keyed, Operation, Planned, Writes
from marketplace.http.wire import Wire
from marketplace.operations import TABLE
from marketplace.users.permissions import OF_ROLE, OF_SERVICE_KEY, OF_TEAM_KEY, Permission

if TYPE_CHECKING:
    from tests.marketplace.conftest import Answer, Caller, Office

every_row = pytest.mark.parametrize("operation", TABLE, ids=lambda operation: operation.name)
every_read_body = pytest.mark.parametrize(
    "operation", [row for row in TABLE if not row.opaque], ids=lambda operation: operation.name
)
Row = Operation[Any]


@pytest.fixture(scope="module")
def callers(sqlite_office: Office) -> dict[str, Caller]:
    """One of each role, a team and a service."""
    found = {role: sqlite_office.person(role) for role in OF_ROLE}
    return {**found, "team": sqlite_office.team(), "service": sqlite_office.service()}


def admitted(operation: Row, office: Office, callers: dict[str, Caller]) -> Caller | str | None:
    """Somebody whom the operation admits."""
    if operation.permission is None:
        return None
    if operation.credentials == {"service_key"}:
        return callers["service"]
    return callers["admin"] if "user_key" in operation.credentials else office.login(callers["admin"])


def ask(office: Office, operation: Row, *rest: Any, **more: Any) -> Answer:
    office.wait(3600)  # rate limits are another test's
    return office.ask(operation.name, *rest, **more)


def test_names_and_paths_are_unique() -> None:
    assert len({operation.name for operation in TABLE}) == len(TABLE)
    assert len({(operation.method, operation.path) for operation in TABLE}) == len(TABLE)
    assert {operation.permission for operation in TABLE} | {
        Permission.ACCOUNT_READ_ALL,
        Permission.EVENTS_READ_ALL,
        Permission.PAYMENTS_READ_ALL,
        Permission.KEYS_NODE,
        Permission.KEYS_SERVICE,
        Permission.TEAMS_READ_ALL,
        Permission.TEAMS_WRITE_ALL,
        Permission.USERS_READ_ALL,
        Permission.PROVIDERS_READ_ALL,
        Permission.NODES_READ_ALL,
        Permission.INSTANCES_READ_ALL,
        Permission.INSTANCES_WRITE_ALL,
        Permission.INSTANCES_VIEW_CREDENTIALS,
        Permission.NETWORKS_READ_ALL,
        Permission.QUOTAS_READ_ALL,
        Permission.RESERVATIONS_READ_ALL,
    } == {
        None,
        *Permission,
    }


@every_row
def test_the_row_is_complete(operation: Row) -> None:
    assert operation.summary.endswith(".")
    assert operation.request.model_validate(dict(operation.example)) is not None
    assert operation.request.model_config["extra"] == "forbid" and issubclass(operation.request, Wire)
    assert operation.path.startswith(("/api/v1/", "/api/v2/", "/public/"))
    assert list(operation.versions) == sorted(operation.versions)
    assert not operation.idempotent or isinstance(operation.handler, Writes | Planned | Keyed)


@every_row
def test_without_a_credential_it_is_401(operation: Row, sqlite_office: Office) -> None:
    answer = ask(sqlite_office, operation, dict(operation.example))
    if operation.permission is None:
        assert answer.status == operation.success or answer.code != "NotAuthenticated"
    else:
        assert (answer.status, answer.code) == (401, "NotAuthenticated")
        assert answer.headers["WWW-Authenticate"] == "Bearer"


@every_row
def test_whoever_lacks_the_permission_or_the_kind_of_credential_gets_403(
    operation: Row, sqlite_office: Office, callers: dict[str, Caller]
) -> None:
    held = {role: OF_ROLE[role] for role in OF_ROLE} | {"team": OF_TEAM_KEY, "service": OF_SERVICE_KEY}
    for role, permissions in held.items():
        if operation.permission is None:
            continue
        answer = ask(sqlite_office, operation, {"no": "thing"}, callers[role])
        credential = f"{role}_key" if role in ("team", "service") else "user_key"
        if credential not in operation.credentials:
            assert (answer.status, answer.code) == (403, "CredentialsNotPermitted"), role
        elif operation.permission not in permissions:
            assert (answer.status, answer.code) == (403, "PermissionDenied"), role
        else:
            assert answer.status == 400, (role, answer.body)
    assert all(OF_ROLE["admin"] >= permissions for permissions in held.values())


@every_row
def test_a_version_older_than_it_serves_is_400(
    operation: Row, sqlite_office: Office, callers: dict[str, Caller]
) -> None:
    who = admitted(operation, sqlite_office, callers)
    for version in ("v001", "banana", ""):
        answer = ask(sqlite_office, operation, dict(operation.example), who, X_Protocol_Version=version)
        assert (answer.status, answer.code) == (400, "UnsupportedVersion")
        assert answer.body["error"]["details"]["accepted"] == list(operation.versions)
        if operation.opaque:
            continue
        enveloped = ask(sqlite_office, operation, {"version": version, "data": {}}, who)
        assert (enveloped.status, enveloped.code) == (400, "UnsupportedVersion")


@every_read_body
def test_an_unknown_field_is_400_and_named(operation: Row, sqlite_office: Office, callers: dict[str, Caller]) -> None:
    who = admitted(operation, sqlite_office, callers)
    answer = ask(sqlite_office, operation, {**operation.example, "surprise": 1}, who)
    assert (answer.status, answer.code, answer.param) == (400, "ValidationFailed", "surprise")


@every_read_body
def test_a_field_of_the_wrong_type_is_400_and_named(
    operation: Row, sqlite_office: Office, callers: dict[str, Caller]
) -> None:
    who = admitted(operation, sqlite_office, callers)
    for field in operation.example:
        answer = ask(sqlite_office, operation, {**operation.example, field: [{"wrong": [1]}]}, who)
        assert (answer.status, answer.code) == (400, "ValidationFailed")
        assert str(answer.param).partition(".")[0] == field  # of a list of objects, the member and its field
    missing = [info.alias or name for name, info in operation.request.model_fields.items() if info.is_required()]
    for field in missing:
        body = {name: value for name, value in operation.example.items() if name != field}
        answer = ask(sqlite_office, operation, body, who)
        assert (answer.status, answer.code, answer.param) == (400, "ValidationFailed", field)


@every_read_body
@pytest.mark.parametrize(
    "raw", [b"{", b"[]", b"null", b'"x"', b"\xff", b'{"a": NaN}', b"[" * 50_000, b'{"a": "\\u0000"}', b"1" * 9000]
)
def test_what_is_not_an_object_is_400(
    operation: Row, raw: bytes, sqlite_office: Office, callers: dict[str, Caller]
) -> None:
    answer = ask(sqlite_office, operation, None, admitted(operation, sqlite_office, callers), raw=raw)
    assert answer.status == 400 and answer.code in ("BadRequest", "ValidationFailed")


@every_row
def test_answers_have_only_the_codes_that_the_document_lists(operation: Row) -> None:
    listed = codes(operation)
    assert len(set(listed)) == len(listed)
    assert {Code.VALIDATION_FAILED, Code.BODY_TOO_LARGE} <= set(listed)
    assert (Code.NOT_AUTHENTICATED in listed) == (operation.permission is not None)
