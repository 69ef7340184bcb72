"""Containers over the Docker-compatible REST socket of podman; dockerd answers the same calls."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2

from marketplace.agent.drivers import disk_quota
from marketplace.agent.drivers.base import STOP_TIMEOUT_S, DriverError, Kind, ListingFailedError, Progress, Seen
from marketplace.agent.drivers.podman_service import PodmanService
from marketplace.agent.mig import MigError
from marketplace.agent.wire import Capabilities, ContainerSpec, Ending, Port, Power, RegistryAuth, Sample, Spec, Via

_API = "/v1.41"
_LABEL = "headrace.instance"
_NODE = "headrace.node"
_LOCAL = "localhost/"
_PULL_S = 1800.0
_CALL_S = 60.0
_SETTLE_S = 0.5
_PIDS = 4096
_STATES: dict[str, Power] = {
    "created": "Created",
    "configured": "Created",
    "initialized": "Created",
    "running": "Running",
    "paused": "Paused",
    "restarting": "Restarting",
    "stopping": "Running",
    "stopped": "Exited",
    "exited": "Exited",
    "removing": "Removing",
    "dead": "Dead",
}
_CAPABILITIES = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
]


class PodmanDriver:
    """Makes containers."""

    kind: Kind = "Container"

    def __init__(
        self,
        folder: Path,
        volumes: Path,
        *,
        label: str,
        socket: Path | None = None,
        insecure: Sequence[str] = (),
        settle_s: float = _SETTLE_S,
        devices: Callable[[list[str]], list[str]] = lambda names: names,
        returned: Callable[[list[str]], object] = lambda names: None,
    ) -> None:
        """`label` is the node's. `socket` None starts podman's service below `folder`. A container whose command ends
        with an error within `settle_s` has failed. `devices` makes the parts of GPUs that a container is to have, and
        says what they are called; `returned` looks at the GPUs of one that is gone, before anybody hears that it is.
        Both are called in a thread.
        """
        self._devices, self._returned = devices, returned
        self._service = None if socket is not None else PodmanService(folder, insecure=insecure)
        self._socket = socket
        self._volumes = volumes
        self._label = label
        self._settle_s = settle_s
        self._held: httpx2.AsyncClient | None = None
        self._podman = True
        self._quota = False

    async def close(self) -> None:
        """Stop the service. Containers keep running."""
        if self._held is not None:
            await self._held.aclose()
            self._held = None
        if self._service is not None:
            await self._service.stop()

    async def probe(self) -> Capabilities:
        """Ask the engine who it is."""
        try:
            said = await self._call("GET", "/version")
            about = await self._call("GET", "/info")
        except DriverError as error:
            return Capabilities(problems=[f"containers: {error.message} {error.tail}".strip()])
        parts = [one.get("Name", "") for one in said.get("Components") or []]
        self._podman = any("podman" in part.lower() for part in parts)
        name = "podman" if self._podman else "docker"
        self._quota = disk_quota.held(about.get("Driver", ""), Path(about.get("DockerRootDir") or "/"))
        return Capabilities(
            container=True,
            container_engine=f"{name} {said.get('Version', '')}",
            container_disk="quota" if self._quota else "watched",
        )

    async def listing(self) -> list[Seen]:
        """Every container with the label."""
        filters = quote(json.dumps({"label": [f"{_NODE}={self._label}"]}))
        try:
            found = await self._call("GET", f"/containers/json?all=true&filters={filters}")
        except DriverError as error:
            raise ListingFailedError(f"{error.message} {error.tail}") from error
        return [_seen(one) for one in found]

    async def create(self, id: str, spec: Spec, folder: Path, progress: Progress) -> None:
        """Image, container, start; and a moment to see whether its command holds."""
        assert isinstance(spec, ContainerSpec), "the keeper asks the driver of the kind"
        if not await self._exists(id):
            progress("Pulling")
            await self._pull(spec.image, spec.registry_auth)
            progress("Creating")
            try:
                gpus = await self._given(spec.gpus)
                made = await self._raw("POST", f"/containers/create?name={_name(id)}", self._body(id, spec, gpus))
                if made.status_code >= 400:
                    raise _not_made(_message(made))
            except DriverError:
                await self._take_back(spec.gpus)
                raise
        await self._start(id)

    async def start(self, id: str) -> None:
        """Run it again. Parts of GPUs are made again where the machine began anew meanwhile."""
        known = await self._call("GET", f"/containers/{_name(id)}/json", missing=True)
        await self._given(_gpus(known["Config"].get("Labels")) if known else [])
        await self._call("POST", f"/containers/{_name(id)}/start", missing=True)

    async def stop(self, id: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """SIGTERM; after `timeout_s` SIGKILL."""
        path = f"/containers/{_name(id)}/stop?t={round(min(timeout_s, 10))}"
        await self._call("POST", path, missing=True)

    async def pause(self, id: str) -> None:
        """Freeze its processes."""
        await self._call("POST", f"/containers/{_name(id)}/pause", missing=True)

    async def resume(self, id: str) -> None:
        """Let them go on."""
        await self._call("POST", f"/containers/{_name(id)}/unpause", missing=True)

    async def reset(self, id: str) -> None:
        """End it at once and run it again."""
        await self._call("POST", f"/containers/{_name(id)}/restart?t=0", missing=True)

    async def destroy(self, id: str) -> None:
        """Remove it with what it wrote, and look at the GPUs that it had."""
        known = await self._call("GET", f"/containers/{_name(id)}/json", missing=True)
        # Removing alone would ask first and wait; whether there is anything to kill, the engines tell in many ways.
        await self._raw("POST", f"/containers/{_name(id)}/kill")
        await self._call("DELETE", f"/containers/{_name(id)}?force=true&v=true", missing=True)
        await self._take_back(_gpus(known["Config"].get("Labels")) if known else [])

    async def _given(self, names: list[str]) -> list[str]:
        try:
            return await asyncio.to_thread(self._devices, names) if names else []
        except MigError as error:
            raise DriverError("PlatformError", "The node could not make the part of a GPU.", str(error)) from error

    async def _take_back(self, names: list[str]) -> None:
        if names:
            await asyncio.to_thread(self._returned, names)

    async def publish(self, id: str, ports: list[Port]) -> None:
        """A container's ports are published by its engine with every start."""

    async def readiness(self, id: str, spec: Spec) -> Via | None:
        """Containers do not signal; they run."""
        return None

    async def metrics(self, id: str) -> Sample | None:
        """Use by its processes."""
        said = await self._call("GET", f"/containers/{_name(id)}/stats?stream=false", missing=True)
        if not isinstance(said, dict) or "cpu_stats" not in said:
            return None
        used = said["cpu_stats"].get("cpu_usage", {}).get("total_usage", 0)
        memory = said.get("memory_stats", {}).get("usage")
        return Sample(at=0, instance_id=id, cpu_seconds=used / 1e9, memory_bytes=memory)

    async def disk_use(self, id: str) -> int | None:
        """What it wrote beside its image and its volumes, where the file system does not hold it to its disk."""
        if self._quota:
            return None
        said = await self._call("GET", f"/containers/{_name(id)}/json?size=true", missing=True)
        running = bool(said) and said["State"].get("Status") == "running"
        return int(said.get("SizeRw") or 0) if running else None

    async def gpu_problem(self, id: str) -> str | None:
        """Have the GPUs listed inside. The kernel may take a container's devices away while it runs: when systemd reads
        its units anew, say. An image without the tool tells nothing.
        """
        ask = {"Cmd": ["nvidia-smi", "-L"], "AttachStdout": True, "AttachStderr": True}
        made = await self._call("POST", f"/containers/{_name(id)}/exec", ask, missing=True)
        if not made:
            return None
        said = await self._raw("POST", f"/exec/{made['Id']}/start", {"Detach": False, "Tty": False})
        ended = await self._call("GET", f"/exec/{made['Id']}/json", missing=True)
        if said.status_code >= 400 or not ended or ended.get("ExitCode") in (0, 126, 127, None):
            return None
        return f"its GPUs cannot be seen inside any more: {_unframed(said.content).strip()[:300]}"

    async def tail_log(self, id: str, lines: int) -> str:
        """The end of what it wrote."""
        path = f"/containers/{_name(id)}/logs?stdout=true&stderr=true&tail={lines}"
        said = await self._raw("GET", path)
        return "" if said.status_code >= 400 else _unframed(said.content)

    async def ending(self, id: str, now: int) -> Ending | None:
        """From the status of its command; an engine that began anew with its node has forgotten that it ever ran."""
        known = await self._call("GET", f"/containers/{_name(id)}/json", missing=True)
        if not known:
            return None
        state = known["State"]
        power = _STATES.get(str(state.get("Status", "")).lower(), "Dead")
        if power == "Created":
            return Ending(at=now, cause="PlatformError", message="The container ended when its node began anew.")
        if power not in ("Exited", "Dead"):
            return None
        tail = await self.tail_log(id, 20)
        failed = state.get("ExitCode") or state.get("OOMKilled") or power == "Dead"
        return Ending(
            at=now, cause="BadCommand" if failed else None, message=_ended(state, tail, "ended"), tail=tail[-2000:]
        )

    async def _exists(self, id: str) -> bool:
        return (await self._raw("GET", f"/containers/{_name(id)}/json")).status_code == 200

    async def _pull(self, image: str, auth: RegistryAuth | None) -> None:
        """Ask the image's registry each time: that an image is here says nothing of who may use it.

        Names below `localhost/` are the operator's own images, which no registry has.
        """
        if image.startswith(_LOCAL):
            if (await self._raw("GET", f"/images/{quote(image)}/json")).status_code != 200:
                raise _no_image(image, "not found")
            return
        headers = {}
        if auth is not None:
            packed = json.dumps({"username": auth.username, "password": auth.password}).encode()
            headers["X-Registry-Auth"] = base64.urlsafe_b64encode(packed).decode()
        path = f"/images/create?fromImage={quote(image, safe='')}"
        if ":" not in image.rpartition("/")[2] and "@" not in image:
            path += "&tag=latest"
        answer = await self._raw("POST", path, headers=headers, timeout=_PULL_S)
        problem = _message(answer) if answer.status_code >= 400 else _pull_problem(answer.text)
        if problem:
            raise _no_image(image, problem)

    async def _start(self, id: str) -> None:
        answer = await self._raw("POST", f"/containers/{_name(id)}/start")
        if answer.status_code >= 400:
            raise _no_start(_message(answer))
        await asyncio.sleep(self._settle_s)
        state = (await self._call("GET", f"/containers/{_name(id)}/json"))["State"]
        if state.get("Status") in ("exited", "stopped"):
            tail = await self.tail_log(id, 20)
            raise DriverError("BadCommand", _ended(state, tail, "ended at once"), tail)

    def _body(self, id: str, spec: ContainerSpec, gpus: list[str]) -> dict[str, Any]:
        host: dict[str, Any] = {
            "Memory": spec.dram_bytes,
            "MemorySwap": spec.dram_bytes,
            "NanoCpus": spec.vcpu * 1_000_000_000,
            "PidsLimit": _PIDS,
            "PortBindings": {
                f"{port.guest}/{port.proto}": [{"HostIp": port.host_ip, "HostPort": str(port.host)}]
                for port in spec.ports
            },
            "SecurityOpt": ["no-new-privileges"],
            "CapDrop": ["ALL"],
            "CapAdd": _CAPABILITIES,
            "Binds": [_bind(self._volumes / volume.id, volume.mount_path, volume.read_only) for volume in spec.volumes],
            "NetworkMode": "slirp4netns:port_handler=slirp4netns" if self._podman else "bridge",
        }
        if self._quota and spec.disk_bytes:
            host["StorageOpt"] = {"size": str(spec.disk_bytes)}
        if spec.cpus is not None:
            host["CpusetCpus"] = ",".join(map(str, spec.cpus))
        if gpus:
            names = [f"nvidia.com/gpu={uuid}" for uuid in gpus]
            host["DeviceRequests"] = [{"Driver": "cdi", "DeviceIDs": names}]
        for volume in spec.volumes:
            (self._volumes / volume.id).mkdir(parents=True, exist_ok=True)
        body: dict[str, Any] = {
            "Image": spec.image,
            "Env": [f"{name}={value}" for name, value in spec.env.items()],
            "ExposedPorts": {f"{port.guest}/{port.proto}": {} for port in spec.ports},
            "Labels": {_LABEL: id, _NODE: self._label, "headrace.gpus": ",".join(spec.gpus)},
            "HostConfig": host,
        }
        if spec.command:
            body["Cmd"] = spec.command
        return body

    async def _call(self, method: str, path: str, body: Any = None, *, missing: bool = False) -> Any:
        """An answer as JSON. With `missing`, what is not there or is so already is no error."""
        answer = await self._raw(method, path, body)
        if answer.status_code >= 400 and not (missing and answer.status_code in (404, 409)):
            raise DriverError("PlatformError", "The node's container engine refused.", _message(answer))
        return answer.json() if answer.content and answer.status_code < 400 else None

    async def _raw(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        timeout: float = _CALL_S,
    ) -> httpx2.Response:
        if self._service is not None:
            await self._service.start()
        if self._held is None:
            socket = self._socket if self._service is None else self._service.socket
            transport = httpx2.AsyncHTTPTransport(uds=str(socket))
            self._held = httpx2.AsyncClient(transport=transport, base_url="http://engine" + _API)
        try:
            return await self._held.request(method, path, json=body, headers=headers, timeout=timeout)
        except httpx2.TransportError as error:
            why = f"{type(error).__name__}: {error}"
            raise DriverError("PlatformError", "The node's container engine does not answer.", why) from error


