"""Native CPU kernels at SmolLM2-135M's shapes against the machine's ceilings: `python -m benchmarks.kernels_cpu`.

Random weights of the real model's shapes (Q4_1 layers, Q8_0 embedding and head); every figure is the best of several
runs, because what a shared machine adds is never negative. Writes results/kernels_cpu.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.rig import results
from kernels.blocks import BLOCK_BYTES
from kernels.cpu import CpuOps
from kernels.decoder import DecoderProgram, DecoderSpec, LayerSpec
from kernels.interface import BlockFormat, BlockQuantized, LinearWeight

LAYERS, HIDDEN, INNER, HQ, HKV, D, VOCAB, PAGE = 30, 576, 1536, 9, 3, 64, 49152, 16


def best(call: Callable[[], object], budget_s: float) -> float:
    """Seconds of the fastest of at least 3 calls, more while the budget lasts."""
    call()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def blocks(rows: int, inputs: int, kind: BlockFormat, rng: np.random.Generator) -> BlockQuantized:
    """Random quants with scales that keep activations near 1."""
    data = rng.integers(0, 256, (rows, inputs // 32, BLOCK_BYTES[kind]), dtype=np.uint8)
    scale, least = (np.float16(0.0005), None) if kind == "q8_0" else (np.float16(0.008), np.float16(-0.06))
    data[:, :, 0:2] = np.frombuffer(scale.tobytes(), np.uint8)
    if kind == "q4_1" and least is not None:
        data[:, :, 2:4] = np.frombuffer(least.tobytes(), np.uint8)
    return BlockQuantized(torch.from_numpy(data.reshape(rows, -1)), kind, inputs)


def model(ops: CpuOps) -> DecoderSpec:
    rng = np.random.default_rng(0)

    def pack(rows: int, inputs: int, kind: BlockFormat = "q4_1") -> LinearWeight:
        return ops.pack([blocks(rows, inputs, kind, rng)])

    def layer() -> LayerSpec:
        return LayerSpec(
            attention_norm=torch.ones(HIDDEN),
            qkv=pack((HQ + 2 * HKV) * D, HIDDEN),
            output=pack(HIDDEN, HQ * D),
            mlp_norm=torch.ones(HIDDEN),
            gate_up=pack(2 * INNER, HIDDEN),
            down=pack(HIDDEN, INNER),
        )

    angles = torch.arange(8192)[:, None] * 10_000.0 ** -(torch.arange(0, D, 2) / D)
    embedding = pack(VOCAB, HIDDEN, "q8_0")
    return DecoderSpec(
        embedding=embedding,
        layers=[layer() for _ in range(LAYERS)],
        norm=torch.ones(HIDDEN),
        head=embedding,
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1),
        num_q_heads=HQ,
        num_kv_heads=HKV,
        head_dim=D,
        eps=1e-5,
        scale=D**-0.5,
    )


def ceilings(threads: int, budget_s: float) -> dict[str, float]:
    """What torch reaches here: reading memory, float32 and int8 products."""
    torch.set_num_threads(threads)
    big, square = torch.ones(64 << 20), torch.randn(1024, 1024)
    whole = torch.randint(-127, 127, (1024, 1024), dtype=torch.int8)
    found = {
        "memory_GBps": big.nbytes / best(big.sum, budget_s) / 1e9,
        "float32_GMACps": 1024**3 / best(lambda: square @ square, budget_s) / 1e9,
        "int8_GMACps": 1024**3 / best(lambda: torch._int_mm(whole, whole), budget_s) / 1e9,
    }
    torch.set_num_threads(1)
    return found


def linear_rows(ops: CpuOps, spec: DecoderSpec, budget_s: float) -> list[results.Row]:
    """All linear layers of a step, and the head alone."""
    rows: list[results.Row] = []
    in_layers = [w for layer in spec.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    for name, weights, counts in (("layers", in_layers, (1, 2, 4, 16, 64, 256)), ("head", [spec.head], (1, 4, 16))):
        size = sum(w.nbytes for w in weights)
        macs = sum(w.in_features * w.out_features for w in weights)
        for tokens in counts:
            inputs = {k: torch.randn(tokens, k) for k in {w.in_features for w in weights}}

            def sweep(weights: list[LinearWeight] = weights, inputs: dict[int, torch.Tensor] = inputs) -> None:
                for w in weights:
                    ops.linear(inputs[w.in_features], w)

            s = best(sweep, budget_s)
            rows.append({"linear": name, "tokens": tokens, "ms": s * 1e3, "GB/s": size / s / 1e9,
                         "GMAC/s": macs * tokens / s / 1e9})  # fmt: skip
    return rows


Step = dict[str, torch.Tensor]


def make_step(cached: int, new: int, seqs: int) -> Step:
    """seqs sequences of `new` tokens after `cached` others, pages shuffled."""
    per = -(-(cached + new) // PAGE)
    table = torch.randperm(per * seqs).reshape(seqs, per).int()
    positions = torch.arange(cached, cached + new)
    return {
        "token_ids": torch.randint(VOCAB, (seqs * new,), dtype=torch.int32),
        "positions": positions.repeat(seqs).int(),
        "slots": (table[:, positions // PAGE] * PAGE + positions % PAGE).flatten().int(),
        "q_starts": torch.arange(seqs + 1, dtype=torch.int32) * new,
        "kv_lens": torch.full((seqs,), cached + new, dtype=torch.int32),
        "page_table": table,
        "logit_rows": torch.arange(1, seqs + 1) * new - 1,
    }


STEPS = (("decode", 300, 1, 1), ("decode", 300, 1, 4), ("decode", 300, 1, 16), ("decode", 2000, 1, 1),
         ("prefill", 0, 256, 1), ("prefill", 1024, 256, 1))  # fmt: skip


def step_rows(ops: CpuOps, spec: DecoderSpec, budget_s: float) -> list[results.Row]:
    """Whole steps in one native call, and their attention alone (one layer, caches warm)."""
    program: DecoderProgram = ops.decoder(spec)
    keys, values = ([torch.randn(512, HKV, PAGE, D).half() for _ in range(LAYERS)] for _ in range(2))
    rows: list[results.Row] = []
    for name, cached, new, seqs in STEPS:
        step, q = make_step(cached, new, seqs), torch.randn(seqs * new, HQ, D)

        def attend(step: Step = step, q: torch.Tensor = q) -> torch.Tensor:
            starts, lengths, table = step["q_starts"], step["kv_lens"], step["page_table"]
            return ops.paged_attention(q, keys[0], values[0], starts, lengths, table, spec.scale)

        def run(step: Step = step) -> torch.Tensor:
            return program(**step, keys=keys, values=values)

        whole = best(run, budget_s)
        rows.append({"step": name, "cached": cached, "new": new, "seqs": seqs, "ms": whole * 1e3,
                     "tok/s": seqs * new / whole, "attention us/layer": best(attend, budget_s / 4) * 1e6})  # fmt: skip
    return rows


def small_rows(ops: CpuOps, spec: DecoderSpec, budget_s: float) -> list[results.Row]:
    """The operations between the products, called one by one: at one token mostly the cost of a call."""
    keys, values = torch.zeros(512, HKV, PAGE, D).half(), torch.zeros(512, HKV, PAGE, D).half()
    rows: list[results.Row] = []
    for tokens in (1, 16, 256):
        x, gate_up, qkv = torch.randn(tokens, HIDDEN), torch.randn(tokens, 2 * INNER), torch.randn(tokens, 15 * D)
        at, residual = torch.arange(tokens, dtype=torch.int32), torch.randn(tokens, HIDDEN)
        calls: dict[str, Callable[[], object]] = {
            "rms_norm": lambda: ops.rms_norm(x, spec.norm, 1e-5, residual),  # noqa: B023
            "gated": lambda: ops.gated(gate_up),  # noqa: B023
            "rope_and_cache": lambda: ops.rope_and_cache(qkv, HQ, HKV, at, at, spec.cos_sin, keys, values),  # noqa: B023
            "embed": lambda: ops.embed(at, spec.embedding),  # noqa: B023
        }
        rows.append(
            {"tokens": tokens, **{f"{name} us": best(call, budget_s / 8) * 1e6 for name, call in calls.items()}}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=0, help="threads; 0 takes all cores")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per figure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ops = CpuOps(options.threads)
    spec = model(ops)
    found = ceilings(ops.threads, options.budget)
    linear, steps = linear_rows(ops, spec, options.budget), step_rows(ops, spec, options.budget)
    small = small_rows(ops, spec, options.budget)
    print(f"{ops.threads} threads, {ops.lanes} lanes; ceilings: " + ", ".join(f"{k} {v:.1f}" for k, v in found.items()))
    for rows in (linear, steps, small):
        print("\n" + results.table(rows))
    path = results.write(
        "kernels_cpu",
        {
            "threads": ops.threads,
            "lanes": ops.lanes,
            "ceilings": found,
            "linear": linear,
            "steps": steps,
            "small": small,
        },
    )
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
