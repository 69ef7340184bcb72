"""Which provider's node is speaking: by the key of a node, or in one of the ways that are going to end.

A person's session (a token, or a password that was exchanged for one) or personal key lets in the nodes of the provider
that the person acts for, as long as the settings admit it. Whoever comes in that way is told so with every answer, and
each registration leaves an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from marketplace.events import service as events
from marketplace.events.transitions import Scene
from marketplace.http import principal
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Context
from marketplace.keys import service as keys
from marketplace.keys.rules import PREFIXES, KeyFormatError, parse
from marketplace.providers import service as providers
from marketplace.settings import service as settings
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.users.permissions import Permission

SUNSET = "2027-06-30"
"""Until then nodes may sign in without a key of their own."""
HEADERS = {"Deprecation": "true", "Sunset": SUNSET}
_METHODS = {"session": "a token or password", "user_key": "a personal key"}


@dataclass(frozen=True, slots=True)
class NodeCaller:
    """Whose node it is."""

    provider_id: str
    credential_id: str
    deprecated: str | None = None
    """what it signed in with, where that is going to end"""

    @property
    def headers(self) -> dict[str, str]:
        """What every answer tells it beside the answer."""
        return {} if self.deprecated is None else HEADERS

    @property
    def warnings(self) -> list[str]:
        """What a registration tells it."""
        if self.deprecated is None:
            return []
        return [f"signing in with {self.deprecated} is deprecated and ends on {SUNSET}: make a key of kind node"]


def resolve(unit: ReadUnit, context: Context, headers: Mapping[str, str], address: str) -> NodeCaller:
    """Return whose node it is. `headers` have lower-case names.

    Refusal: NotAuthenticated; InvalidApiKey, InvalidToken, ExpiredToken, AmbiguousCredentials; CredentialsNotPermitted
    for credentials that let no node in, or none from this address; PermissionDenied for people who may make no keys for
    nodes.
    """
    _, _, bearer = headers.get("authorization", "").partition(" ")
    text = headers.get("x-api-key", bearer).strip()
    if not text:
        raise Refusal(Code.NOT_AUTHENTICATED, "No credential: send 'X-API-Key: <key of a node>'.")
    if text.startswith(PREFIXES["node"]):
        return _by_key(unit, context, text, address)
    who = principal.resolve(
        unit, headers, pepper=context.pepper, vault=context.vault, now=context.clock(), address=address
    )
    if who.user is None:
        raise Refusal(Code.CREDENTIALS_NOT_PERMITTED, f"A {who.kind} key is not for nodes.")
    if not settings.current(unit).node_legacy_auth:
        raise Refusal(Code.CREDENTIALS_NOT_PERMITTED, "Nodes sign in with a key of their own here, and no other way.")
    if Permission.KEYS_NODE not in who.permissions:
        raise Refusal(Code.PERMISSION_DENIED, "Only people who act for a provider may sign its nodes in.")
    provider = providers.provider_of(unit, who.user.id)
    if provider is None:
        raise Refusal(Code.CREDENTIALS_NOT_PERMITTED, "The person acts for no provider, so the node is nobody's.")
    return NodeCaller(provider.id, who.credential_id, _METHODS[who.credential])


def note(unit: WriteUnit, caller: NodeCaller, node_id: str, scene: Scene) -> None:
    """Leave an event of a registration in a way that is going to end."""
    if caller.deprecated is None:
        return
    events.record(
        unit,
        action="node.deprecated_login",
        actor_kind=scene.actor.kind,
        actor_id=scene.actor.id,
        credential_id=scene.actor.credential_id,
        owner_id=caller.provider_id,
        subject_id=node_id,
        detail={"with": caller.deprecated, "until": SUNSET},
        request_id=scene.actor.request_id,
        now=scene.now,
        random=scene.random,
    )


def _by_key(unit: ReadUnit, context: Context, text: str, address: str) -> NodeCaller:
    invalid = Refusal(Code.INVALID_API_KEY, "The API key is not valid: unknown, revoked, switched off or expired.")
    try:
        secret = parse(text)
    except KeyFormatError as error:
        raise invalid from error
    row = keys.find_usable(unit, secret, context.pepper, context.clock())
    if row is None:
        raise invalid
    if not keys.may_come_from(row, address):
        raise Refusal(Code.CREDENTIALS_NOT_PERMITTED, "The API key may not be used from this address.")
    return NodeCaller(row.owner_id, row.id)
