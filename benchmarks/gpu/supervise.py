"""Runs sections, each in a process of its own: one that crashes its device context, hangs or eats memory ends alone.

The processes are forked from a server that has imported the slow libraries once and has never touched a device. What a
section starts (engine workers, gateways in sessions of their own) is ended with it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from benchmarks.gpu import record
from benchmarks.gpu.budget import Budget, Deadline
from benchmarks.gpu.record import Record, Recorder
from benchmarks.rig.machine import process_tree

GRACE_S = 4.0
"""From a section's deadline until it is killed: it may be writing down what it has."""
WATCH_S = 1.0
"""Between two looks at what a section has started, so that it can be ended even when the section itself is gone."""


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the suite."""

    name: str
    module: str
    """Where `run(context)` lives; imported in the section's own process"""
    limit_s: float
    """Longest time that it may take"""
    least_s: float = 1.0
    """With less time left it is not begun"""
    needs: tuple[str, ...] = ()
    """Packages without which it is skipped"""
    vital: bool = False
    """Nothing after it can run when it fails"""


@dataclass(frozen=True, slots=True)
class Context:
    """What a section is given."""

    options: Mapping[str, Any]
    """Of the command, and facts that earlier sections found; plain values: tiny, device, work (folder), …"""
    recorder: Recorder
    deadline: Deadline

    @property
    def tiny(self) -> bool:
        """True for the shape that a CPU runs in seconds."""
        return bool(self.options["tiny"])

    @property
    def device(self) -> str:
        """ "cuda" or "cpu" """
        return str(self.options["device"])

    @property
    def work(self) -> Path:
        """Folder for checkpoints, sockets and logs; gone when the suite ends."""
        return Path(self.options["work"])

    def fact(self, name: str) -> Any:
        """What an earlier section found. Raises RuntimeError where it did not."""
        if name not in self.options:
            raise RuntimeError(f"no {name}: an earlier section had to find it")
        return self.options[name]


Run = Callable[[Context], None]


def server(preload: Sequence[str]) -> ForkServerContext:
    """Where sections come from. preload: modules imported once; what is not installed is left out."""
    made = get_context("forkserver")
    made.set_forkserver_preload(list(preload))
    return made


def missing(packages: Sequence[str]) -> list[str]:
    """Those that are neither modules nor distributions here."""
    return [name for name in packages if importlib.util.find_spec(name) is None and not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def run_section(
    context: ForkServerContext, section: Section, options: Mapping[str, Any], seconds: float, path: Path
) -> Record:
    """Run one section for at most `seconds` and return its record, whatever becomes of it."""
    process = context.Process(target=_inside, args=(section, dict(options), seconds, path), name=section.name)
    process.start()
    assert process.pid is not None
    end, below = time.monotonic() + seconds + GRACE_S, {process.pid: started(process.pid)}
    try:
        while process.exitcode is None and time.monotonic() < end:
            process.join(min(WATCH_S, max(0.0, end - time.monotonic())))
            below |= {pid: started(pid) for pid in process_tree(process.pid) if pid not in below}
        ended = process.exitcode is not None
    finally:
        kill(below)
        process.join()
    found = record.load(path, section.name)
    if found.status == record.RUNNING:
        status = record.FAILED if ended else record.TIMED_OUT
        reason = f"the process ended with {process.exitcode}" if ended else f"not done within {seconds:.0f} s"
        found.status, found.reason = status, reason
    return found


def run_sections(
    context: ForkServerContext,
    sections: Sequence[Section],
    options: Mapping[str, Any],
    budget: Budget,
    after_each: Callable[[list[Record]], None],
) -> list[Record]:
    """Run sections in order within the budget; after_each gets the records so far."""
    records: list[Record] = []
    known, stopped = dict(options), ""
    for section in sections:
        lacking = missing(section.needs)
        seconds = budget.share(section.limit_s, section.least_s)
        began = time.monotonic()
        if stopped:
            found = Record(section.name, record.NOT_REACHED, f"nothing runs without {stopped}")
        elif lacking:
            found = Record(section.name, record.SKIPPED, f"not installed here: {', '.join(lacking)}")
        elif not seconds:
            found = Record(
                section.name, record.NOT_REACHED, f"{budget.left:.0f} s left, it needs {section.least_s:.0f}"
            )
        else:
            print(f"== {section.name}, at most {seconds:.0f} s of {budget.left:.0f} s left", flush=True)
            path = Path(options["work"]) / f"{section.name}.json"
            found = run_section(context, section, known, seconds, path)
            found.seconds = time.monotonic() - began
        known |= found.facts
        if section.vital and found.status != record.DONE:
            stopped = section.name
        records.append(found)
        print(f"== {section.name}: {found.status} {found.reason} ({found.seconds:.1f} s)", flush=True)
        after_each(records)
    return records


def started(pid: int) -> str:
    """When a process began, in ticks of the machine's clock: a number is used again, but not for the same moment. Empty
    where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def kill(known: Mapping[int, str]) -> None:
    """End processes by number and beginning; those that are gone are passed over."""
    for pid, began in known.items():
        if began and started(pid) == began:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _inside(section: Section, options: dict[str, Any], seconds: float, path: Path) -> None:
    """The section's process."""
    recorder = Recorder(section.name, path)
    try:
        run: Run = importlib.import_module(section.module).run
        run(Context(options, recorder, Deadline(seconds)))
    except Exception as error:  # the edge of the process: whatever a section raises is its result
        traceback.print_exc()
        recorder.end(record.FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    else:
        recorder.end(record.DONE)
    if threading.active_count() > 1:  # a thread of some library does not want to end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
