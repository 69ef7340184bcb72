"""Adapters are read while steps run: nobody who is answered waits for a disk."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.lora_files import Delta, read_adapter
from engine.rest import RestingCore
from engine.wire import AdapterQuery, AdapterReply, unpack_tokens
from tests.engine.test_lora import core_of, expected, finish, folders, submit

__all__ = ["expected", "folders"]


class SlowDisk:
    """Folders are read when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.fault: Exception | None = None
        self.read: list[tuple[str, str]] = []
        monkeypatch.setattr("engine.lora.read_adapter", self._read)

    def _read(self, folder: Path, shapes: Mapping[str, tuple[int, int]], *, most_rank: int) -> dict[str, Delta]:
        self.read.append((folder.name, threading.current_thread().name))
        self.began.release()
        assert self.go.acquire(timeout=30)
        if self.fault is not None:
            raise self.fault
        return read_adapter(folder, shapes, most_rank=most_rank)


def until(core: RestingCore, told: list[AdapterReply], count: int) -> None:
    """Step until so many have been answered."""
    while len(told) < count:
        assert core.has_work(), "nobody would be answered any more"
        core.step()


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_steps_go_on_while_an_adapter_is_read(
    folders: dict[str, Path], expected: dict[str, list[int]], graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = core_of(folders, graphs=graphs)
    disk, core, told = SlowDisk(monkeypatch), RestingCore(engine), list[AdapterReply]()
    submit(engine, "running")
    said = [token for _ in range(3) for progress in core.step() for token in unpack_tokens(progress.tokens)]
    core.adapter(AdapterQuery(1, "one", str(folders["one"])), told.append)
    assert disk.began.acquire(timeout=30)
    said += [token for _ in range(5) for progress in core.step() for token in unpack_tokens(progress.tokens)]
    assert said == expected[""][:8], "a token a step"
    assert told == [] and submit(engine, "early", "one").code == "unknown_adapter"
    disk.go.release()
    until(core, told, 1)
    assert told == [AdapterReply(1, ["one"])]
    submit(engine, "late", "one")
    assert finish(engine)["late"][0] == expected["one"]
    assert disk.read == [("one", "adapter")], "not by the thread that steps"


def test_adapters_are_read_one_by_one_and_an_engine_that_reads_does_not_sleep(
    folders: dict[str, Path], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = core_of(folders, max_loras=1)
    disk, core, told = SlowDisk(monkeypatch), RestingCore(engine), list[AdapterReply]()
    for number, name in enumerate(("one", "two")):
        core.adapter(AdapterQuery(number, name, str(folders[name])), told.append)
    core.adapter(AdapterQuery(2, "two"), told.append)
    core.adapter(AdapterQuery(3, "one", str(folders["two"])), told.append)
    assert [reply.error for reply in told] == [f"an adapter {name} is being loaded" for name in ("two", "one")]
    with pytest.raises(ValueError, match="an adapter is being loaded"):
        core.rest(True)
    assert disk.began.acquire(timeout=30) and len(disk.read) == 1
    assert core.has_work() and core.step() == [], "it waits for a moment only"
    disk.go.release(2)
    until(core, told, 4)
    assert told[2] == AdapterReply(0, ["one"])
    assert told[3].names == ["one"] and "max_loras" in told[3].error, "the place was free when it was asked for"
    assert not core.has_work()
    core.rest(True)
    submit(core.awake, "a", "one")
    assert finish(core.awake)["a"][0] == expected["one"]


@pytest.mark.parametrize("fault", [MemoryError("no room"), RuntimeError("the disk is gone")])
def test_whatever_a_folder_does_to_its_reader_the_engine_lives(
    folders: dict[str, Path], expected: dict[str, list[int]], fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = core_of(folders)
    disk, core, told = SlowDisk(monkeypatch), RestingCore(engine), list[AdapterReply]()
    disk.fault = fault
    disk.go.release(2)
    core.adapter(AdapterQuery(1, "one", str(folders["one"])), told.append)
    until(core, told, 1)
    assert told == [AdapterReply(1, [], f"{type(fault).__name__}: {fault}")]
    disk.fault = None
    core.adapter(AdapterQuery(2, "one", str(folders["one"])), told.append)
    until(core, told, 2)
    assert told[1] == AdapterReply(2, ["one"])
    submit(engine, "a", "one")
    assert finish(engine)["a"][0] == expected["one"]
