"""The protocol between a node and the server: JSON structs under `/agent/v1/`, always sent by the node.

Every request carries the node's key. A session is fenced by `(session_id, epoch)`: registering again raises the epoch,
and a request of an older one is answered 409 `StaleSession`. The server sends the complete desired state whenever its
revision is not the one that the node has applied, so that every message may be lost, repeated or late.

Sizes are bytes, durations are seconds, moments are microseconds since 1970 (UTC).
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import msgspec

from marketplace.agent.inventory_wire import Inventory, RetainedDisk

PREFIX = "/agent/v1/"

Want = Literal["Running", "Stopped", "Paused", "Absent"]
Phase = Literal["Pending", "Pulling", "Creating", "Running", "Missing", "Failed", "Absent"]
VmState = Literal["NoState", "Running", "Blocked", "Paused", "Shutdown", "Shutoff", "Crashed", "PMSuspended"]
ContainerState = Literal["Created", "Running", "Paused", "Restarting", "Exited", "Removing", "Dead"]
Power = VmState | ContainerState
Cause = Literal["BadImage", "BadCommand", "VmBootFailed", "PlatformError"]
Via = Literal["ssh", "phone_home"]


class Port(msgspec.Struct, frozen=True):
    """A port of an instance that is published on the node."""

    guest: int
    host: int
    proto: Literal["tcp", "udp"] = "tcp"
    host_ip: str = "0.0.0.0"


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """A disk that outlives instances. In a virtual machine it is a block device whose serial begins the volume's id."""

    id: str
    size_bytes: int
    mount_path: str = ""
    read_only: bool = False


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance is told of its provider's network: an address of its own, and the way out."""

    ip: str | None = None
    netmask: str | None = None
    gateway: str | None = None
    interface: str | None = None
    """bridge of the node that carries the network; None is behind the node's own address"""
    http_proxy: str | None = None
    https_proxy: str | None = None
    no_proxy: list[str] = []
    """targets that containers and curl reach without the proxy"""


class NumaSlice(msgspec.Struct, frozen=True):
    """Threads and 1 GiB pages of one NUMA node that an instance may use, and nobody else."""

    node: int
    cpus: list[int]
    hugepages_1g: int = 0


class RegistryAuth(msgspec.Struct, frozen=True):
    """Credentials for the registry of a container's image."""

    username: str
    password: str

    def __repr__(self) -> str:
        """Never show the password."""
        return f"RegistryAuth({self.username!r})"


class VmSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="VirtualMachine"):
    """Everything a node needs to make a virtual machine."""

    name: str
    vcpu: int
    dram_bytes: int
    disk_bytes: int
    image_url: str | None = None
    image_path: str | None = None
    """a file on the node; only the operator's own images have one"""
    image_sha256: str | None = None
    user_data: str | None = None
    """the renter's cloud-init text, passed on untouched"""
    ssh_keys: list[str] = []
    username: str = "root"
    password: str | None = None
    ports: list[Port] = []
    gpus: list[str] = []
    """PCI slots, `0000:65:00.0`"""
    numa: list[NumaSlice] | None = None
    """where its threads and memory are; None floats over the node"""
    network: Network | None = None
    volumes: list[Volume] = []
    readiness_token: str = ""
    """one-time secret that the guest sends to say that it is ready"""
    reuse_environment_id: str | None = None
    """the ended instance whose retained disk becomes this one's"""


class ContainerSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="Container"):
    """Everything a node needs to make a container."""

    name: str
    image: str
    command: list[str] = []
    """empty runs what the image names"""
    env: dict[str, str] = {}
    ports: list[Port] = []
    vcpu: int = 1
    dram_bytes: int = 0
    disk_bytes: int = 0
    gpus: list[str] = []
    """UUIDs of GPUs; a MIG instance is its GPU, first slice and profile: `GPU-…/4/3g.71gb`"""
    cpus: list[int] | None = None
    """threads that it may use; None floats over the node"""
    registry_auth: RegistryAuth | None = None
    volumes: list[Volume] = []


Spec = VmSpec | ContainerSpec


