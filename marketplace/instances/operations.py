"""Operations on instances: rent, list, end, and what may be asked of virtual machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, create_model
from sqlalchemy import select

from marketplace.events.transitions import scene_of
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call, Operation, Planned, Reads, Then, Tool, Writes
from marketplace.http.pagination import next_cursor
from marketplace.http.versions import ALL
from marketplace.http.wire import Id, Json, Wire
from marketplace.instances import life, selection
from marketplace.instances.answers import InstanceAnswer, answers
from marketplace.instances.life import PUBLIC
from marketplace.instances.rent import Plan, plan, rent
from marketplace.instances.rules import Action, asked, state_of
from marketplace.instances.tables import instance
from marketplace.instances.wire import (
    ActRequest,
    ListRequest,
    Mask,
    Name,
    RentAnswer,
    RentRequest,
    Statuses,
    Tags,
    TerminateRequest,
    Text,
    TypeAndLocation,
    VmPort,
)
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.users.permissions import Permission

_SINCE_V061 = ALL[ALL.index("v061") :]
_SINCE_V062 = ALL[ALL.index("v062") :]
_ID = "019a0f6c-2a00-7abc-8def-000000000020"


class ListAnswer(Wire):
    """A page of instances."""

    instances: list[InstanceAnswer]
    next_cursor: str | None


class TerminateAnswer(Wire):
    """What is being ended, or was dismissed."""

    terminated: list[InstanceAnswer]


def rent_instance(call: Call, unit: WriteUnit, request: RentRequest, planned: Plan) -> RentAnswer:
    """Rent an instance."""
    return RentAnswer(instance_ids=[rent(call, unit, request, planned)])


def _turn(request: RentRequest) -> str:
    """Who rents the same goes to the same node first."""
    wanted = request.selector.wanted
    return wanted.instance_type if isinstance(wanted, TypeAndLocation) else wanted.node_id


def list_instances(call: Call, unit: ReadUnit, request: ListRequest) -> ListAnswer:
    """Return a page of instances."""
    _check_mask(call, request.mask)
    wished = getattr(getattr(request.selector, "wanted", None), "limit", None)
    limit = min(request.limit, wished) if wished else request.limit
    rows = selection.page(call, unit, request.selector, request.cursor, limit)
    return ListAnswer(
        instances=answers(unit, call.context.vault, rows[:limit], request.mask, call.now),
        next_cursor=next_cursor([(row.created_at, row.id) for row in rows], limit),
    )


def _news(request: ListRequest, answer: ListAnswer) -> tuple[int, object]:
    """Whoever waits is answered once an instance comes or goes, or is in another state."""
    states = [(one.id, one.status, one.virtual_machines, one.containers) for one in answer.instances]
    told = [(id, status, [vm.state for vm in vms], [box.state for box in boxes]) for id, status, vms, boxes in states]
    return request.wait_s, told


def terminate(call: Call, unit: WriteUnit, request: TerminateRequest) -> TerminateAnswer:
    """End instances; one that failed is dismissed. What is over, or being ended, stays as it is."""
    _check_mask(call, request.mask)
    scene = scene_of(call)
    rows = life.lock(unit, selection.places(call, unit, request.selector))
    changed = []
    for row in rows:
        if row.status == "Failed":
            life.dismiss(unit, row, scene)
        elif row.status in ("Initializing", "Active"):
            life.end(unit, row, "terminate", scene)
        else:
            continue
        changed.append(row.id)
    after = unit.select(select(*PUBLIC).where(instance.c.id.in_(changed)).order_by(instance.c.id)).all()
    return TerminateAnswer(terminated=answers(unit, call.context.vault, after, request.mask, call.now))


def _acting(action: Action, told: str, model: Any) -> Callable[[Call, WriteUnit, ActRequest], Any]:
    """The handler of an action on virtual machines: on all that are selected, or on none."""

    def act(call: Call, unit: WriteUnit, request: ActRequest) -> Any:
        rows = life.lock(unit, selection.places(call, unit, request.selector))
        done = []
        for row in rows:
            if row.kind != "VirtualMachine" or row.status != "Active":
                reason = "it is a container" if row.kind == "Container" else f"it is {row.status}"
                raise Refusal(Code.INVALID_TRANSITION, f"{row.name}: {reason}.", param="selector")
            state = state_of(row.power, row.want, settled=row.gen_applied == row.gen)
            want = asked(state, action)
            if want is None:
                raise Refusal(
                    Code.INVALID_TRANSITION, f"{row.name}: {action} is not possible, it is {state}.", param="selector"
                )
            life.wish(unit, row, want, reset=action == "reset")
            call.record(unit, f"instances.{action}", owner_id=life.owner_of(row), subject_id=row.id, state=state)
            done.append(row.id)
        return model(**{told: done})

    return act


def _check_mask(call: Call, mask: Mask) -> None:
    if mask.with_credentials and Permission.INSTANCES_VIEW_CREDENTIALS not in call.caller.permissions:
        raise Refusal(
            Code.CREDENTIALS_NOT_PERMITTED,
            "You may not see the credentials of machines.",
            param="mask.with_credentials",
        )


class RentTool(Wire):
    """What to rent, to a language model."""

    instance_type: Annotated[Text, Field(description="a variant's name, as list_instance_types shows it")]
    datacenters: Annotated[list[Text] | None, Field(description="where; without it anywhere")] = None
    image_url: Annotated[Text | None, Field(description="disk image of a virtual machine")] = None
    docker_image: Annotated[Text | None, Field(description="image of a container, instead of image_url")] = None
    name: Name | None = None
    ssh_public_keys: list[Text] | None = None
    ports: list[VmPort] | None = None
    tags: Tags = Field(default_factory=list)
    team_id: Id | None = None
    wait: Annotated[
        bool, Field(description="whether to wait, a minute at most, until it is ready or has failed, and be told of it")
    ] = False


class ListTool(Wire):
    """Which instances, to a language model."""

    ids: list[Id] | None = None
    statuses: Annotated[Statuses | None, Field(description="by default all but Inactive")] = None
    scope: Annotated[
        Literal["Personal", "Teams", "PersonalAndTeams"] | None, Field(description="whose; by default all of yours")
    ] = None


class ActTool(Wire):
    """Which instances, to a language model."""

    instance_ids: Annotated[list[Id], Field(min_length=1, max_length=100)]


def _rent_body(arguments: Json) -> Json:
    keys, ports = arguments.get("ssh_public_keys"), arguments.get("ports") or []
    if arguments.get("docker_image"):
        config: Json = {"Docker": {"image": arguments["docker_image"], "ports": ports}}
    else:
        vm = {"image_url": arguments.get("image_url"), "ports": ports}
        config = {"VirtualMachine": {**vm, **({"ssh_key": {"PublicKeys": keys}} if keys else {})}}
    where = {"instance_type": arguments["instance_type"], "datacenters": arguments.get("datacenters")}
    rest = {name: arguments[name] for name in ("name", "tags", "team_id") if arguments.get(name)}
    return {"selector": {"ByInstanceTypeAndLocation": where}, "config": config, **rest}


def _rented(answer: Json) -> Json:
    return {"selector": {"ById": answer["instance_ids"]}}


def _has_begun(answer: Json) -> bool:
    return all(one["status"] != "Initializing" for one in answer["instances"])


def _list_body(arguments: Json) -> Json:
    if arguments.get("ids"):
        return {"selector": {"ById": arguments["ids"]}}
    if arguments.get("scope"):
        statuses = arguments.get("statuses") or ["Initializing", "Active", "Deactivating", "Failed"]
        return {"selector": {"ByStatus": {"statuses": statuses, "scope": arguments["scope"]}}}
    if arguments.get("statuses"):
        return {"selector": {"ByStatus": arguments["statuses"]}}
    return {}


def _act_body(arguments: Json) -> Json:
    return {"selector": {"ById": arguments["instance_ids"]}}


_INSTANCE: dict[str, Any] = {
    "id": _ID,
    "instance_name": "abaft-yak-4159",
    "status": "Active",
    "created_at": "2026-11-21T01:00:00Z",
    "user_id": "019a0f6c-2a00-7abc-8def-000000000001",
    "team_id": None,
    "cluster_name": "default",
    "tags": ["training"],
    "ssh_key_auth": True,
    "node_id": "019a0f6c-2a00-7abc-8def-000000000021",
    "node_status": "Ready",
    "node_mode": "VirtualMachine",
    "billing_exempt": False,
    "host_address": "203.0.113.7",
    "internal_host_address": None,
    "port_mappings": [[22, 27001]],
    "virtual_machines": [
        {
            "name": "i-019a0f6c",
            "state": "Running",
            "ready": True,
            "memory_usage_kb": 812344,
            "login_info": {"Username": {"username": "ubuntu"}},
        }
    ],
    "containers": [],
    "instructions": None,
    "failure": None,
    "cpu": {"brand": "EPYC", "physical_core_count": 64, "logical_core_count": 128},
    "cpu_limit": 8,
    "cpu_mask": "ffff",
    "dram": 68719476736,
    "dram_limit": 68719476736,
    "disk_limit": 214748364800,
    "gpu_limit": 1,
    "gpu_mask": "4",
    "mig_profile": None,
    "gpus": [
        {
            "brand_short": "H200",
            "vram": 150323855360,
            "pci_slot": "0000:3b:00.0",
            "gpuvendor_kernel_module_support": "OpenOrProprietary",
        }
    ],
    "volume_mounts": [],
    "reservation_data": None,
    "resource_info": {"provider_name": "acme", "instance_type": "h200-141gb.1", "cost_per_hour": 250},
    "usage_info": {
        "user_id": "019a0f6c-2a00-7abc-8def-000000000001",
        "user_email": "a@example.com",
        "user_name": "A",
        "usage": {"secs": 3600, "nanos": 0},
        "accounted_usage": {"secs": 3540, "nanos": 0},
    },
}
_SELECTED = {"selector": {"ById": [_ID]}}
_SEEING = (Code.NOT_TEAM_MEMBER, Code.NOT_NODE_OPERATOR)


_TOLD: dict[Action, str] = {
    "start": "started_ids",
    "stop": "stopped_ids",
    "pause": "paused_ids",
    "resume": "resumed_ids",
    "reset": "reset_ids",
}


def _action(action: Action, summary: str, tool: Tool | None = None) -> Operation[Any]:
    told = _TOLD[action]
    fields: dict[str, Any] = {told: (list[str], ...)}
    model = create_model(
        f"{action.capitalize()}Answer", __base__=Wire, __doc__="The instances that it was asked of.", **fields
    )
    return Operation(
        name=f"instances.{action}",
        summary=summary,
        path=f"/api/v1/instances/{action}",
        request=ActRequest,
        response=model,
        permission=Permission.INSTANCES_WRITE,
        rate="write",
        handler=Writes(_acting(action, told, model)),
        example=_SELECTED,
        answer={told: [_ID]},
        errors=(*_SEEING, Code.INVALID_TRANSITION),
        tool=tool,
    )


OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        name="instances.rent",
        summary="Rent a virtual machine or a container.",
        path="/api/v1/instances/rent",
        request=RentRequest,
        response=RentAnswer,
        permission=Permission.INSTANCES_RENT,
        versions=_SINCE_V062,
        rate="rent",
        idempotent=True,
        success=201,
        handler=Planned(plan, rent_instance, _turn),
        example={
            "selector": {"ByInstanceTypeAndLocation": {"instance_type": "h200-141gb.1", "datacenters": ["eu-1"]}},
            "config": {
                "VirtualMachine": {"image_url": "https://images.example/ubuntu-24.04.qcow2", "ports": ["22", "8000"]}
            },
            "name": "trainer-1",
            "tags": ["training"],
        },
        answer={"instance_ids": [_ID]},
        errors=(
            Code.NOT_TEAM_MEMBER,
            Code.CPU_SHARING_POLICY_REQUIRED,
            Code.SHARED_POLICY_RESERVED,
            Code.CUSTOM_INSTANCES_DISABLED,
            Code.IMAGE_DRIVER_MISMATCH,
            Code.ENVIRONMENT_GONE,
            Code.INSUFFICIENT_FUNDS,
            Code.NOT_NODE_OPERATOR,
            Code.WALLED_TO_ALLOCATIONS,
            Code.DATACENTER_NOT_FOUND,
            Code.INSTANCE_TYPE_NOT_FOUND,
            Code.NODE_NOT_FOUND,
            Code.NETWORK_NOT_FOUND,
            Code.RESERVATION_NOT_FOUND,
            Code.RECIPE_NOT_FOUND,
            Code.VOLUME_NOT_FOUND,
            Code.SSH_KEY_NOT_FOUND,
            Code.CAPACITY_RESERVED,
            Code.INSUFFICIENT_CAPACITY,
            Code.NOT_COVERED_BY_QUOTA,
            Code.VOLUME_ATTACHED,
            Code.NODE_ALLOCATION_MODE_MIXED,
        ),
        tool=Tool(
            name="rent_instance",
            description="Rent a virtual machine or a container; it costs from when it is ready until it is terminated.",
            arguments=RentTool,
            body=_rent_body,
            then=Then("list_instances", _rented, _has_begun),
        ),
    ),
    Operation(
        name="instances.list",
        summary="Instances, newest first, without those that are over.",
        path="/api/v1/instances/list",
        request=ListRequest,
        response=ListAnswer,
        permission=Permission.INSTANCES_READ,
        versions=_SINCE_V061,
        rate="read",
        handler=Reads(list_instances, wait=_news),
        example={"selector": {"ByStatus": {"statuses": ["Initializing", "Active"], "scope": "Personal"}}},
        answer={"instances": [_INSTANCE], "next_cursor": None},
        errors=_SEEING,
        tool=Tool(
            name="list_instances",
            description="Your machines and those of your teams: state, how to reach them, what they cost.",
            arguments=ListTool,
            body=_list_body,
        ),
    ),
    Operation(
        name="instances.terminate",
        summary="End instances; one that failed is dismissed.",
        path="/api/v1/instances/terminate",
        request=TerminateRequest,
        response=TerminateAnswer,
        permission=Permission.INSTANCES_WRITE,
        versions=_SINCE_V061,
        rate="write",
        handler=Writes(terminate),
        example=_SELECTED,
        answer={"terminated": [{**_INSTANCE, "status": "Deactivating"}]},
        errors=_SEEING,
        tool=Tool(
            name="terminate_instances",
            description="End machines for good. What is on their disks is lost.",
            arguments=ActTool,
            body=_act_body,
            destructive=True,
        ),
    ),
    _action(
        "start",
        "Start virtual machines that are shut off.",
        Tool(
            name="start_instances",
            description="Start virtual machines that were stopped.",
            arguments=ActTool,
            body=_act_body,
        ),
    ),
    _action(
        "stop",
        "Shut virtual machines down; they stay rented.",
        Tool(
            name="stop_instances",
            description="Shut virtual machines down. They stay rented and cost as before.",
            arguments=ActTool,
            body=_act_body,
            destructive=True,
        ),
    ),
    _action("pause", "Freeze virtual machines; they stay rented."),
    _action("resume", "Let frozen virtual machines run on."),
    _action("reset", "Reset virtual machines, as their button would."),
)
