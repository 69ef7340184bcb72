"""Real containers: limits, ports, power, logs, and failures that a renter can act on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from starlette.routing import Router

from marketplace.agent.disk_watch import DiskWatch
from marketplace.agent.disks import RetainedDisks
from marketplace.agent.drivers import podman, podman_runtime
from marketplace.agent.drivers.base import DriverError
from marketplace.agent.drivers.podman import PodmanDriver
from marketplace.agent.drivers.podman_runtime import end_former, runtime_folder
from marketplace.agent.drivers.podman_service import containers_conf, registries_conf
from marketplace.agent.keeper import Keeper
from marketplace.agent.records import Record, Records
from marketplace.agent.serving import served, tcp_listener
from marketplace.agent.wire import ContainerSpec, Port

MIB = 1 << 20


@contextlib.asynccontextmanager
async def engine(folder: Path, registry: Any) -> AsyncIterator[tuple[PodmanDriver, str]]:
    """A driver, and a registry's image that it may have."""
    listener = tcp_listener("127.0.0.1", 0)
    where = f"127.0.0.1:{listener.getsockname()[1]}"
    driver = PodmanDriver(folder, folder / "volumes", label="test", insecure=[where], settle_s=0.2)
    async with served(Router(registry.Registry().routes()), listener):
        try:
            yield driver, f"{where}/box:1"
        finally:
            for one in await driver.listing():
                await driver.destroy(one.id)
            await driver.close()
            assert not runtime_folder(folder).exists(), "nobody needs it any more"


async def heard(driver: PodmanDriver, id: str, word: bytes) -> None:
    """Listen to a container until it has said something."""
    said, held = b"", driver._held
    assert held is not None, "the driver has called its engine"
    path = f"/containers/{podman._name(id)}/logs?stdout=true&follow=true"
    async with asyncio.timeout(30), held.stream("GET", path) as log:
        async for piece in log.aiter_raw():
            said += piece
            if word in said:
                return
    raise AssertionError(f"it ended after {said!r}")


async def failure(driver: PodmanDriver, spec: ContainerSpec, folder: Path) -> DriverError:
    with pytest.raises(DriverError) as caught:
        await driver.create("bad", spec, folder, lambda phase: None)
    await driver.destroy("bad")
    return caught.value


@pytest.mark.slow
def test_a_container_lives_within_its_limits_and_failures_are_explained(
    registry: Any, port: int, tmp_path: Path
) -> None:
    async def run() -> None:
        async with engine(tmp_path, registry) as (driver, image):
            capabilities = await driver.probe()
            assert capabilities.container_engine is not None
            assert capabilities.container_engine.startswith("podman ")
            script = (
                "cat /sys/fs/cgroup/memory/memory.limit_in_bytes; mkdir /w; echo hi > /w/index.html; httpd -f -h /w"
            )
            spec = ContainerSpec(
                name="box",
                image=image,
                command=["/bin/sh", "-c", script],
                ports=[Port(80, port, "tcp", "127.0.0.1")],
                vcpu=1,
                dram_bytes=48 * MIB,
            )
            phases: list[str] = []
            await driver.create("a", spec, tmp_path, phases.append)
            await driver.create("a", spec, tmp_path, phases.append)
            assert phases == ["Pulling", "Creating"], "what is there is not made again"
            (seen,) = await driver.listing()
            assert (seen.id, seen.power, seen.ports) == ("a", "Running", spec.ports)
            async with httpx2.AsyncClient() as client:
                assert (await client.get(f"http://127.0.0.1:{port}/")).text == "hi\n"
            assert str(48 * MIB) in await driver.tail_log("a", 5)
            used = await driver.metrics("a")
            assert used is not None
            assert used.memory_bytes is not None
            assert 0 < used.memory_bytes < 48 * MIB

            await driver.pause("a")
            assert (await driver.listing())[0].power == "Paused"
            await driver.resume("a")
            await driver.stop("a", 0)
            assert (await driver.listing())[0].power == "Exited"
            await driver.start("a")
            assert (await driver.listing())[0].power == "Running"
            await driver.destroy("a")
            await driver.destroy("a")
            assert await driver.listing() == []

            wrong = await failure(driver, ContainerSpec(name="b", image=image, command=["/bin/nothere"]), tmp_path)
            assert (wrong.cause, wrong.message) == ("BadCommand", "The container's command is not in its image.")
            ended = await failure(driver, ContainerSpec(name="b", image=image), tmp_path)
            assert ended.message == (
                "The container's command failed: it ended at once with status 7. Its last words: no command"
            )
            quick = await failure(
                driver, ContainerSpec(name="b", image=image, command=["/bin/sh", "-c", ":"]), tmp_path
            )
            assert quick.message.startswith("The container's command ended at once with status 0: ")
            sleeps = ContainerSpec(name="c", image=image, command=["/bin/sh", "-c", "sleep 600"])
            await driver.create("c", sleeps, tmp_path, phases.append)
            assert await driver.ending("c", 5) is None
            await driver.stop("c", 0)
            ending = await driver.ending("c", 5)
            assert ending is not None
            assert ending.message == "The container's command failed: it ended with status 137."
            await driver.destroy("c")
            assert await driver.ending("c", 5) is None
            missing = await failure(driver, ContainerSpec(name="b", image=image[:-1] + "9"), tmp_path)
            assert missing.cause == "BadImage"
            assert "check its name and tag" in missing.message
            local = await failure(driver, ContainerSpec(name="b", image="localhost/mine:1"), tmp_path)
            assert "There is no image localhost/mine:1" in local.message

    asyncio.run(run())