class DesiredInstance(msgspec.Struct, frozen=True, kw_only=True):
    """What the server wants of one instance."""

    id: str
    gen: int
    """rises with every change of `want` or `spec`"""
    want: Want
    reset_seq: int = 0
    """rises with every reset asked for"""
    spec: Spec
    erase_after_s: int | None = None
    """how long the disk is kept after Absent; None is the node's setting, 0 deletes it at once"""

    @property
    def kind(self) -> Literal["VirtualMachine", "Container"]:
        """Which kind of machine it is."""
        return "VirtualMachine" if isinstance(self.spec, VmSpec) else "Container"


class DesiredImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image that the node keeps ready, and fetches in advance."""

    url: str
    sha256: str | None = None
    tags: list[str] = []


class LeaseGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The server's word on a lease of GPUs to an engine on this node."""

    id: str
    """as the node named it when it asked"""
    fence: int = 0
    """rises with every lease of the node: an engine of an older fence may not touch a GPU"""
    gpus: list[str] = []
    """PCI slots; empty where it is refused"""
    revoke_at: int | None = None
    """moment by which the engine must be gone; None while nobody else needs the GPUs"""
    refused: str | None = None
    """why there is no lease"""


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """The complete desired state of one node."""

    instances: list[DesiredInstance] = []
    images: list[DesiredImage] = []
    disabled_gpus: list[str] = []
    """PCI slots that people took out of service"""
    leases: list[LeaseGrant] = []
    erased_volumes: list[str] = []
    """ids of volumes whose disks the node removes"""
    erased_disks: list[str] = []
    """ids of ended instances whose retained disks the node removes before their time"""
    relayed: bool = False
    """whether ports are published by a relay, for which the node asks for a grant"""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why an instance is not what was asked, in words that its renter can act on."""

    cause: Cause
    message: str
    tail: str = ""
    """the last lines of the console or log, for the operator"""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a container ended that nobody had asked to end, in words for its renter."""

    at: int
    """when its node saw it"""
    cause: Cause | None = None
    """None where its command did what it had to"""
    message: str
    tail: str = ""
    """the last lines of its log, for the operator"""


