"""Operations on saved environments: they can only be read; renting uses them."""

from __future__ import annotations

from typing import Any

from marketplace.environments import listing
from marketplace.environments.wire import EnvironmentAnswer, ListAnswer, ListRequest
from marketplace.http.acting import party
from marketplace.http.errors import Code
from marketplace.http.operation import Call, Operation, Reads
from marketplace.http.pagination import next_cursor
from marketplace.store.db import ReadUnit
from marketplace.users.permissions import Permission


def list_environments(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of saved environments."""
    mine = party(call, unit, request.team_id)
    found = listing.page(unit, mine.account_id, call.now, cursor=request.cursor, limit=request.limit)
    return ListAnswer(
        saved_environments=[
            EnvironmentAnswer(
                id=row.id,
                name=row.name,
                node_id=row.node_id,
                node_hostname=row.hostname,
                instance_type_name=row.instance_type,
                original_variant_name=row.variant,
                os_label=row.os_label,
                disk_size_bytes=row.disk_bytes,
                last_used_at=row.last_used_at,
                expires_at=row.expires_at,
            )
            for row in found[: request.limit]
        ],
        next_cursor=next_cursor([(row.last_used_at, row.id) for row in found], request.limit),
    )


OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="instances.saved_environments_list",
        summary="Disks of virtual machines that are over, and that can still be rented again, the last used first.",
        path="/api/v1/instances/saved-environments/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.INSTANCES_READ,
        rate="read",
        handler=Reads(list_environments),
        example={"team_id": None},
        answer={
            "saved_environments": [
                {
                    "id": "019a0f6c-2a00-7abc-8def-000000000040",
                    "name": "abaft-yak-4159",
                    "node_id": "019a0f6c-2a00-7abc-8def-000000000020",
                    "node_hostname": "g07",
                    "instance_type_name": "h200-141gb",
                    "original_variant_name": "h200-141gb.1",
                    "os_label": "ubuntu-24.04",
                    "disk_size_bytes": 214748364800,
                    "last_used_at": "2026-11-21T01:00:00Z",
                    "expires_at": "2026-11-22T01:00:00Z",
                }
            ],
            "next_cursor": None,
        },
        errors=(Code.NOT_TEAM_MEMBER,),
    ),
)
