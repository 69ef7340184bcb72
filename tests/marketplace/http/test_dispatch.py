"""What the desk does when things go wrong on our side, and what it never tells."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.exc import OperationalError

from marketplace.http.dispatch import Desk, Incoming
from marketplace.http.operation import Operation, Steps

if TYPE_CHECKING:
    from tests.marketplace.conftest import Office


def broken(office: Office, error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Answer of an operation whose handler raises."""

    def run(call: object, request: object) -> None:
        raise error

    login: Operation[Any] = office.OPERATIONS["auth.login"]
    body = json.dumps({"email": "a@example.com", "password": "hunter2 hunter2"}).encode()
    answer = Desk(office.context).serve(replace(login, handler=Steps(run)), Incoming(headers={}, body=body))
    return answer.status, json.loads(answer.body)["error"], answer.headers


def test_a_defect_is_500_and_says_nothing_of_itself(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    status, error, headers = broken(office, KeyError("secret detail"))
    assert (status, error["code"]) == (500, "InternalError") and "secret detail" not in json.dumps(error)
    assert headers["X-Request-Id"] in caplog.text and "hunter2" not in caplog.text


def test_a_database_that_does_not_answer_is_503(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    status, error, headers = broken(office, OperationalError("SELECT 1", {}, Exception("no route")))
    assert (status, error["code"], headers["Retry-After"]) == (503, "ServiceUnavailable", "2")
    assert "no route" not in json.dumps(error) and "no route" in caplog.text


def test_what_was_sent_is_never_repeated(office: Office) -> None:
    body = {"email": ["hunter2"], "password": {"secret": "hunter2"}, "other": "hunter2"}
    answer = office.ask("auth.login", body)
    assert answer.status == 400
    assert [item["param"] for item in answer.body["error"]["details"]["errors"]] == ["email", "password", "other"]
    assert "hunter2" not in json.dumps(answer.body)


def test_answers_are_not_cached_or_sniffed(office: Office) -> None:
    for answer in (office.ask("auth.me", {}, office.person()), office.ask("auth.me", {})):
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in answer.headers