def _seen(one: dict[str, Any]) -> Seen:
    labels = one.get("Labels") or {}
    ports = [
        Port(int(port["PrivatePort"]), int(port["PublicPort"]), port.get("Type", "tcp"), port.get("IP") or "0.0.0.0")
        for port in one.get("Ports") or []
        if port.get("PublicPort")
    ]
    gpus = _gpus(labels)
    state = _STATES.get(str(one.get("State", "")).lower(), "Dead")
    return Seen(id=labels.get(_LABEL, ""), kind="Container", power=state, ports=ports, gpus=gpus)


def _gpus(labels: dict[str, str] | None) -> list[str]:
    return [uuid for uuid in (labels or {}).get("headrace.gpus", "").split(",") if uuid]


def _bind(path: Path, target: str, read_only: bool) -> str:
    return f"{path}:{target}" + (":ro" if read_only else "")


def _pull_problem(progress: str) -> str:
    """What went wrong, out of the lines of a pull that began well."""
    for line in progress.splitlines():
        said = json.loads(line) if line.startswith("{") else {}
        if said.get("error"):
            return str(said["error"])
    return ""


def _name(id: str) -> str:
    return f"headrace-{id}"


def _message(answer: httpx2.Response) -> str:
    try:
        said = answer.json()
    except ValueError:
        return answer.text
    return " ".join(str(said.get(key)) for key in ("message", "cause") if said.get(key))