@pytest.mark.slow
def test_a_container_lives_on_without_its_agent_and_nothing_is_left_after_both(registry: Any, tmp_path: Path) -> None:
    folder, beside = tmp_path / "one", tmp_path / "two"
    runtime = runtime_folder(folder)

    async def run() -> None:
        async with engine(folder, registry) as (driver, image):
            sleeps = ContainerSpec(name="a", image=image, command=["/bin/sh", "-c", "sleep 600"])
            await driver.create("a", sleeps, folder, lambda phase: None)
            await driver.close()
            async with engine(beside, registry) as (other, _):
                assert (await other.probe()).container, "another agent begins on this machine, and leaves it alone"
            assert (await driver.listing())[0].power == "Running"
            service = driver._service
            assert service is not None and service._process is not None and service._held is not None
            process = service._process
            os.close(service._held)  # killed: its service goes on, and nobody holds its folder
            service._held = None
            async with engine(beside, registry) as (other, _):
                assert (await other.probe()).container
                assert (await driver.listing())[0].power == "Running", "what has a container is left alone"
                await driver.destroy("a")
            async with engine(beside, registry) as (other, _):
                assert (await other.probe()).container
                async with asyncio.timeout(30):
                    assert await process.wait() == -signal.SIGKILL
                assert not runtime.exists()
            assert not podman_runtime._mounted(folder, beside, runtime, runtime_folder(beside))
            assert not runtime_folder(beside).exists()

    asyncio.run(run())
    assert not podman_runtime._mounted(folder, runtime) and not runtime.exists()


@pytest.mark.slow
def test_what_a_container_writes_is_measured_and_who_writes_too_much_is_stopped(registry: Any, tmp_path: Path) -> None:
    """A real container, whose disk no file system holds it to."""

    async def run() -> None:
        async with engine(tmp_path, registry) as (driver, image):
            assert (await driver.probe()).container_disk == "watched"
            keeper = Keeper(
                records=Records(tmp_path / "instances", durable=False),
                disks=RetainedDisks(tmp_path / "retained"),
                drivers={"Container": driver},
                now=lambda: 0,
            )
            watch = DiskWatch(keeper, {"Container": driver})
            script = "cat /bin/busybox /bin/busybox /bin/busybox > /big; echo written; sleep 600"
            spec = ContainerSpec(
                name="box", image=image, command=["/bin/sh", "-c", script], dram_bytes=48 * MIB, disk_bytes=4 * MIB
            )
            await driver.create("a", spec, tmp_path, lambda phase: None)
            await heard(driver, "a", b"written")
            assert await watch.look() == [], "it is not ours to look after"
            keeper.records.put(Record(id="a", spec=spec, stage="Created", created_at=0))
            (full,) = await watch.look()
            assert full.message.startswith("The container was stopped: it has written 5")
            assert (await driver.listing())[0].power == "Exited" and await driver.disk_use("a") is None

            driver._quota = True  # as on XFS with project quotas: this one has none, and says so
            wrong = await failure(driver, msgspec.structs.replace(spec, name="b"), tmp_path)
            assert "quota" in wrong.tail.lower()
            assert await driver.disk_use("a") is None

    asyncio.run(run())


def test_an_engine_that_is_not_there_is_a_problem_and_no_error(tmp_path: Path) -> None:
    driver = PodmanDriver(tmp_path, tmp_path, label="test", socket=tmp_path / "none.sock")
    capabilities = asyncio.run(driver.probe())
    assert not capabilities.container
    assert "does not answer" in capabilities.problems[0]


