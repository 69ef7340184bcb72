"""Everything that a GPU has to show, in one run: kernels, engine, first tokens, decoding, start-up, a peer.

    python -m benchmarks.gpu_suite [--tiny] [--budget-s 520] [--only SECTION …] [--profile]

For a machine with a GPU, torch, triton and transformers, and nothing else: no network, and the model, 8 billion
parameters in the shape of Llama 3, is made of random weights on the spot. It checks every kernel against its definition
in plain torch and the engine against transformers, times kernels against the device's ceilings, measures first tokens,
tokens per second, gaps and start-up in process (engine client to engine process) and over HTTP through the gateway, and
runs transformers' continuous batching on the same weights. Sections run in the order of what they are worth, each with
a deadline and in a process of its own; the result is on disk after each of them. Where a package is missing, what needs
it is skipped and named.

--tiny runs all of it on a CPU in a shape of two small layers, the kernels in Triton's interpreter: it tests the suite.

The result is gpu_suite.json (gpu_suite_tiny.json) in --out, by default the folder that $OUT names, else
benchmarks/results. Exit status 1 when a check did not hold or a section failed, ran out of time or was not reached.
A missed target is a finding, not a failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import record, supervise
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.folders import working_folder
from benchmarks.gpu.record import Record
from benchmarks.gpu.supervise import Section
from benchmarks.gpu.table import closing
from benchmarks.rig import results

ENGINE = ("msgspec", "orjson", "numpy", "safetensors", "xxhash")
"""What an engine process needs beside torch"""
PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
_NAME = re.compile(r"[A-Za-z0-9._-]+")
GATEWAY = (
    *(found[0] for line in tomllib.loads(PROJECT.read_text("utf-8"))["project"]["dependencies"]
      if (found := _NAME.match(line))),
    "httptools", "uvloop",
)  # fmt: skip
"""What the gateway needs: all that the project does"""

SECTIONS = (
    Section("machine", "benchmarks.gpu.machine", 40, vital=True),
    Section("checkpoint", "benchmarks.gpu.making", 60),
    Section("rows", "benchmarks.gpu.rowwise", 40, needs=("triton",)),
    Section("attention", "benchmarks.gpu.attending", 70, needs=("triton",)),
    Section("choice", "benchmarks.gpu.choosing", 40, needs=("triton",)),
    Section("equality", "benchmarks.gpu.equality", 60, needs=(*ENGINE, "transformers")),
    Section("families", "benchmarks.gpu.families", 60, needs=("triton", *ENGINE, "transformers")),
    Section("adapters", "benchmarks.gpu.adapters", 40, needs=("triton", *ENGINE, "transformers")),
    Section("in process", "benchmarks.gpu.in_process", 130, least_s=10, needs=ENGINE),
    Section("http", "benchmarks.gpu.over_http", 150, least_s=10, needs=GATEWAY),
    Section("roofline", "benchmarks.gpu.roofline", 50, needs=("triton",)),
    Section("peer", "benchmarks.gpu.peer", 110, least_s=10, needs=("transformers", "safetensors")),
    Section("switches", "benchmarks.gpu.switches", 80, least_s=10, needs=ENGINE),
)
"""In the order of what they are worth. A section is a module with run(context); its recorder takes what it finds."""
PROFILE = Section("profile", "benchmarks.gpu.profiling", 60, needs=ENGINE)
WEIGHTS_BYTES = 17 << 30
PRELOAD = ("torch", "numpy")
"""Imported once for all sections: nothing that touches a device"""
PRELOAD_TINY = ("transformers.models.llama.modeling_llama",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections; see the head of this file."""
    options = parse(argv)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # whether there is a GPU is found out without touching it
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    sections = chosen(options.only, options.profile)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # weights in memory are not left behind
    work = Path(tempfile.mkdtemp(prefix="headrace-gpu-"))
    name = "gpu_suite_tiny" if options.tiny else "gpu_suite"
    path = options.out / f"{name}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"tiny": options.tiny, "budget_s": options.budget_s}

    def keep(records: list[Record]) -> None:
        found = facts | {key: value for one in records for key, value in one.facts.items()}
        record.save(path, record.merged(records, found))

    records: list[Record] = []
    weights: Path | None = None
    try:
        weights = work if options.tiny else working_folder(WEIGHTS_BYTES)
        context = supervise.server((*PRELOAD, *PRELOAD_TINY) if options.tiny else PRELOAD)
        given = {"tiny": options.tiny, "device": "cpu" if options.tiny else "cuda", "work": str(work)}
        given["weights"] = str(weights)
        records = supervise.run_sections(context, sections, given, Budget(options.budget_s), keep)
    finally:
        for folder in filter(None, (work, weights)):
            shutil.rmtree(folder, ignore_errors=True)
    known = facts | {key: value for one in records for key, value in one.facts.items()}
    print(f"\n{closing(records, known)}\n\nwritten: {path}", flush=True)
    return int(any(one.status in record.BAD or one.broken for one in records))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu_suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on a CPU")
    parser.add_argument("--budget-s", type=float, default=520.0, help="seconds for everything (default: 520)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="SECTION",
        choices=[section.name for section in (*SECTIONS, PROFILE)], help="these sections, and the two first ones",
    )  # fmt: skip
    parser.add_argument(
        "--profile", action="store_true", help="also name the kernels that a decode step spends time in"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT") or results.RESULTS), help="folder of the result"
    )
    return parser.parse_args(argv)


def chosen(only: Sequence[str], profile: bool) -> list[Section]:
    """The sections to run, in order."""
    found = [section for section in SECTIONS if not only or section.name in ("machine", "checkpoint", *only)]
    return [*found, PROFILE] if profile or PROFILE.name in only else found


if __name__ == "__main__":
    sys.exit(main())