def _no_image(image: str, said: str) -> DriverError:
    """Why an image cannot be had, in words for the renter."""
    lower = said.lower()
    if "unauthorized" in lower or "authentication required" in lower or "denied" in lower or "401" in lower:
        return DriverError("BadImage", f"The registry refuses the image {image}: check its name and credentials.", said)
    if "not found" in lower or "manifest unknown" in lower or "name unknown" in lower or "404" in lower:
        return DriverError("BadImage", f"There is no image {image}: check its name and tag.", said)
    if "no such host" in lower or "connection refused" in lower or "timeout" in lower or "unreachable" in lower:
        return DriverError("BadImage", f"The registry of the image {image} cannot be reached.", said)
    if "invalid reference" in lower or "parse" in lower:
        return DriverError("BadImage", f"{image} is not a name of an image.", said)
    return DriverError("BadImage", f"The image {image} cannot be fetched.", said)


def _not_made(said: str) -> DriverError:
    if "no command" in said.lower():  # podman's "no command or entrypoint provided", dockerd's "No command specified"
        return DriverError("BadCommand", "The image names no command to run: the rental has to name one.", said)
    return DriverError("PlatformError", "The node's container engine refused.", said)


def _no_start(said: str) -> DriverError:
    lower = said.lower()
    if "executable file not found" in lower or "no such file or directory" in lower:
        return DriverError("BadCommand", "The container's command is not in its image.", said)
    if "permission denied" in lower:
        return DriverError("BadCommand", "The container's command may not be executed: check its mode.", said)
    if "address already in use" in lower or "port is already allocated" in lower or "add hostfwd" in lower:
        return DriverError("PlatformError", "A port of the node that was to be published is taken.", said)
    return DriverError("PlatformError", "The container could not be started.", said)


def _ended(state: dict[str, Any], log: str, how: str) -> str:
    """How a command came to its end, in words for the renter."""
    code = state.get("ExitCode") or 0
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    saying = f" Its last words: {last[:200]}" if last else ""
    if state.get("OOMKilled"):
        return f"The container's command failed: it used more memory than it has.{saying}"
    if code:
        return f"The container's command failed: it {how} with status {code}.{saying}"
    return f"The container's command {how} with status 0: a container is there for as long as its command runs.{saying}"


def _unframed(content: bytes) -> str:
    """The text of a log: every piece comes behind eight bytes, of which the last four are its length."""
    text, place = b"", 0
    while place + 8 <= len(content) and content[place] in (0, 1, 2) and content[place + 1 : place + 4] == b"\0\0\0":
        size = int.from_bytes(content[place + 4 : place + 8], "big")
        text += content[place + 8 : place + 8 + size]
        place += 8 + size
    return (text or content).decode("utf-8", "replace")
