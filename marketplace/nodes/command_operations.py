"""Operations that ask nodes to do something once, and tell what became of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field
from sqlalchemy import func, select

from marketplace.events.transitions import scene_of
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Writes
from marketplace.http.wire import Id, Instant, Wire
from marketplace.nodes import commands, listing
from marketplace.nodes.operations import lock, owners
from marketplace.nodes.tables import gpu
from marketplace.nodes.wire import ById, Text
from marketplace.placement import claims
from marketplace.placement.tables import gpu_slice_claim
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.users.permissions import Permission

RESET_US = 600 * 1_000_000
"""After so long without a word a reset is lost."""


class ResetRequest(Wire):
    """A GPU of a node."""

    node_id: Id
    pci_slot: Text


class ResetAnswer(Wire):
    """What was asked of the node, by which what became of it is found."""

    command_id: str


class CommandsRequest(Wire):
    """Nodes, and how much of what they were asked."""

    selector: ById
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class CommandAnswer(Wire):
    """Something that a node was asked to do once."""

    id: str
    node_id: str
    kind: str
    args: dict[str, str]
    status: Literal["Queued", "Completed", "Failed", "Lost"]
    output: str
    issued_at: Instant
    finished_at: Instant | None


class CommandsAnswer(Wire):
    """What nodes were asked last, newest first."""

    commands: list[CommandAnswer]


def reset(call: Call, unit: WriteUnit, request: ResetRequest) -> ResetAnswer:
    """Have a GPU reset that nobody has. Whoever would get it meanwhile waits until that is done."""
    (row,) = lock(call, unit, ById(ById=[request.node_id]), param="node_id")
    mine = (gpu.c.node_id == row.id, gpu.c.pci_slot == request.pci_slot, gpu.c.present)
    gpu_id = unit.select(select(gpu.c.id).where(*mine)).scalar_one_or_none()
    if gpu_id is None:
        raise Refusal(Code.VALIDATION_FAILED, "pci_slot: the node has no such GPU", param="pci_slot")
    live = (gpu_slice_claim.c.gpu_id == gpu_id, gpu_slice_claim.c.released_at.is_(None))
    held = unit.select(select(func.count(gpu_slice_claim.c.owner_id.distinct())).where(*live)).scalar_one()
    if held:
        raise Refusal(
            Code.NODE_IN_USE,
            "Somebody has the GPU: drain the node, or wait until it is free.",
            param="pci_slot",
            details={"node_id": row.id, "holders": held},
        )
    if row.status != "Ready":
        raise Refusal(Code.NODE_NOT_RESPONDING, f"{row.hostname} is {row.status}.", param="node_id")
    scene = scene_of(call)
    command_id = commands.ask(
        unit,
        row.id,
        "gpu_reset",
        {"pci_slot": request.pci_slot},
        session_id=row.session_id,
        deadline=call.now + RESET_US,
        now=scene.now,
        random=scene.random,
    )
    claims.changed(unit, row.id)
    call.record(unit, "nodes.gpu_reset", owner_id=row.provider_id, subject_id=row.id, pci_slot=request.pci_slot)
    return ResetAnswer(command_id=command_id)


def list_commands(call: Call, unit: ReadUnit, request: CommandsRequest) -> CommandsAnswer:
    """Return what nodes that the caller runs were asked last; others are absent."""
    found = listing.rows(unit, ids=request.selector.ids, provider_ids=owners(call, unit))
    return CommandsAnswer(
        commands=[
            CommandAnswer(
                id=row.id,
                node_id=row.node_id,
                kind=row.kind,
                args=msgspec.json.decode(row.args, type=dict[str, str]),
                status=row.status,
                output=row.output,
                issued_at=row.issued_at,
                finished_at=row.finished_at,
            )
            for row in commands.latest(unit, [one.id for one in found], request.limit)
        ]
    )


_NODE = "019a0f6c-2a00-7abc-8def-000000000021"
_COMMAND = "019a0f6c-2a00-7abc-8def-000000000022"

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="nodes.gpu_reset",
        summary="Have a GPU reset that nobody has.",
        path="/api/v1/nodes/gpu_reset",
        request=ResetRequest,
        response=ResetAnswer,
        permission=Permission.NODES_WRITE,
        rate="write",
        handler=Writes(reset),
        example={"node_id": _NODE, "pci_slot": "0000:1b:00.0"},
        answer={"command_id": _COMMAND},
        errors=(Code.NODE_NOT_FOUND, Code.NODE_IN_USE, Code.NODE_NOT_RESPONDING),
    ),
    Operation(
        name="nodes.commands_list",
        summary="What nodes were asked to do once, and what became of it.",
        path="/api/v1/nodes/commands/list",
        request=CommandsRequest,
        response=CommandsAnswer,
        permission=Permission.NODES_READ,
        rate="read",
        handler=Reads(list_commands),
        example={"selector": {"ById": [_NODE]}, "limit": 10},
        answer={
            "commands": [
                {
                    "id": _COMMAND,
                    "node_id": _NODE,
                    "kind": "gpu_reset",
                    "args": {"pci_slot": "0000:1b:00.0"},
                    "status": "Completed",
                    "output": "the GPU 0000:1b:00.0 was reset",
                    "issued_at": "2026-11-21T01:00:00Z",
                    "finished_at": "2026-11-21T01:00:07Z",
                }
            ]
        },
    ),
)
