"""Draws TTFT and throughput against concurrency from results/sweep.json (benchmarks.serving --sweep) as a PNG."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import orjson

mpl.use("Agg")

from matplotlib import pyplot as plt  # the back end has to be chosen first

from benchmarks.rig.results import RESULTS, percentile

Series = dict[str, list[tuple[int, float]]]


def series(document: dict[str, Any], figure: str) -> Series:
    """Return label → (concurrency, median of `figure` over repetitions), in rising concurrency."""
    values: dict[str, dict[int, list[float]]] = {}
    for result in document["results"]:
        if result["completed"]:
            values.setdefault(result["label"], {}).setdefault(result["concurrency"], []).append(result[figure])
    return {
        label: [(concurrency, percentile(of, 0.5)) for concurrency, of in sorted(points.items())]
        for label, points in values.items()
    }


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the plot of a sweep to `path`."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    panels = (
        ("output_tok_s", "output tokens per second", "linear"),
        ("ttft_p50_ms", "time to first token, p50 (ms)", "log"),
    )
    for axis, (key, label, scale) in zip(axes, panels):
        for name, points in series(document, key).items():
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
        ticks = sorted({result["concurrency"] for result in document["results"]})
        axis.set(xscale="log", yscale=scale, xlabel="concurrent streams", ylabel=label, xticks=ticks)
        axis.set_xticklabels([str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(True, alpha=0.3)
        axis.legend()
    origin = document["provenance"]
    figure.suptitle(
        f"256 tokens in, 64 out · {origin['cpu']} · {origin['cores']} cores · {origin['date'][:10]}", size=9
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.plot", description=__doc__)
    parser.add_argument("--sweep", type=Path, default=RESULTS / "sweep.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "sweep.png")
    options = parser.parse_args(argv)
    if not options.sweep.exists():
        print(f"no {options.sweep}: run `python -m benchmarks.serving --sweep` first")
        return 1
    draw(orjson.loads(options.sweep.read_bytes()), options.out)
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
