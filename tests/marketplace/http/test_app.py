"""The API over ASGI: bodies and their bound, methods, paths, threads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
from starlette.routing import Router

from marketplace.http import app
from marketplace.http.operation import Operation
from marketplace.mcp import McpEndpoint
from marketplace.operations import TABLE

if TYPE_CHECKING:
    from tests.marketplace.conftest import Office

Response = tuple[int, dict[str, str], bytes]


async def request(
    router: Router,
    path: str,
    chunks: Sequence[bytes] = (b"",),
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> Response:
    """Send one request whose body comes in chunks."""
    waiting = list(chunks)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not chunks:
            return {"type": "http.disconnect"}
        if not waiting:
            await asyncio.Event().wait()  # the client stays until it has its answer
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
        "client": ("198.51.100.1", 5),
        "server": ("127.0.0.1", 80),
    }
    await router(scope, receive, send)
    told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], told, b"".join(message.get("body", b"") for message in sent[1:])


@pytest.fixture(scope="module")
def router(sqlite_office: Office) -> Router:
    return Router(app.routes(TABLE, sqlite_office.context), redirect_slashes=False)


@pytest.mark.parametrize("operation", TABLE, ids=lambda operation: operation.name)
def test_a_body_beyond_the_bound_is_413_on_every_row(
    router: Router, operation: Operation[Any], sqlite_office: Office
) -> None:
    sqlite_office.wait(60)  # rate limits are another test's
    big = [b"x" * (1 << 19)] * 2
    status, headers, body = asyncio.run(request(router, operation.path, [*big, b"x"], method=operation.method))
    assert (status, json.loads(body)["error"]["code"]) == (413, "BodyTooLarge")
    assert headers["connection"] == "close"
    if operation.permission is not None:  # one byte less is only unauthenticated
        assert asyncio.run(request(router, operation.path, big, method=operation.method))[0] == 401


def test_a_request_goes_through(router: Router, sqlite_office: Office) -> None:
    ada = sqlite_office.person()
    status, headers, body = asyncio.run(
        request(router, "/api/v1/auth/me", [b'{"da', b'ta": {}}'], headers={"X-API-Key": ada.key})
    )
    assert status == 200 and json.loads(body)["data"]["id"] == ada.id
    assert headers["content-length"] == str(len(body)) and headers["content-type"] == "application/json"
    assert headers["x-request-id"]


def test_a_path_names_what_it_is_about(router: Router, sqlite_office: Office) -> None:
    ada = sqlite_office.person()
    team = sqlite_office.team(owner=ada)

    def ask(method: str, rest: str, body: bytes = b"") -> Response:
        path = f"/api/v1/teams/{team.id}{rest}"
        return asyncio.run(request(router, path, [body], method=method, headers={"X-API-Key": ada.key}))

    status, _, body = ask("GET", "")
    assert status == 200 and json.loads(body)["team"]["id"] == team.id
    status, _, body = ask("PUT", "", b'{"version": "v062", "data": {"name": "new"}}')
    assert status == 200 and json.loads(body)["data"]["name"] == "new"
    status, _, body = ask("PUT", "", b'{"name": "x", "team_id": "other"}')
    assert status == 400 and json.loads(body)["error"]["param"] == "team_id"
    invited = b'{"email": "new@example.com"}'
    assert ask("PUT", "/members/add", invited)[0] == 200
    status, headers, body = ask("POST", "/members/remove", b'{"selector": {"ByEmail": "new@example.com"}}')
    assert (status, body) == (204, b"") and not {"content-length", "content-type"} & headers.keys()
    assert ask("DELETE", "")[0] == 405


def test_other_methods_and_paths_are_refused_in_the_same_shape(router: Router) -> None:
    status, headers, body = asyncio.run(request(router, "/api/v1/auth/me", method="GET"))
    assert (status, headers["allow"], json.loads(body)["error"]["code"]) == (405, "POST", "MethodNotAllowed")
    for path in ("/api/v1/nothing", "/api/", "/api/v1/auth/me/"):
        status, _, body = asyncio.run(request(router, path, method="GET"))
        assert (status, json.loads(body)["error"]["code"]) == (404, "NotFound")


@pytest.mark.parametrize("path", ["/api/v1/auth/me", "/api/v1/auth/login", "/api/openapi.json", "/swagger-ui", "/mcp"])
@pytest.mark.parametrize("method", ["OPTIONS", "POST", "GET"])
def test_no_page_of_another_origin_may_read_an_answer(
    router: Router, sqlite_office: Office, path: str, method: str
) -> None:
    asked = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type"
    asked["x-api-key"] = sqlite_office.person().key
    full = Router([*router.routes, McpEndpoint(TABLE, sqlite_office.context).route()], redirect_slashes=False)
    status, headers, _ = asyncio.run(request(full, path, method=method, headers=asked))
    assert not [name for name in headers if name.startswith("access-control-")]
    assert method != "OPTIONS" or status in (404, 405)


@pytest.mark.parametrize("path", ["/api/v1/auth/me", "/api/v1/nothing", "/api/openapi.json", "/swagger-ui", "/rapidoc"])
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_every_answer_tells_browsers_to_be_careful(
    router: Router, sqlite_office: Office, path: str, method: str
) -> None:
    key = {"x-api-key": sqlite_office.person().key}
    status, headers, _ = asyncio.run(request(router, path, method=method, headers=key))
    if status == 405 and not path.startswith("/api/v1"):
        return  # a page that was not asked for
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_a_client_that_leaves_gets_nothing_and_breaks_nothing(router: Router) -> None:
    with pytest.raises(IndexError):  # no answer was sent
        asyncio.run(request(router, "/api/v1/auth/me", []))
    assert asyncio.run(request(router, "/api/v1/auth/me"))[0] == 401


def test_a_body_that_does_not_come_is_408(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.0)

    async def main() -> Response:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError("nothing arrives")

        async def send(message: Any) -> None:
            sent.append(message)

        await router({"type": "http", "method": "POST", "path": "/api/v1/auth/me", "headers": []}, receive, send)
        return sent[0]["status"], {}, sent[1]["body"]

    status, _, body = asyncio.run(main())
    assert (status, json.loads(body)["error"]["code"]) == (408, "RequestTimeout")


def test_many_at_once(router: Router, sqlite_office: Office) -> None:
    people = [sqlite_office.person() for _ in range(12)]

    async def main() -> list[Response]:
        return await asyncio.gather(
            *(
                request(router, "/api/v1/api-keys/add", [b'{"name": "k"}'], headers={"X-API-Key": ada.key})
                for ada in people
            )
        )

    answers = asyncio.run(main())
    assert [status for status, _, _ in answers] == [200] * 12
    assert len({json.loads(body)["key"] for _, _, body in answers}) == 12


def test_the_document_and_its_pages_are_served_from_installed_files(router: Router) -> None:
    async def get(path: str) -> Response:
        return await request(router, path, method="GET")

    status, _, body = asyncio.run(get("/api/openapi.json"))
    assert status == 200 and "/api/v1/auth/login" in json.loads(body)["paths"]
    for page, assets in {
        "/swagger-ui": ["/swagger-ui/swagger-ui.css", "/swagger-ui/swagger-ui-bundle.js", "/swagger-ui/start.js"],
        "/rapidoc": ["/rapidoc/rapidoc.js"],
    }.items():
        status, headers, body = asyncio.run(get(page))
        assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'self'" in headers["content-security-policy"]
        assert b"http" not in body.replace(b"http-equiv", b"")  # nothing from elsewhere
        for name in assets:
            assert name.encode() in body
            status, _, content = asyncio.run(get(name))
            assert status == 200 and len(content) > 100
