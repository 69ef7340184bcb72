"""Paged attention: one launch serves decodes, chunks of prompts and any mix of the two.

The grid depends on the numbers of token rows and sequence rows alone, never on what they hold, so that one CUDA graph
serves every batch of a bucket. A sequence's queries are cut into blocks of BLOCK_Q tokens; a program finds the sequence
of its block by binary search over the cumulative starts, on the device, and programs past the last block write zeros
into the rows past the last query. All query heads of a key/value head share a tile: row m is head m % HEADS of token m
// HEADS. Keys behind the block's last query are never visited. Softmax is online, in float32 and base 2.

With a plan (`kernels.triton.attention_split`) long sequences are cut along their keys as well, and a second kernel
merges the parts.

Sources: online softmax and tiling, FlashAttention-2 (arXiv 2307.08691); query blocks with a static grid and device-side
search, "The Anatomy of a Triton Attention Kernel" (arXiv 2511.11581).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.architecture import Architecture, architecture
from kernels.triton.attention_shape import LATENT, AttentionShape, Tile, choose_tile, compiled_shapes, compiled_tiles
from kernels.triton.attention_split import SplitPlan, find_row, merge_parts, plan_splits
from kernels.triton.configuration import POINTERS, Configuration
from kernels.triton.dot import dot, narrow
from kernels.triton.fp8 import E4M3_BIAS, decode_e4m3


@triton.jit
def _keys_tile(cache, table, kv_head, dims, start, high, PAGE, KV_HEADS, D, BLOCK_N, BLOCK_D, MASKED):
    """Rows start to start + BLOCK_N of one head's keys or values, [BLOCK_N, BLOCK_D]; zeros from `high` on and beyond
    D. Neither slots nor entries of the page table from `high` on are read."""
    key = start + tl.arange(0, BLOCK_N)
    if MASKED:
        page = tl.load(table + key // PAGE, mask=key < high, other=0).to(tl.int64)
    else:
        page = tl.load(table + key // PAGE).to(tl.int64)
    rows = cache + (page * KV_HEADS + kv_head) * (PAGE * D) + (key % PAGE) * D
    at = rows[:, None] + dims[None, :]
    if MASKED and BLOCK_D != D:
        tile = tl.load(at, mask=(key < high)[:, None] & (dims < D)[None, :], other=0)
    elif MASKED:
        tile = tl.load(at, mask=(key < high)[:, None], other=0)
    elif BLOCK_D != D:
        tile = tl.load(at, mask=(dims < D)[None, :], other=0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def _attend_tile(
    acc, top, total, q, keys, values, table, kv_head, dims, start, high, positions, factor, softcap, window,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    FP8: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of online softmax over the keys from `start` on. top: largest score so far (base 2), total: sum of
    weights, acc: weighted values, both relative to top. Without MASKED every query sees all of these keys."""
    k = _keys_tile(keys, table, kv_head, dims, start, high, PAGE, KV_HEADS, D, BLOCK_N, BLOCK_D, MASKED)
    if FP8:
        k = decode_e4m3(k)
    k = k.to(q.dtype)
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32), PRECISION) * factor
    if CAPPED:
        # tanh x = 1 − 2 / (e^2x + 1); 2.885… is 2·log2(e), 1.442… is log2(e)
        grown = tl.exp2(scores * (2.8853900817779268 / softcap))
        scores = (1.0 - 2.0 / (grown + 1.0)) * (softcap * 1.4426950408889634)
    if MASKED:
        key = start + tl.arange(0, BLOCK_N)
        seen = key[None, :] <= positions[:, None]
        if WINDOWED:
            seen = seen & (key[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    # A query that has seen no key yet has no largest score to subtract
    base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    v = _keys_tile(values, table, kv_head, dims, start, high, PAGE, KV_HEADS, D, BLOCK_N, BLOCK_D, MASKED)
    if FP8:
        v = decode_e4m3(v)
    v = v.to(q.dtype)
    acc = dot(narrow(weights, q.dtype), v, acc * shrink[:, None], PRECISION)
    return acc, higher, total * shrink + tl.sum(weights, 1)


@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "table_stride", "window"],
    do_not_specialize_on_alignment=["k_scale", "v_scale", "sinks", "q_starts", "kv_lens", "page_table", "plan"],
)
def attend(
    out, part_acc, part_stats, q, keys, values, k_scale, v_scale, sinks, q_starts, kv_lens, page_table, plan,
    scale, softcap, window, num_tokens, num_seqs, table_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr,
    FP8: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (item, head tile): a block of queries, all of its keys or one part of them.

    out, q [T, Hq, D]; keys, values [pages, Hkv, PAGE, D]; k_scale, v_scale float32 [Hkv]; sinks float32 [Hq];
    q_starts int32 [S + 1]; kv_lens int32 [S]; page_table int32 [S, table_stride]; plan, part_acc, part_stats: see
    `kernels.triton.attention_split`. scale: of the scores, in natural units.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    # Comparing positions costs nothing where memory is waited for, and a second loop would have to fill its pipeline
    TWO_LOOPS: tl.constexpr = BLOCK_M >= 64 and not WINDOWED
    # The last blocks of a prompt see the most keys: they start first, so that none of them is alone at the end
    item = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = tl.program_id(1)
    kv_head = tile // HEAD_TILES
    row = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    head = (tile % HEAD_TILES) * HEADS + row % HEADS
    items = tl.load(plan + num_seqs) if SPLIT else tl.load(q_starts + num_seqs) // BLOCK_Q + num_seqs
    if item >= items:
        token = tl.load(q_starts + num_seqs) + (item - items) * BLOCK_Q + row // HEADS
        live = (row < BLOCK_Q * HEADS) & (head < GROUP) & (token < num_tokens)
        at = (token * KV_HEADS + kv_head).to(tl.int64) * (GROUP * D) + head * D
        nothing = tl.zeros([BLOCK_M, BLOCK_D], tl.float32).to(out.dtype.element_ty)
        tl.store(out + at[:, None] + dims[None, :], nothing, mask=live[:, None] & (dims < D)[None, :])
        return

    if SPLIT:
        seq = find_row(plan, item, num_seqs, 0, 1)
        splits = tl.load(plan + (num_seqs + 1) + seq)
        inside = item - tl.load(plan + seq)
        block = inside // splits
        split = inside % splits
    else:
        seq = find_row(q_starts, item, num_seqs, 1, BLOCK_Q)
        splits = 1
        split = 0
        block = item - (tl.load(q_starts + seq) // BLOCK_Q + seq)
    q_start = tl.load(q_starts + seq)
    q_len = tl.load(q_starts + seq + 1) - q_start
    if block * BLOCK_Q >= q_len:
        return
    kv_len = tl.load(kv_lens + seq)
    local = block * BLOCK_Q + row // HEADS
    live = (row < BLOCK_Q * HEADS) & (head < GROUP) & (local < q_len)
    positions = kv_len - q_len + local
    at = ((q_start + local) * KV_HEADS + kv_head).to(tl.int64) * (GROUP * D) + head * D
    inside_head = live[:, None] & (dims < D)[None, :]
    queries = tl.load(q + at[:, None] + dims[None, :], mask=inside_head, other=0)
    factor = scale
    if FP8:
        factor = scale * tl.load(k_scale + kv_head) * E4M3_BIAS
        if queries.dtype == tl.bfloat16:
            # Half precision holds e4m3 exactly and more of the weights than bfloat16; no query is near its bound
            queries = tl.clamp(queries.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    if not CAPPED:
        factor = factor * 1.4426950408889634

    first = kv_len - q_len + block * BLOCK_Q
    high = kv_len - q_len + tl.minimum(block * BLOCK_Q + BLOCK_Q, q_len)
    low = 0
    if WINDOWED:
        low = tl.maximum(first - window + 1, 0) // BLOCK_N
    end = (high + BLOCK_N - 1) // BLOCK_N
    if SPLIT:
        share = (end - low + splits - 1) // splits
        low = low + split * share
        end = tl.minimum(low + share, end)
    whole = low
    if TWO_LOOPS:
        whole = tl.minimum(tl.maximum((first + 1) // BLOCK_N, low), end)

    table = page_table + seq.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if sinks is not None:
        # A key of weight 1 and value 0 that the first part has seen already
        sink = tl.load(sinks + kv_head * GROUP + head, mask=head < GROUP, other=0.0) * 1.4426950408889634
        if SPLIT:
            top = tl.where(split == 0, sink, top)
            total = tl.where(split == 0, 1.0, total)
        else:
            top = sink
            total += 1.0
    if TWO_LOOPS:
        for start in tl.range(low * BLOCK_N, whole * BLOCK_N, BLOCK_N):
            acc, top, total = _attend_tile(
                acc, top, total, queries, keys, values, table, kv_head, dims, start, high, positions, factor, softcap,
                window, PAGE, KV_HEADS, D, BLOCK_N, BLOCK_D, FP8, CAPPED, WINDOWED, False, PRECISION,
            )  # fmt: skip
    for start in tl.range(whole * BLOCK_N, end * BLOCK_N, BLOCK_N):
        acc, top, total = _attend_tile(
            acc, top, total, queries, keys, values, table, kv_head, dims, start, high, positions, factor, softcap,
            window, PAGE, KV_HEADS, D, BLOCK_N, BLOCK_D, FP8, CAPPED, WINDOWED, True, PRECISION,
        )  # fmt: skip

    if FP8:
        acc = acc * (tl.load(v_scale + kv_head) * E4M3_BIAS)
    if SPLIT:  # noqa: SIM102 - the compiler does not read on where this is constant and false
        if splits > 1:
            part = tl.load(plan + 2 * (num_seqs + 1) + seq) + inside
            part_row = (part * tl.num_programs(1) + tile).to(tl.int64) * BLOCK_M + row
            tl.store(part_acc + part_row[:, None] * D + dims[None, :], acc, mask=inside_head)
            tl.store(part_stats + part_row * 2, top, mask=live)
            tl.store(part_stats + part_row * 2 + 1, total, mask=live)
            return
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + at[:, None] + dims[None, :], narrow(acc, out.dtype.element_ty), mask=inside_head)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    scale: float,
    window: int = 0,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: SplitPlan | None = None,
    split: bool = True,
    decode: bool = False,
    deterministic: bool = False,
    arch: Architecture | None = None,
) -> Tensor:
    """Causal attention of packed queries over paged keys, as `kernels.interface.Ops.paged_attention` says.

    q [T, Hq, D] float32, bfloat16 or float16; caches [pages, Hkv, page_size, D] of those types or float8_e4m3fn, then
    with k_scale, v_scale float32 [Hkv], value = stored · scale; q_starts int32 [S + 1], kv_lens int32 [S], page_table
    int32 [S, P]; all contiguous. D and page_size are multiples of 16. Rows of q past q_starts[S] are padding: their
    results are 0. Sequences without queries are passed over. softcap > 0 bounds scores to ±softcap by tanh. sinks
    float32 [Hq]: a score of each head's without a value.

    plan: `plan_splits` for this batch and window, made once for all layers; without one it is made here when `split`.
    decode: one query a sequence is expected; only the choice of the tile depends on it.
    deterministic: a row's bits depend on its own sequence alone; this means no splits, and one tile for every batch.
    Nothing is read back from the device, and nothing depends on what index tensors hold. Raises ValueError for shapes
    and types that do not fit.
    """
    shape = AttentionShape.of(q, key_cache)
    _check(q, key_cache, value_cache, q_starts, kv_lens, page_table, k_scale, v_scale)
    if sinks is not None and (tuple(sinks.shape) != (shape.q_heads,) or sinks.dtype != torch.float32):
        raise ValueError(f"sinks must be float32 [{shape.q_heads}]")
    arch = arch or architecture(q.device)
    tokens, seqs = q.shape[0], kv_lens.shape[0]
    out = torch.empty(tokens, shape.q_heads * shape.head_dim, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    tile = choose_tile(arch, shape, tokens, decode=decode, deterministic=deterministic)
    if deterministic:
        plan = None
    elif plan is None and split:
        plan = plan_splits(q_starts, kv_lens, tokens, shape, window=window, decode=decode, arch=arch)
    if plan is not None and plan.block_q != tile.block_q(shape.group):
        raise ValueError("the plan was made for another number of tokens or another shape")
    blocks = tokens // tile.block_q(shape.group) + seqs + 1
    acc, stats = (None, None) if plan is None else plan.parts(shape, tile)
    is_fp8 = key_cache.dtype == torch.float8_e4m3fn
    tiles = shape.kv_heads * shape.head_tiles(tile)
    attend[(blocks + (0 if plan is None else plan.slots), tiles)](
        out,
        acc,
        stats,
        q,
        key_cache.view(torch.uint8) if is_fp8 else key_cache,
        value_cache.view(torch.uint8) if is_fp8 else value_cache,
        k_scale,
        v_scale,
        sinks,
        q_starts,
        kv_lens,
        page_table,
        None if plan is None else plan.table,
        float(scale),
        float(softcap),
        window,
        tokens,
        seqs,
        page_table.shape[1],
        **tile.constants(shape),
        FP8=is_fp8,
        CAPPED=softcap > 0,
        WINDOWED=window > 0,
        SPLIT=plan is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if plan is not None and acc is not None and stats is not None:
        merge_parts(out, acc, stats, plan, q_starts, shape, tile)
    return out


def _check(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Raise ValueError for what the kernel would read wrongly. Only shapes, types and addresses are looked at."""
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError("key and value cache must be equal in shape and type")
    seqs = kv_lens.shape[0]
    if tuple(q_starts.shape) != (seqs + 1,) or page_table.dim() != 2 or page_table.shape[0] != seqs:
        raise ValueError(f"q_starts {list(q_starts.shape)}, kv_lens [{seqs}] and page_table do not fit together")
    for name, tensor in (("q_starts", q_starts), ("kv_lens", kv_lens), ("page_table", page_table)):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32")
    for name, tensor in (("q", q), ("key_cache", key_cache), ("value_cache", value_cache)):
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError(f"{name} must be contiguous and aligned to 16 bytes")
    if key_cache.dtype == torch.float8_e4m3fn:
        for scale in (k_scale, v_scale):
            if scale is None or tuple(scale.shape) != (key_cache.shape[1],) or scale.dtype != torch.float32:
                raise ValueError("an 8-bit cache needs k_scale and v_scale, float32 [Hkv]")


FEATURES = {
    "": (False, False, True, False),
    "whole": (False, False, False, False),
    "capped": (True, False, True, False),
    "capped windowed": (True, True, True, False),
    "windowed": (False, True, True, False),
    "sinks": (False, False, True, True),
    "sinks windowed": (False, True, True, True),
}
"""CAPPED, WINDOWED, SPLIT and whether there are sinks, of the configurations compiled ahead of time."""


def configurations() -> Iterator[Configuration]:
    """What a launch compiles to, for every shape that is compiled ahead of time."""
    for shape in (*compiled_shapes(), LATENT):
        for tile, min_arch in compiled_tiles(shape):
            for feature, flags in FEATURES.items():
                plain = shape.q_dtype == torch.bfloat16 and shape.page_size == 16 and shape.group == 4
                plain &= feature != "windowed" or (shape.head_dim, shape.kv_dtype) == (128, torch.bfloat16)
                plain &= not flags[-1] or (shape.head_dim, shape.kv_dtype) == (64, torch.bfloat16)
                plain &= feature != "capped" or (shape.head_dim, shape.kv_dtype) == (256, torch.bfloat16)
                if plain or not feature:
                    yield _configuration(shape, tile, min_arch, feature, *flags)


def _configuration(
    shape: AttentionShape,
    tile: Tile,
    min_arch: int,
    feature: str,
    capped: bool,
    windowed: bool,
    split: bool,
    sinks: bool,
) -> Configuration:
    is_fp8 = shape.kv_dtype == torch.float8_e4m3fn
    float_pointer, cache = POINTERS[shape.q_dtype], "*u8" if is_fp8 else POINTERS[shape.kv_dtype]
    optional = {"k_scale": is_fp8, "v_scale": is_fp8, "plan": split, "part_acc": split, "part_stats": split}
    optional["sinks"] = sinks
    signature = dict.fromkeys(("out", "q"), float_pointer) | dict.fromkeys(("keys", "values"), cache)
    signature |= dict.fromkeys(("q_starts", "kv_lens", "page_table"), "*i32")
    signature |= dict.fromkeys(("scale", "softcap"), "fp32")
    signature |= dict.fromkeys(("window", "num_tokens", "num_seqs", "table_stride"), "i32")
    signature |= {name: "*i32" if name == "plan" else "*fp32" for name, given in optional.items() if given}
    constants = tile.constants(shape) | {name: None for name, given in optional.items() if not given}
    constants |= {"FP8": is_fp8, "CAPPED": capped, "WINDOWED": windowed, "SPLIT": split}
    bf16 = (torch.bfloat16, torch.bfloat16)
    return Configuration(
        kernel=attend,
        name=f"{shape.name} {tile.name} {feature}".strip(),
        signature=signature,
        constants=constants,
        unaligned=("k_scale", "v_scale", "sinks", "q_starts", "kv_lens", "page_table", "plan"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        min_arch=min_arch,
        # The assembler trades 16 bytes for a second program on a multiprocessor: it stops at 128 registers
        spills=16 if tile.block_m == 128 and shape.head_dim == 64 else 0,
        hot=(shape.q_heads, shape.head_dim, shape.page_size, shape.q_dtype, shape.kv_dtype) == (32, 128, 16, *bf16)
        and shape.group == 4
        and not feature
        and tile.block_m in (16, 128),
    )