def test_an_engine_that_says_nothing_of_itself_is_a_problem_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def half(driver: PodmanDriver, method: str, path: str) -> Any:
        if path == "/info":
            raise DriverError("PlatformError", "The node's container engine refused.", "no storage")
        return {"Version": "4"}

    monkeypatch.setattr(PodmanDriver, "_call", half)
    driver = PodmanDriver(tmp_path, tmp_path / "volumes", label="test", socket=tmp_path / "none.sock")
    found = asyncio.run(driver.probe())
    assert not found.container and found.problems == ["containers: The node's container engine refused. no storage"]


@pytest.mark.parametrize(
    "said",
    [
        "container create: no command or entrypoint provided, and no CMD or ENTRYPOINT from image",  # podman's words
        "No command specified",  # dockerd's
    ],
)
def test_an_image_that_names_no_command_is_its_renter_s_matter(said: str) -> None:
    told = podman._not_made(said)
    assert (told.cause, told.message) == (
        "BadCommand",
        "The image names no command to run: the rental has to name one.",
    )
    assert podman._not_made("no space left on device").cause == "PlatformError"


class Engine:
    """A container engine with one container, which is as the test says."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = {"Status": "running", "ExitCode": 0}
        self.log = b""

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/logs"):
            return httpx2.Response(200, content=self.log)
        if self.state is None:
            return httpx2.Response(404, json={"message": "no such container"})
        return httpx2.Response(200, json={"State": self.state, "Config": {}})


LASTS = "a container is there for as long as its command runs."


@pytest.mark.parametrize(
    ("state", "log", "cause", "message"),
    [
        ({"Status": "exited", "ExitCode": 0}, b"", None, f"The container's command ended with status 0: {LASTS}"),
        (
            {"Status": "exited", "ExitCode": 3},
            b"one\ntwo\n\n",
            "BadCommand",
            "The container's command failed: it ended with status 3. Its last words: two",
        ),
        (
            {"Status": "stopped", "ExitCode": 137, "OOMKilled": True},
            b"",
            "BadCommand",
            "The container's command failed: it used more memory than it has.",
        ),
        ({"Status": "configured"}, b"", "PlatformError", "The container ended when its node began anew."),
    ],
)
def test_how_a_container_ended_is_found_out_from_its_engine(
    tmp_path: Path, state: dict[str, Any], log: bytes, cause: str | None, message: str
) -> None:
    engine = Engine()
    driver = PodmanDriver(tmp_path, tmp_path, label="n", socket=tmp_path / "s", settle_s=0)
    driver._held = httpx2.AsyncClient(transport=httpx2.MockTransport(engine), base_url="http://engine/v1")

    async def main() -> None:
        assert await driver.ending("a", 5) is None, "it runs"
        engine.state, engine.log = state, log
        found = await driver.ending("a", 5)
        assert found is not None
        assert (found.at, found.cause, found.message) == (5, cause, message)
        engine.state = None
        assert await driver.ending("a", 5) is None, "it is gone"
        await driver.close()

    asyncio.run(main())


def test_a_command_that_ends_at_once_has_failed_whatever_it_says(tmp_path: Path) -> None:
    engine = Engine()
    engine.state = {"Status": "exited", "ExitCode": 0}
    driver = PodmanDriver(tmp_path, tmp_path, label="n", socket=tmp_path / "s", settle_s=0)
    driver._held = httpx2.AsyncClient(transport=httpx2.MockTransport(engine), base_url="http://engine/v1")

    async def main() -> DriverError:
        with pytest.raises(DriverError) as caught:
            await driver.create("a", ContainerSpec(name="a", image="localhost/i"), tmp_path, print)
        await driver.close()
        return caught.value

    told = asyncio.run(main())
    assert (told.cause, told.message) == ("BadCommand", f"The container's command ended at once with status 0: {LASTS}")


def test_the_service_of_an_agent_that_was_killed_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "podman.sock"
    end_former(path)  # nobody is there
    listen = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print(1, flush=True)"
    )
    command = [sys.executable, "-c", f"{listen}; s.accept(); s.accept()", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as former:
        assert former.stdout is not None and former.stdout.readline() == b"1\n"
        end_former(path)
        assert former.wait(30) == -signal.SIGKILL
    end_former(path)  # its socket is still there


def test_settings_of_the_engine() -> None:
    conf = containers_conf(1024)
    assert 'default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]' in conf
    assert 'cgroup_manager = "cgroupfs"' in conf
    assert 'location = "127.0.0.1:5000"\ninsecure = true' in registries_conf(["127.0.0.1:5000"])
    assert "insecure" not in registries_conf([])
    assert len(str(runtime_folder(Path("/a" * 100)))) <= 50
