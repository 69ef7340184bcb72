"""Requests about instances. What they are answered with is in marketplace.instances.answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from marketplace.http.wire import CursorText, Id, Wire
from marketplace.placement.capacity import CpuPolicy

MAX_LIST = 256
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Name = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=_NAME)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=2048, pattern=r"^[^\x00]*$")]
_Tag = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00]*$")]


def _unique(values: list[str]) -> list[str]:
    if len(set(values)) != len(values):
        raise ValueError("each once")
    return values


Tags = Annotated[list[_Tag], Field(max_length=64), AfterValidator(_unique)]
Ids = Annotated[list[Id], Field(min_length=1, max_length=100)]
VmPort = Annotated[str, StringConstraints(max_length=9, pattern=r"^[1-9][0-9]{0,4}(/(tcp|udp))?$")]
DockerPort = Annotated[
    str, StringConstraints(max_length=15, pattern=r"^([1-9][0-9]{0,4}:)?[1-9][0-9]{0,4}(/(tcp|udp))?$")
]


class TypeAndLocation(Wire):
    """A variant, and where; without datacenters anywhere."""

    instance_type: Text
    datacenters: Annotated[list[Text], Field(max_length=100)] | None = None


class ByInstanceTypeAndLocation(Wire):
    """Any node of a type."""

    wanted: TypeAndLocation = Field(alias="ByInstanceTypeAndLocation")


class NodeAndType(Wire):
    """A node, and a variant that it has."""

    node_id: Id
    instance_type: Text


class ByNodeId(Wire):
    """A certain node."""

    wanted: NodeAndType = Field(alias="ByNodeId")


class ManualNuma(Wire):
    """Threads and GPUs that an admin chose."""

    cpu_ids: Annotated[list[Annotated[int, Field(ge=0, le=65535)]], Field(max_length=4096)] | None = None
    gpu_indices: Annotated[list[Annotated[int, Field(ge=0, le=255)]], Field(max_length=256)] | None = None
    emulator_cpu_ids: list[int] | None = None
    memory_kb_per_node: dict[str, int] | None = None


class Resources(Wire):
    """A shape that is in no catalog."""

    vcpu: Annotated[int, Field(ge=1, le=4096)]
    gpu: Annotated[int, Field(ge=0, le=64)]
    dram: Annotated[int, Field(ge=1 << 20, le=1 << 46)]
    disk: Annotated[int, Field(ge=0, le=1 << 52)]
    manual_numa_config: ManualNuma | None = None


class NodeAndResources(Wire):
    """A node, and a shape."""

    node_id: Id
    resources: Resources


class ByNodeWithResources(Wire):
    """A shape of one's own on a certain node."""

    wanted: NodeAndResources = Field(alias="ByNodeWithResources")


RentSelector = ByInstanceTypeAndLocation | ByNodeId | ByNodeWithResources


class PublicKeys(Wire):
    """SSH keys, written out."""

    keys: Annotated[
        list[Annotated[str, StringConstraints(min_length=16, max_length=16384, pattern=r"^[^\x00\r\n]+$")]],
        Field(min_length=1, max_length=32),
    ] = Field(alias="PublicKeys")


class KeysByName(Wire):
    """SSH keys that are kept here."""

    names: Annotated[list[Text], Field(min_length=1, max_length=32)] = Field(alias="ByName")


class KeysById(Wire):
    """SSH keys that are kept here."""

    ids: Annotated[list[Id], Field(min_length=1, max_length=32)] = Field(alias="ById")


SshKeys = PublicKeys | KeysByName | KeysById


class VolumesById(Wire):
    """Volumes, by id."""

    ids: Annotated[list[Id], Field(min_length=1, max_length=1)] = Field(alias="ById")


class Mount(Wire):
    """A volume and where it goes."""

    volume: VolumesById
    mount_path: Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^/[^\x00]*$")]


class Mounts(Wire):
    """Volumes to attach."""

    mounts: Annotated[list[Mount], Field(max_length=16)] = Field(alias="Mounts")


Volumes = Literal["None"] | Mounts


class VmConfig(Wire):
    """What a virtual machine runs."""

    image_url: (
        Annotated[str, StringConstraints(min_length=1, max_length=2048, pattern=r"^(https?|file)://[^\x00\s]+$")] | None
    ) = None
    cloudinit_url: Annotated[str, StringConstraints(max_length=2048, pattern=r"^https?://[^\x00-\x20]+$")] | None = None
    cloudinit_commands: Annotated[str, StringConstraints(max_length=65536, pattern=r"^[^\x00]*$")] | None = None
    ssh_key: SshKeys | None = None
    ports: Annotated[list[VmPort], Field(default_factory=list, max_length=64)]
    volumes: Volumes = "None"


class VirtualMachine(Wire):
    """A virtual machine."""

    vm: VmConfig = Field(alias="VirtualMachine")


