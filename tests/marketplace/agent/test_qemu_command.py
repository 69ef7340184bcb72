"""Command lines of virtual machines, the probe that chooses an accelerator, and ports."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from marketplace.agent.drivers import accelerator
from marketplace.agent.drivers.qemu_command import Host, command, mark
from marketplace.agent.ports import reachable
from marketplace.agent.serving import tcp_listener
from marketplace.agent.wire import Network, NumaSlice, Port, VmSpec, Volume

GIB = 1 << 30
GPU = "0000:65:00.0"


def words(host: Host | None = None, **fields: Any) -> list[str]:
    spec = VmSpec(**{"name": "m", "vcpu": 4, "dram_bytes": 8 * GIB, "disk_bytes": GIB, **fields})
    functions = {GPU: [GPU, "0000:65:00.1"]}
    return command(host or Host(), "node-1", "id-1", spec, volumes=[], functions=functions)


def after(line: list[str], flag: str) -> list[str]:
    return [line[at + 1] for at, word in enumerate(line) if word == flag]


def test_a_machine_is_known_by_its_mark_and_its_ports() -> None:
    line = words(ports=[Port(22, 40022), Port(53, 40053, "udp", "203.0.113.7")])
    assert after(line, "-name") == [mark("node-1", "id-1")] == ["guest=headrace-node-1-id-1"]
    assert after(line, "-netdev") == [
        "user,id=n0,hostfwd=tcp:0.0.0.0:40022-:22,hostfwd=udp:203.0.113.7:40053-:53",
    ]
    assert after(line, "-smp") == ["4,sockets=1,cores=4,threads=1"]
    assert after(line, "-m") == ["8192M"]


def test_the_accelerator_decides_the_processor() -> None:
    assert after(words(Host(accelerator="kvm")), "-accel") == ["kvm"]
    assert after(words(Host(accelerator="kvm")), "-cpu") == ["host"]
    assert after(words(), "-cpu") == ["max"]
    assert after(words(Host(run_as="renter")), "-runas") == ["renter"]


def test_memory_comes_from_the_pages_of_the_nodes_that_it_was_given() -> None:
    line = words(numa=[NumaSlice(0, [0, 1, 2], 6), NumaSlice(1, [8], 2)])
    assert after(line, "-m") == ["8G"]
    objects = after(line, "-object")
    assert "size=6G,mem-path=/dev/hugepages1G,host-nodes=0,policy=bind,prealloc=on" in objects[0]
    assert "size=2G" in objects[1]
    assert "host-nodes=1" in objects[1]
    assert after(line, "-numa") == ["node,nodeid=0,memdev=ram0,cpus=0-2", "node,nodeid=1,memdev=ram1,cpus=3-3"]
    assert after(words(numa=[NumaSlice(0, [0, 1], 0)]), "-object") == []


def test_all_functions_of_a_gpu_sit_behind_a_port_of_their_own() -> None:
    line = words(gpus=[GPU])
    assert "pcie-root-port,id=gpu0,chassis=1,slot=1" in line
    assert f"vfio-pci,host={GPU},bus=gpu0,addr=0.0,multifunction=on" in line
    assert "vfio-pci,host=0000:65:00.1,bus=gpu0,addr=0.1" in line


def test_volumes_are_disks_that_name_themselves() -> None:
    volume = Volume(id="019a0f6c-2a00-7abc-8def-000000000020", size_bytes=GIB, read_only=True)
    spec = VmSpec(name="m", vcpu=1, dram_bytes=GIB, disk_bytes=GIB, volumes=[volume])
    line = command(Host(), "n", "i", spec, volumes=[Path("/v/a,b.qcow2")], functions={})
    assert "if=none,id=volume0,file=/v/a,,b.qcow2,format=qcow2,discard=unmap,readonly=on" in line
    assert "virtio-blk-pci,drive=volume0,serial=019a0f6c-2a00-7abc-8" in line


def test_a_process_may_start_others_only_for_a_card_in_a_bridge() -> None:
    assert after(words(), "-sandbox") == ["on,obsolete=deny,resourcecontrol=deny,elevateprivileges=deny,spawn=deny"]
    other = words(Host(run_as="renter"))
    assert after(other, "-sandbox") == ["on,obsolete=deny,resourcecontrol=deny,spawn=deny"]
    bridged = words(network=Network(interface="br7"))
    assert "spawn=deny" not in after(bridged, "-sandbox")[0]
    assert "bridge,id=n1,br=br7" in bridged


def test_an_accelerator_is_chosen_by_booting_and_not_by_its_device() -> None:
    assert asyncio.run(accelerator.works("tcg", "qemu-system-x86_64"))
    assert len(accelerator.boot_sector()) == 512
    assert not asyncio.run(accelerator.works("kvm", "/bin/true")), "who ends without a word has not booted"
    assert not asyncio.run(accelerator.works("tcg", "no-such-program"))


def test_an_accelerator_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    hangs = tmp_path / "qemu"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    assert not asyncio.run(accelerator.works("kvm", str(hangs), deadline_s=0.05))


def test_a_port_that_accepts_and_says_nothing_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marketplace.agent.ports._BANNER_S", 0.1)
    with tcp_listener("127.0.0.1", 0) as listener:
        listener.listen()
        port = Port(22, listener.getsockname()[1], "tcp", "127.0.0.1")
        assert not asyncio.run(reachable(port, b"SSH-"))
