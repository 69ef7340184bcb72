"""Every kernel at the shapes of an 8B model, held against what the device reaches: bytes against its copy bandwidth,
arithmetic against its rate of matrix products.

Beside ours, where there is one: the vendor library's product, torch's own attention on the same queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu import experts, scaled
from benchmarks.gpu.batches import large_batch
from benchmarks.gpu.checkpoint import LLAMA_8B, TINY, Shape
from benchmarks.gpu.supervise import Context
from benchmarks.gpu.timing import DeviceTimer, timer
from kernels.sampling_rows import SamplingRows
from kernels.step_layout import SEQS, TOKENS, StepInputs, StepLayout
from kernels.triton.activation import gated
from kernels.triton.attention import paged_attention
from kernels.triton.embedding import embed
from kernels.triton.gemm import skinny_gemm
from kernels.triton.norm import rms_norm
from kernels.triton.rope_cache import rope_and_cache
from kernels.triton.sampling import sample
from kernels.triton.step_inputs import step_inputs

PAGE = 16


@dataclass(frozen=True, slots=True)
class Timed:
    """One call to time."""

    kernel: str
    shape: str
    call: Callable[[], object]
    nbytes: float
    """That it has to move at least"""
    operations: float = 0.0
    """Multiplications and additions of its matrix products"""


def run(context: Context) -> None:
    """Time them while there is time."""
    clock = timer(context.device)
    bandwidth, rate = context.fact("copy_gb_s") * 1e9, context.fact("matrix_tflops") * 1e12
    shape = TINY if context.tiny else LLAMA_8B
    with torch.inference_mode():
        for timed in calls(shape, context.device, context.tiny):
            if not context.deadline.allows(2.0):
                context.recorder.note(f"out of time before {timed.kernel} {timed.shape}")
                break
            seconds = clock.seconds(timed.call, 0.0 if context.tiny else 0.05)
            row: dict[str, Any] = {
                "kernel": timed.kernel,
                "shape": timed.shape,
                "us": 1e6 * seconds,
                "GB/s": timed.nbytes / seconds / 1e9,
                "of copy %": 100 * timed.nbytes / seconds / bandwidth,
                "TFLOP/s": timed.operations / seconds / 1e12,
                "of matrix rate %": 100 * timed.operations / seconds / rate,
                "of its floor %": 100 * max(timed.nbytes / bandwidth, timed.operations / rate) / seconds,
            }
            context.recorder.row("Kernels against what the device reaches", row)
    if isinstance(clock, DeviceTimer) and clock.eager:
        context.recorder.note(f"{clock.eager} calls could not be captured and were timed with their launches")


def calls(shape: Shape, device: str, tiny: bool) -> Iterator[Timed]:
    """The calls of a step, decoding first; each is let go before the next is made."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    yield from _products(shape, device, dtype, (3,) if tiny else (1, 16, 256, 2048))
    yield from (Timed(*row) for row in experts.timed(device, dtype, tiny))
    yield from _scaled(shape, device, dtype, tiny)
    yield from _attention(shape, device, dtype, tiny)
    yield from _rows(shape, device, dtype, (2,) if tiny else (1, 256, 2048))
    yield from _choices(shape, device, (2,) if tiny else (1, 64, 256))


def _products(shape: Shape, device: str, dtype: torch.dtype, rows: tuple[int, ...]) -> Iterator[Timed]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "qkv": (q + 2 * kv, shape.hidden),
        "output": (shape.hidden, q),
        "gate and up": (2 * shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
        "head": (shape.vocab, shape.hidden),
    }
    for name, (n, k) in sizes.items():
        weight = torch.randn(n, k, device=device).mul_(k**-0.5).to(dtype)
        for m in rows:
            if name == "head" and m > 256:
                continue  # a head sees the last token of a sequence alone
            x = torch.randn(m, k, device=device).to(dtype)
            moved, products = (n * k + m * (n + k)) * dtype.itemsize, 2.0 * m * n * k
            label = f"{name} [{m}, {k}] × [{n}, {k}]"
            if m <= 16:
                yield Timed("skinny product", label, partial(skinny_gemm, x, weight), moved, products)
            yield Timed("library product", label, partial(functional.linear, x, weight), moved, products)


def _scaled(shape: Shape, device: str, dtype: torch.dtype, tiny: bool) -> Iterator[Timed]:
    """The largest projections in fewer bytes; what is moved is counted in the bytes of the format."""
    sizes = ((shape.hidden, shape.inner), (2 * shape.inner, shape.hidden))
    for n, k in sizes[: 1 if tiny else 2]:
        for format in scaled.FORMATS:
            weight = scaled.matrix(format, n, k, device)
            for m in (3,) if tiny else (1, 16, 256, 2048):
                moved = weight.nbytes + m * (n + k) * dtype.itemsize
                for name, call in scaled.timed(format, weight, m, dtype):
                    yield Timed(name, f"[{m}, {k}] × [{n}, {k}]", call, moved, 2.0 * m * n * k)


