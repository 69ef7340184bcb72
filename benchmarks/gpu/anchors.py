"""The figures to reach, for a Llama of 8 billion parameters in bfloat16 on one NVIDIA H200, and where they come from.

Floors are rooflines at the bandwidth and the matrix rate measured on that GPU (4.3 TB/s, 790 TFLOP/s bf16): one sweep
of 15 GB of weights takes 3.5 ms, 2,048 prompt tokens take 37.6 ms of arithmetic. No software gets below them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DEVICE = "H200"
"""Part of the name of the GPU that the figures are for."""
PLACES = ("in process", "http", "peer")
"""Where a figure is measured: engine client to engine process; through the gateway; transformers on the same weights"""


@dataclass(frozen=True, slots=True)
class Anchor:
    """One line of the final table."""

    figure: str
    """Name of the figure, without its place"""
    what: str
    unit: str
    better: Literal["less", "more"] = "less"
    target: float | None = None
    """None where only the floor is known"""
    floor: float | None = None
    known: str = ""
    """What others reach"""
    judged: str = "http"
    """The place whose figure has to reach the target"""


ANCHORS = (
    Anchor("ttft_128_ms", "first token, 128-token prompt, idle", "ms", target=8.0, floor=3.5, known="floor 3.5"),
    Anchor("ttft_512_ms", "first token, 512-token prompt, idle", "ms", floor=9.1, known="floor 9.1"),
    Anchor("ttft_2048_ms", "first token, 2,048-token prompt, idle", "ms", target=52.0, floor=37.6, known="floor 37.6"),
    Anchor("ttft_8192_ms", "first token, 8,192-token prompt, idle", "ms", floor=167.0, known="floor 167"),
    Anchor(
        "ttft_mixed_ms", "first token p50, chat lengths, 4 at once", "ms", target=12.0,
        known="SGLang 27, TensorRT-LLM 45, vLLM 60 (H100)",
    ),
    Anchor("tpot_1_ms", "per output token, one stream", "ms", target=4.3, floor=3.5, known="good engines 5.0 to 5.6"),
    Anchor("decode_32_tok_s", "decode, 32 streams at 1k context", "tok/s", "more", floor=7_100.0, known="roof 7,100"),
    Anchor(
        "decode_256_tok_s", "decode, 256 streams at 1k context", "tok/s", "more", target=16_000.0, floor=22_300.0,
        known="roof 22,300",
    ),
    Anchor(
        "gap_p99_ms", "gap between tokens p99 while a long prompt arrives", "ms", target=15.0,
        known="220 with one chunk of 8,192",
    ),
    Anchor("start_s", "start to ready, weights in memory", "s", target=10.0, known="30 to 120"),
)  # fmt: skip


def judge(anchor: Anchor, value: float | None) -> str:
    """ "met", "missed", or "-" where there is no target or no value."""
    if anchor.target is None or value is None:
        return "-"
    met = value <= anchor.target if anchor.better == "less" else value >= anchor.target
    return "met" if met else "missed"


def place_of(anchor: Anchor, figures: Mapping[str, float]) -> dict[str, float | None]:
    """The anchor's figure at every place where it was measured."""
    return {place: figures.get(f"{place}.{anchor.figure}") for place in PLACES}
