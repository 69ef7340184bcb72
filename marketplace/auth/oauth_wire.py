"""Requests and answers of signing in elsewhere."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from marketplace.http.wire import Instant, Wire

Secret = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class ProvidersAnswer(Wire):
    """Names of the issuers at which people may sign in."""

    providers: list[str]


class StartRequest(Wire):
    """Where to sign in, and where to come back to: an address of this server or of the person's own machine."""

    provider: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    redirect_uri: Annotated[
        str | None,
        Field(
            min_length=1, max_length=2000, description="as registered at the issuer; by default /oauth/callback here"
        ),
    ] = None


class StartAnswer(Wire):
    """Send the person to `authorization_url`. They come back with `code` and `state`: compare the state, and exchange
    both together with `secret`, which never leaves the browser."""

    authorization_url: str
    state: str
    secret: str
    expires_at: Instant


class ExchangeRequest(Wire):
    """What the person brought back, and the secret of the start."""

    state: Secret
    code: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    secret: Secret