class Password(Wire):
    """Credentials for a registry."""

    username: Text
    password: Text


class UsernamePassword(Wire):
    """How to sign in to a registry."""

    login: Password = Field(alias="UsernamePassword")


_Env = Annotated[str, StringConstraints(max_length=131072, pattern=r"^[^\x00]*$")]


class DockerConfig(Wire):
    """What a container runs."""

    image: Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\x00\s]+$")]
    command: Annotated[list[_Env], Field(default_factory=list, max_length=256)]
    env: Annotated[
        list[Annotated[list[_Env], Field(min_length=2, max_length=2)]], Field(default_factory=list, max_length=256)
    ]
    ports: Annotated[list[DockerPort], Field(default_factory=list, max_length=64)]
    registry_auth: UsernamePassword | None = None
    volumes: Volumes = "None"


class Docker(Wire):
    """A container."""

    docker: DockerConfig = Field(alias="Docker")


class NewTerms(Wire):
    """A reservation to make."""

    type_id: Id
    billing_exempt: bool = False


class NewReservation(Wire):
    """A reservation to make."""

    new: NewTerms = Field(alias="New")


class ExistingReservation(Wire):
    """A reservation that is bound to nothing."""

    id: Id = Field(alias="Existing")


class RentRequest(Wire):
    """What to rent, where, with what inside, and on which terms."""

    selector: RentSelector
    config: VirtualMachine | Docker
    with_public_ip: bool = False
    network: Text | None = None
    name: Name | None = None
    tags: Tags = Field(default_factory=list)
    cluster_name: Name = "default"
    team_id: Id | None = None
    recipe: Text | None = None
    reuse_environment_id: Id | None = None
    require_quota_coverage: bool = False
    billing_exempt: bool = False
    reservation: NewReservation | ExistingReservation | None = None
    cpu_sharing_policy: CpuPolicy | None = None
    ports: Annotated[list[DockerPort], Field(max_length=64)] | None = None
    manual_numa_config: ManualNuma | None = None


class RentAnswer(Wire):
    """What was rented."""

    instance_ids: list[str]


class PersonalAndTeams(Wire):
    """One's own, and those of these teams."""

    team_ids: Ids = Field(alias="PersonalAndTeams")


class Teams(Wire):
    """Those of these teams."""

    team_ids: Ids = Field(alias="Teams")


Scope = Literal["Personal", "Teams", "PersonalAndTeams", "All"] | PersonalAndTeams | Teams
StatusName = Literal["Initializing", "Active", "Deactivating", "Inactive", "Failed"]
Statuses = Annotated[list[StatusName], Field(min_length=1, max_length=5)]


class OfStatus(Wire):
    """Statuses, and whose."""

    statuses: Statuses
    scope: Scope | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] | None = None


class ById(Wire):
    """Instances, by id."""

    ids: Ids = Field(alias="ById")


class ByID(Wire):
    """Instances, by id."""

    ids: Ids = Field(alias="ByID")


class ByStatus(Wire):
    """Instances in certain statuses."""

    wanted: OfStatus | Statuses = Field(alias="ByStatus")


class OfCluster(Wire):
    """A cluster, and whose."""

    cluster_name: Text
    scope: Scope | None = None


class ByClusterName(Wire):
    """Instances of a cluster."""

    wanted: OfCluster | Text = Field(alias="ByClusterName")


class ByUserId(Wire):
    """What a person rented."""

    user_id: Id = Field(alias="ByUserId")


class ByNode(Wire):
    """What is on a node."""

    node_id: Id = Field(alias="ByNodeId")


class TagQuery(Wire):
    """Tags that an instance has all of, and some of."""

    all: Tags = Field(default_factory=list)
    any: Tags = Field(default_factory=list)
    scope: Scope | None = None


class ByTags(Wire):
    """Instances with tags."""

    wanted: TagQuery = Field(alias="ByTags")


class ByTeamId(Wire):
    """Instances of a team; in versions before v055 only."""

    team_id: Id = Field(alias="ByTeamId")


Selector = Literal["All"] | ById | ByID | ByStatus | ByClusterName | ByUserId | ByNode | ByTags | ByTeamId


class Mask(Wire):
    """What of each instance is asked for."""

    with_connection_info: bool = True
    with_hardware_info: bool = True
    with_usage_info: bool = True
    with_credentials: bool = False


class ListRequest(Wire):
    """A page of instances, newest first."""

    selector: Selector = "All"
    mask: Mask = Mask()
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    cursor: CursorText | None = None
    wait_s: Annotated[int, Field(ge=0, le=20)] = 0


class ActRequest(Wire):
    """Instances to do something to."""

    selector: Selector


class TerminateRequest(ActRequest):
    """Instances to end, and what of each to answer with."""

    mask: Mask = Mask()