def _attention(shape: Shape, device: str, dtype: torch.dtype, tiny: bool) -> Iterator[Timed]:
    steps: dict[str, list[tuple[int, int]]] = {
        "1 decode at 1,024": [(1023, 1)],
        "1 decode at 8,192": [(8191, 1)],
        "32 decodes at 1,024": [(1023, 1)] * 32,
        "256 decodes at 1,024": [(1023, 1)] * 256,
        "prompt of 128": [(0, 128)],
        "prompt of 2,048": [(0, 2048)],
        "prompt of 8,192": [(0, 8192)],
        "64 decodes beside 512 of a prompt": [(1023, 1)] * 64 + [(1024, 512)],
    }
    if tiny:
        steps = {"2 decodes at 40": [(39, 1)] * 2, "prompt of 32": [(0, 32)]}
    heads = (shape.heads, shape.kv_heads)
    for name, seqs in steps.items():
        batch = large_batch(seqs, heads=heads, head_dim=shape.head_dim, device=device, dtype=dtype)
        decode = all(new == 1 for _, new in seqs)

        def ours(batch: Any = batch, decode: bool = decode) -> Tensor:
            return paged_attention(*batch.arguments, batch.scale, decode=decode)

        row_bytes = shape.head_dim * dtype.itemsize
        keys = sum(cached + new for cached, new in seqs)
        queries = sum(new for _, new in seqs)
        seen = sum(new * cached + new * (new + 1) // 2 for cached, new in seqs)
        moved = row_bytes * (2 * keys * shape.kv_heads + 2 * queries * shape.heads)
        products = 4.0 * seen * shape.heads * shape.head_dim
        yield Timed("attention", name, ours, moved, products)
        if len(seqs) == 1 and seqs[0][0] == 0:
            length = seqs[0][1]
            whole = [
                torch.randn(1, count, length, shape.head_dim, device=device).to(dtype)
                for count in (shape.heads, shape.kv_heads, shape.kv_heads)
            ]

            def theirs(whole: list[Tensor] = whole) -> Tensor:
                return functional.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)

            yield Timed("torch's attention", name, theirs, moved, products)


def _rows(shape: Shape, device: str, dtype: torch.dtype, counts: tuple[int, ...]) -> Iterator[Timed]:
    item, heads = dtype.itemsize, shape.heads + 2 * shape.kv_heads
    gain = torch.ones(shape.hidden, device=device, dtype=dtype)
    table = torch.randn(min(shape.vocab, 32768), shape.hidden, device=device).to(dtype)
    angles = torch.randn(4096, shape.head_dim, device=device)
    for count in counts:
        x, residual = (torch.randn(count, shape.hidden, device=device).to(dtype) for _ in range(2))
        pair = torch.randn(count, 2 * shape.inner, device=device).to(dtype)
        qkv = torch.randn(count, heads * shape.head_dim, device=device).to(dtype)
        caches = [
            torch.zeros(-(-count // PAGE), shape.kv_heads, PAGE, shape.head_dim, device=device, dtype=dtype)
            for _ in range(2)
        ]
        at = torch.arange(count, dtype=torch.int32, device=device)
        label = f"{count} tokens"

        def norm(x: Tensor = x, residual: Tensor = residual) -> Tensor:
            return rms_norm(x, gain, 1e-5, residual)

        def gate(pair: Tensor = pair) -> Tensor:
            return gated(pair)

        def rotate(qkv: Tensor = qkv, at: Tensor = at, caches: list[Tensor] = caches) -> Tensor:
            return rope_and_cache(qkv, shape.heads, shape.kv_heads, at, at, angles, *caches)

        def look_up(at: Tensor = at) -> Tensor:
            return embed(at, table)

        yield Timed("norm with residual", label, norm, 4 * count * shape.hidden * item)
        yield Timed("gated activation", label, gate, 3 * count * shape.inner * item)
        yield Timed("rotation and cache", label, rotate, 2 * qkv.nbytes + count * shape.head_dim * 4)
        yield Timed("embedding", label, look_up, 2 * count * shape.hidden * item)


def _choices(shape: Shape, device: str, counts: tuple[int, ...]) -> Iterator[Timed]:
    for count in counts:
        logits = torch.randn(count, shape.vocab, device=device) * 3
        rows = torch.arange(count, dtype=torch.int32, device=device)
        plain, nucleus = (SamplingRows(count, shape.vocab, max_edits=4, device=device) for _ in range(2))
        for row in range(count):
            plain.admit(row, seed=row)
            nucleus.admit(row, seed=row, top_p=0.9)
        label = f"{count} rows of {shape.vocab}"
        for name, state in (("greedy", None), ("drawn", plain), ("drawn, top_p 0.9", nucleus)):

            def choose(state: SamplingRows | None = state, logits: Tensor = logits, rows: Tensor = rows) -> Tensor:
                return sample(logits, rows, rows, state)

            yield Timed(f"sampling, {name}", label, choose, logits.nbytes)
        yield _inputs(count, device)


def _inputs(seqs: int, device: str) -> Timed:
    """A step of decodes at 1,024 tokens each."""
    layout, pages = StepLayout(seqs, seqs, 256), 128
    buffer = layout.empty()
    described = layout.seqs_of(buffer)
    described[0] = described[1] = torch.arange(seqs, dtype=torch.int32)
    described[2], described[3] = 1023, -1
    buffer[SEQS] = buffer[TOKENS] = seqs
    there = buffer.to(device)
    tokens = torch.zeros(seqs, 2048, dtype=torch.int32, device=device)
    table = torch.zeros(seqs, pages, dtype=torch.int32, device=device)
    into = StepInputs.allocate(layout, pages, device)

    def gather() -> None:
        step_inputs(there, layout, tokens, table, PAGE, into)

    return Timed("step inputs", f"{seqs} decodes", gather, 2 * 4 * seqs * 64)
