"""Operations on presets. None makes one: they are captured when a shape is rented."""

from __future__ import annotations

from typing import Any

from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Reads, Writes
from marketplace.http.pagination import next_cursor
from marketplace.http.principal import PERSONAL
from marketplace.presets import service
from marketplace.presets.wire import DeleteAnswer, DeleteRequest, ListAnswer, ListRequest, PresetAnswer
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.users.permissions import Permission


def list_presets(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of the caller's presets."""
    found = service.page(unit, call.caller.person.id, cursor=request.cursor, limit=request.limit)
    return ListAnswer(
        presets=[
            PresetAnswer(
                id=row.id,
                instance_type=row.instance_type,
                cpu_count=row.vcpu,
                dram=row.dram,
                disk=row.disk,
                gpu_count=row.gpu_count,
            )
            for row in found[: request.limit]
        ],
        next_cursor=next_cursor([(row.created_at, row.id) for row in found], request.limit),
    )


def delete(call: Call, unit: WriteUnit, request: DeleteRequest) -> DeleteAnswer:
    """Forget a preset of the caller's."""
    owner = call.caller.person.id
    if not service.remove(unit, owner, request.id):
        raise Refusal(Code.PRESET_NOT_FOUND, "You have no such preset.", param="id")
    call.record(unit, "presets.delete", owner_id=owner, subject_id=request.id)
    return DeleteAnswer(id=request.id)


_ID = "019a0f6c-2a00-7abc-8def-000000000042"
_PRESET = {
    "id": _ID,
    "instance_type": "h200-141gb",
    "cpu_count": 16,
    "dram": 68719476736,
    "disk": 214748364800,
    "gpu_count": 1,
}

OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="instance_presets.list",
        summary="Shapes of one's own that the caller rented, each once.",
        path="/api/v1/instance-presets/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.INSTANCES_READ,
        credentials=PERSONAL,
        rate="read",
        handler=Reads(list_presets),
        example={},
        answer={"presets": [_PRESET], "next_cursor": None},
    ),
    Operation(
        name="instance_presets.delete",
        summary="Forget a preset.",
        path="/api/v1/instance-presets/delete",
        request=DeleteRequest,
        response=DeleteAnswer,
        permission=Permission.INSTANCES_RENT,
        credentials=PERSONAL,
        rate="write",
        handler=Writes(delete),
        example={"id": _ID},
        answer={"id": _ID},
        errors=(Code.PRESET_NOT_FOUND,),
    ),
)