class ObservedInstance(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of one instance."""

    id: str
    gen_applied: int = 0
    """generation whose wish has been carried out; 0 is none"""
    reset_applied: int = 0
    phase: Phase
    power: Power | None = None
    error: Failure | None = None
    ips: list[str] = []
    ports: list[Port] = []
    ready_via: Via | None = None
    """how it showed that it is ready; None while it has not"""
    started_at: int | None = None
    """moment its domain or container first started: readiness is waited for from here"""
    ended: Ending | None = None
    """a container is there for as long as its command runs: this one is over"""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on a node that carries its label."""

    instances: list[ObservedInstance] = []
    environments: list[RetainedDisk] = []


class LeaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that an engine asks for, holds or has given back."""

    id: str
    holder: str
    state: Literal["Requested", "Held", "Released"]
    fence: int = 0
    count: int = 0
    """GPUs asked for, where `gpus` names none"""
    gpus: list[str] = []
    min_vram_bytes: int = 0
    preemptible: bool = True
    notice_s: int = 30
    """seconds that the engine needs to leave when a rental takes its GPUs"""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened on the node, for its operator. Sent until a poll that carried it is answered."""

    id: str
    at: int
    kind: str
    message: str
    instance_id: str | None = None
    data: dict[str, Any] = {}


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Work that is not a state: done once, its result sent until a poll that carried it is answered."""

    id: str
    kind: Literal["collect_logs", "self_test", "sync_images", "gpu_reset"]
    args: dict[str, str] = {}
    deadline: int | None = None


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a command."""

    id: str
    ok: bool
    output: str = ""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the node's drivers can do; found by trying."""

    vm: bool = False
    container: bool = False
    vm_mig: bool = False
    """MIG instances in virtual machines, which needs a licensed host"""
    accelerator: Literal["kvm", "tcg"] | None = None
    container_engine: str | None = None
    """its name and version, where there is one"""
    container_disk: Literal["quota", "watched"] | None = None
    """what holds containers to their disks: the file system, or a look every few seconds that stops who is beyond"""
    problems: list[str] = []
    """why something is not available"""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The server's settings that a node follows."""

    erase_grace_s: int = 0
    erase_stray_grace_s: int = 72 * 3600
    readiness_timeout_s: int = 600
    image_timeout_s: int = 1800


class Register(msgspec.Struct, frozen=True, kw_only=True):
    """Begin a session. Any earlier session of the machine ends."""

    machine_id: str
    boot_id: str
    agent_version: str
    inventory: Inventory
    capabilities: Capabilities
    observed: Observed | None = None
    """None where the drivers could not be listed"""
    hibernated: bool = False
    """keep what runs, take nothing new"""


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """The session, and what the server wants."""

    node_id: str
    session_id: str
    epoch: int
    lease_s: int = 60
    """without a poll for this long the node counts as not responding"""
    poll_wait_s: int = 20
    settings: Settings = Settings()
    desired: Desired = Desired()
    desired_rev: int = 0
    server_time: int = 0
    warnings: list[str] = []
    """what the node's operator should know: that its way of signing in is going to end"""


class Poll(msgspec.Struct, frozen=True, kw_only=True):
    """Report, and wait for something new. Answered at once where the desired revision is not `applied_rev`."""

    session_id: str
    epoch: int
    applied_rev: int
    """the newest desired revision that the node holds"""
    wait_s: float | None = None
    """how long to wait for something new; None is the session's poll_wait_s"""
    observed: Observed | None = None
    """None where nothing changed since the digest that the server last took, or where listing failed"""
    observed_digest: str = ""
    """`digest(observed)` of what the node sees; empty where listing failed: then nothing is known, nothing is gone"""
    inventory: Inventory | None = None
    """only where it changed"""
    events: list[Event] = []
    command_results: list[CommandResult] = []
    commands: list[str] = []
    """ids of commands that are under way: they are not sent again"""
    leases: list[LeaseReport] = []
    hibernated: bool = False


class Polled(msgspec.Struct, frozen=True, kw_only=True):
    """What is new."""

    desired_rev: int
    desired: Desired | None = None
    """the complete state where `desired_rev` is not the poll's applied_rev"""
    commands: list[Command] = []
    unknown: list[str] = []
    """ids of the report that the server knows nothing of: strays"""
    want_observed: bool = False
    """the server does not know the digest: send `observed` with the next poll"""
    server_time: int = 0


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """An instance is ready. Repeated until it is answered 2xx; a repetition changes nothing."""

    instance_id: str
    token: str
    via: Via


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, or MIG instance, at one moment. None where the device does not tell."""

    pci_slot: str
    uuid: str | None = None
    utilization: int | None = None
    """percent"""
    temperature: int | None = None
    """degrees Celsius"""
    vram_used_bytes: int | None = None
    vram_total_bytes: int | None = None
    power_watts: int | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The node (instance_id None) or an instance at one moment."""

    at: int
    instance_id: str | None = None
    cpu_seconds: float | None = None
    """CPU time used since it started"""
    memory_bytes: int | None = None
    gpus: list[GpuSample] = []


class VolumeUse(msgspec.Struct, frozen=True):
    """What a volume takes of the node's disk."""

    id: str
    used_bytes: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Samples; they may be lost."""

    session_id: str
    samples: list[Sample]
    volumes: list[VolumeUse] | None = None
    """all that have files on the node; None before they were measured"""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True):
    """The agent goes, in an orderly way; machines keep running."""

    session_id: str


class Accepted(msgspec.Struct, frozen=True):
    """The answer of ready, metrics and shutdown."""

    ok: bool = True


def digest(observed: Observed) -> str:
    """A name for what is observed: equal for equal content, whatever the order of the lists."""
    ordered = msgspec.structs.replace(
        observed,
        instances=sorted(observed.instances, key=lambda one: one.id),
        environments=sorted(observed.environments, key=lambda one: one.instance_id),
    )
    return hashlib.sha256(msgspec.json.encode(ordered, order="sorted")).hexdigest()[:32]
