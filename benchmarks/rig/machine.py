"""What this machine is and how busy it is: provenance of a result, and the guard against measuring a busy machine.

Everything is read from Linux' /proc. Times are seconds, memory is MiB, shares are of all cores together.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

TICK = float(os.sysconf("SC_CLK_TCK"))
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class MachineTimes:
    """CPU time of the whole machine since boot, in core-seconds."""

    busy: float
    stolen: float
    total: float


def machine_times() -> MachineTimes:
    """Read the machine's CPU times. Time the hypervisor gave to others counts as stolen, not as busy."""
    first_line = (PROC / "stat").read_text().split("\n", 1)[0]
    user, nice, system, idle, iowait, irq, softirq, steal = (int(x) / TICK for x in first_line.split()[1:9])
    busy = user + nice + system + irq + softirq
    return MachineTimes(busy, steal, busy + steal + idle + iowait)


def busy_share(seconds: float, sleep: Callable[[float], None] = time.sleep) -> float:
    """Return the share of the machine that was in use or stolen during the next `seconds`."""
    before = machine_times()
    sleep(seconds)
    after = machine_times()
    used = after.busy - before.busy + after.stolen - before.stolen
    return used / max(1e-9, after.total - before.total)


def wait_until_quiet(limit_s: float, share: float = 0.12, window_s: float = 3.0) -> float:
    """Wait until the machine's use is below `share` for one window, at most `limit_s`; return the last share seen.

    With `limit_s` 0 nothing is waited for and nothing is measured (the answer is 0).
    """
    deadline = time.monotonic() + limit_s
    seen = 0.0
    while time.monotonic() < deadline:
        seen = busy_share(window_s)
        if seen < share:
            break
    return seen


def process_tree(root: int) -> list[int]:
    """Return `root` and every live descendant of it."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            fields = _stat_fields(int(entry.name))
            if fields is not None:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree, todo = [], [root]
    while todo:
        pid = todo.pop()
        tree.append(pid)
        todo += children.get(pid, [])
    return tree


def gateway_processes(root: int) -> list[int]:
    """Return `root` and its live descendants but for engines: everything that a gateway is made of."""
    return [pid for pid in process_tree(root) if pid == root or b"engine." not in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    try:
        return (PROC / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time that the processes have used so far; one that is gone counts nothing."""
    ticks = 0
    for pid in pids:
        fields = _stat_fields(pid)
        if fields is not None:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICK


def is_running(pid: int) -> bool:
    """Return True while the process exists and is not a zombie."""
    fields = _stat_fields(pid)
    return fields is not None and fields[0] not in ("Z", "X")


def rss_mib(pids: Iterable[int]) -> float:
    """Return the resident memory of the processes, pages that they share counted in each."""
    pages = 0
    for pid in pids:
        try:
            pages += int((PROC / str(pid) / "statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_model() -> str:
    """Return the processor's name with the vector extensions that matter to these figures."""
    name, flags = platform.processor() or platform.machine(), ""
    for line in (PROC / "cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() == "flags":
            flags = value
            break
    known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
    return f"{name} ({', '.join(x for x in known if x in flags.split()) or 'no vector extensions listed'})"


def memory_mib() -> int:
    """Return the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


@dataclass(frozen=True, slots=True)
class Load:
    """Who used the machine during one measurement."""

    seconds: float
    server_cpu_s: float
    client_cpu_s: float
    others_share: float
    """Share of the machine that went to neither the server nor this process: trust a row where it is small."""
    stolen_share: float
    server_rss_mib: float


class LoadMeter:
    """Measures from its creation to `stop()`: the server's process tree, this process, and everybody else."""

    def __init__(self, server_root: int | None) -> None:
        self._root = server_root
        self._started = time.perf_counter()
        self._machine = machine_times()
        self._server = cpu_seconds(self._tree())
        self._client = time.process_time()

    def _tree(self) -> list[int]:
        return process_tree(self._root) if self._root is not None else []

    def stop(self) -> Load:
        """Return what was used since the meter was made."""
        tree, machine = self._tree(), machine_times()
        server = max(0.0, cpu_seconds(tree) - self._server)
        client = time.process_time() - self._client
        total = max(1e-9, machine.total - self._machine.total)
        others = max(0.0, machine.busy - self._machine.busy - server - client)
        return Load(
            seconds=time.perf_counter() - self._started,
            server_cpu_s=server,
            client_cpu_s=client,
            others_share=others / total,
            stolen_share=(machine.stolen - self._machine.stolen) / total,
            server_rss_mib=rss_mib(tree),
        )


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (the name before it may contain spaces), None when it is gone."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
