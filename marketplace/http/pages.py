"""The document, the two reference pages that show it, and the few pages for people: those that links in mails lead to.

The scripts of the reference pages come from installed packages, those of the others from the folder `site`: no page
loads anything from elsewhere, and their security policies say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from marketplace.auth.letters import RESET_PAGE, VERIFY_PAGE
from marketplace.http.openapi import document
from marketplace.http.operation import Operation

DOCUMENT = "/api/openapi.json"
SITE = Path(__file__).parent / "site"
_POLICY = {
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
_SITE_POLICY = {
    **_POLICY,
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
}
_ASSETS = {
    "/swagger-ui/swagger-ui.css": ("swagger-ui-py", "swagger_ui/static/swagger-ui.css"),
    "/swagger-ui/swagger-ui-bundle.js": ("swagger-ui-py", "swagger_ui/static/swagger-ui-bundle.js"),
    "/rapidoc/rapidoc.js": ("star-openapi-rapidoc", "star_openapi_rapidoc/templates/rapidoc/js/rapidoc-min.js"),
}
_SITE = {
    "/": "index.html",
    "/register": "register.html",
    VERIFY_PAGE: "verify-email.html",
    RESET_PAGE: "reset-password.html",
    "/site/page.css": "page.css",
    "/site/page.js": "page.js",
}
_SWAGGER = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Headrace management API</title>
<link rel="stylesheet" href="/swagger-ui/swagger-ui.css"></head>
<body><div id="swagger-ui"></div>
<script src="/swagger-ui/swagger-ui-bundle.js"></script><script src="/swagger-ui/start.js"></script></body></html>
"""
_SWAGGER_START = """SwaggerUIBundle({url: "/api/openapi.json", dom_id: "#swagger-ui", deepLinking: true,
  displayOperationId: true, presets: [SwaggerUIBundle.presets.apis], layout: "BaseLayout", validatorUrl: null});
"""
_RAPIDOC = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Headrace management API</title>
<script type="module" src="/rapidoc/rapidoc.js"></script></head>
<body><rapi-doc spec-url="/api/openapi.json" render-style="read" load-fonts="false"></rapi-doc></body></html>
"""


def routes(table: Sequence[Operation[Any]]) -> list[Route]:
    """Routes of the document, of all pages and of what they load."""
    html, script = "text/html; charset=utf-8", "text/javascript; charset=utf-8"
    made = [
        _described(table),
        _fixed("/swagger-ui", _SWAGGER.encode(), html),
        _fixed("/swagger-ui/start.js", _SWAGGER_START.encode(), script),
        _fixed("/rapidoc", _RAPIDOC.encode(), html),
    ]
    made += [_file(path, asset(package, name)) for path, (package, name) in _ASSETS.items()]
    return [*made, *(_page(path, SITE / name) for path, name in _SITE.items())]


def asset(package: str, name: str) -> Path:
    """Where an installed package keeps a file; the package's own code is never run."""
    return Path(str(distribution(package).locate_file(name)))


class Page(Route):
    """Something to look at; for other methods than GET and HEAD there is nothing here."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether a request is for it."""
        match, child = super().matches(scope)
        return (match if match is Match.FULL else Match.NONE), child


def _described(table: Sequence[Operation[Any]]) -> Route:
    """The document. Describing every model takes a moment, so the first who asks has it made, beside the event loop."""

    @cache
    def content() -> bytes:
        return orjson.dumps(document(table))

    def answer(request: Request) -> Response:  # not async: it runs in a thread
        return Response(content(), media_type="application/json", headers=_POLICY)

    return Route(DOCUMENT, answer, methods=["GET"])


def _fixed(path: str, content: bytes, media_type: str) -> Route:
    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=_POLICY)

    return Route(path, answer, methods=["GET"])


def _file(path: str, file: Path) -> Route:
    async def answer(request: Request) -> Response:
        return FileResponse(file, headers=_POLICY)

    return Route(path, answer, methods=["GET"])


def _page(path: str, file: Path) -> Route:
    async def answer(request: Request) -> Response:
        return FileResponse(file, headers=_SITE_POLICY)

    return Page(path, answer, methods=["GET"])
