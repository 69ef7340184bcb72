"""Requests and answers of saved environments."""

from __future__ import annotations

from marketplace.http.pagination import DEFAULT_LIMIT
from marketplace.http.wire import CursorText, Id, Instant, Limit, Wire


class ListRequest(Wire):
    """A page of saved environments of the caller or of a team, the last used first."""

    team_id: Id | None = None
    limit: Limit = DEFAULT_LIMIT
    cursor: CursorText | None = None


class EnvironmentAnswer(Wire):
    """The disk of a virtual machine that is over. Its id is what renting calls `reuse_environment_id`."""

    id: str
    name: str
    node_id: str
    node_hostname: str
    instance_type_name: str | None
    original_variant_name: str | None
    """null where it was of a shape that no catalog has"""
    os_label: str
    disk_size_bytes: int
    last_used_at: Instant
    expires_at: Instant


class ListAnswer(Wire):
    """Saved environments, and where to go on."""

    saved_environments: list[EnvironmentAnswer]
    next_cursor: str | None
