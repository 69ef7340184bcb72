"""Checks of the kernels around the cache: rotation with the write into pages, and attention over them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.batches import spoiled_batch
from benchmarks.gpu.cases import CLOSE, FP8, Case, check_all, close, draw
from benchmarks.gpu.supervise import Context
from kernels import reference
from kernels.triton.attention import paged_attention
from kernels.triton.rope_cache import rope_and_cache

KERNELS = ("rope_cache", "attention", "attention_split")
TYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, FP8),
)
CANARY = 0xA5
MIXED = ((0, 1), (70, 1), (0, 11), (0, 0), (18, 5))
FEW = ((0, 1), (20, 1), (0, 5), (0, 0))
LONG = ((1500, 1), (0, 130), (0, 0), (700, 45), (2047, 1))


def run(context: Context) -> None:
    """Check them all."""
    check_all(context, cases(context.device, context.tiny))


def cases(device: str, tiny: bool) -> Iterator[Case]:
    """Every case, the shape of an 8B model first."""
    yield from _writes(device, tiny)
    for label, batch, options in _batches(tiny):
        kernel = "attention" if options.get("split") is False or options.get("deterministic") else "attention_split"
        yield Case(kernel, label, partial(_attention, device, batch, options))


def _batches(tiny: bool) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(label, what makes the batch, options of the launch)."""
    seqs = FEW if tiny else LONG
    eight: dict[str, Any] = {"seqs": seqs, "heads": (4, 1) if tiny else (32, 8), "head_dim": 64 if tiny else 128}
    padding = {"padding_rows": 5, "padding_seqs": 2}
    yield "8B, mixed", {**eight, **padding}, {}
    yield "8B, whole", {**eight, **padding}, {"split": False}
    yield "8B, deterministic", eight, {"deterministic": True}
    yield "8B, window 64", eight, {"window": 64}
    yield "8B, capped", eight, {"softcap": 20.0}
    decodes = [(length, 1) for length in ((3, 20) if tiny else range(5, 3000, 200))]
    yield "8B, decodes", {**eight, "seqs": decodes}, {"decode": True}
    for dtype, kv_dtype in TYPES[3:] if tiny else TYPES[1:]:
        types = {"dtype": dtype, "kv_dtype": kv_dtype}
        yield f"{dtype} on {kv_dtype}", {**eight, "seqs": FEW if tiny else MIXED, **types, **padding}, {}
    if tiny:
        return
    for page in (32, 64):
        yield f"pages of {page}", {**eight, "seqs": MIXED, "page": page}, {}
    for head_dim in (64, 80, 96, 256):
        for dtype, kv_dtype in (TYPES[0], TYPES[3]):
            options = {"heads": (8, 2), "head_dim": head_dim, "dtype": dtype, "kv_dtype": kv_dtype}
            yield f"heads of {head_dim}, {kv_dtype}", {"seqs": MIXED, **options, **padding}, {}
    for heads in ((9, 3), (28, 4), (5, 5), (71, 1)):
        yield f"{heads[0]} heads on {heads[1]}", {"seqs": MIXED, "heads": heads, "head_dim": 128, **padding}, {}
    for tokens in (100, 600, 2100):
        case = {"seqs": ((70, 1), (90, tokens - 1)), "heads": (8, 2), "head_dim": 128}
        yield f"{tokens} tokens", case, {}


def _attention(device: str, made_of: dict[str, Any], options: dict[str, Any]) -> None:
    batch = spoiled_batch(**made_of)
    there = batch.to(device)
    definition = {name: options[name] for name in ("window", "softcap") if name in options}
    got = paged_attention(*there.arguments, there.scale, **options, **there.scales)
    wanted = reference.paged_attention(*batch.arguments, batch.scale, **definition, **batch.scales)
    close(got, wanted, CLOSE[batch.q.dtype])


def _writes(device: str, tiny: bool) -> Iterator[Case]:
    shapes = (
        (((6, 2), 64, 16),) if tiny else (((32, 8), 128, 16), ((32, 8), 128, 64), ((9, 3), 64, 32), ((4, 4), 80, 16))
    )
    for heads, head_dim, page in shapes:
        for types in TYPES:
            for tokens in (3, 70):
                if tiny and tokens > 3:
                    continue
                label = f"{heads[0]}/{heads[1]} heads of {head_dim}, {types[0]} on {types[1]}, {tokens} tokens"
                made = {"heads": heads, "head_dim": head_dim, "page": page, "types": types, "tokens": tokens}
                yield Case("rope_cache", label, partial(_write, device, **made))


def _write(
    device: str,
    *,
    heads: tuple[int, int],
    head_dim: int,
    page: int,
    types: tuple[torch.dtype, torch.dtype],
    tokens: int,
) -> None:
    """Three rows are padding; every slot that nobody owns is a canary."""
    dtype, kv_dtype = types
    generator = torch.Generator().manual_seed(tokens)
    rows, pages = tokens + 3, -(-tokens // page) + 2
    qkv = draw(12, rows, (heads[0] + 2 * heads[1]) * head_dim, dtype=dtype)
    owned = torch.randperm(pages * page, generator=generator)[:tokens].int()
    slots = torch.cat([owned, torch.full((3,), -1, dtype=torch.int32)])
    positions = torch.randint(0, 50, (rows,), generator=generator).int()
    angles = draw(13, 50, head_dim)
    norms = [torch.rand(head_dim, generator=generator).to(dtype) + 0.5 for _ in range(2)]
    scales = {}
    if kv_dtype == FP8:
        scales = {name: torch.rand(heads[1], generator=generator) / 50 for name in ("k_scale", "v_scale")}
    canaries = torch.full((pages, heads[1], page, head_dim * kv_dtype.itemsize), CANARY, dtype=torch.uint8)
    mine, theirs = ([canaries.clone() for _ in range(2)] for _ in range(2))
    there = [cache.to(device).view(kv_dtype) for cache in mine]
    q = rope_and_cache(
        qkv.to(device), *heads, positions.to(device), slots.to(device), angles.to(device), *there,
        *(norm.to(device) for norm in norms), 1e-5, **{name: scale.to(device) for name, scale in scales.items()},
    )  # fmt: skip
    here = [cache.view(kv_dtype) for cache in theirs]
    wanted = reference.rope_and_cache(qkv, *heads, positions, slots, angles, *here, *norms, 1e-5, **scales)
    close(q[:tokens], wanted[:tokens], max(1e-5, 2 * float(torch.finfo(dtype).eps)))
    keys, values = (cache.view(torch.uint8).cpu() for cache in there)
    assert torch.equal(values, theirs[1]), "values are copied and must be the same bits"
    written = torch.zeros(pages, heads[1], page, dtype=torch.bool)
    written[owned.long() // page, :, owned.long() % page] = True
    assert bool((keys[~written] == CANARY).all()), "a slot was written that nobody owns"
    eps = 2.0**-3 if kv_dtype == FP8 else float(torch.finfo(kv_dtype).eps)
    computed = (keys.view(kv_dtype).float()[written], here[0].float()[written])
    torch.testing.assert_close(*computed, atol=1e-5, rtol=2 * eps)
