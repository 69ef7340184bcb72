"""One plain-torch function per operation: the definition of correct.

Everything is computed in float32, one row at a time where a batched call would let the rows influence each other's
rounding, so that a row's result is the same bits whatever else is in the call. Slow and obvious on purpose; the other
implementations are tested against this one. Shapes are those of `kernels.interface.Ops`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

import torch
from torch import Tensor

from kernels.blocks import dequantize, in_features
from kernels.dense import DenseWeight
from kernels.interface import Activation, LinearWeight, WeightPart, rows_of
from kernels.moe import ExpertParts, ExpertWeights, Routing
from kernels.sampling import noise_key
from kernels.step_layout import HEADER, LOGITS, PAGES, SEQS, TOKENS, StepInputs, StepLayout


def pack(parts: Sequence[WeightPart], bias: Tensor | None = None) -> DenseWeight:
    """Dequantise and stack row-blocks. Raises ValueError for no parts, unequal K, or a bias that is not [N]."""
    check_parts(parts, bias)
    matrix = torch.cat([dequantize(part) for part in parts])
    return DenseWeight(matrix, None if bias is None else bias.to(torch.float32))


def check_parts(parts: Sequence[WeightPart], bias: Tensor | None) -> None:
    """Raise ValueError for no parts, parts of different K, or a bias that is not [N]."""
    if not parts:
        raise ValueError("a weight needs at least one part")
    widths = {in_features(part) for part in parts}
    if len(widths) != 1:
        raise ValueError(f"the parts of a weight must have the same number of inputs, not {sorted(widths)}")
    rows = sum(rows_of(part) for part in parts)
    if bias is not None and tuple(bias.shape) != (rows,):
        raise ValueError(f"bias must be [{rows}], not {list(bias.shape)}")


def linear(x: Tensor, weight: DenseWeight) -> Tensor:
    """x [T, K] · matrixᵀ + bias, each row by its own matrix-vector product."""
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        raise ValueError(f"linear needs x of [T, {weight.in_features}], not {list(x.shape)}")
    out = torch.empty(x.shape[0], weight.out_features, dtype=torch.float32, device=x.device)
    for t in range(x.shape[0]):
        # The copy puts every row at the same alignment: BLAS may sum in another order where it starts elsewhere.
        row = x[t].to(torch.float32, copy=True)
        torch.mv(weight.matrix, row, out=out[t])
    if weight.bias is not None:
        out += weight.bias
    return out.to(x.dtype)


def embed(token_ids: Tensor, weight: DenseWeight) -> Tensor:
    """Rows of the matrix, zeros for an id of −1, which is padding. Raises IndexError for another id outside [0, N)."""
    if token_ids.numel() and (int(token_ids.min()) < -1 or int(token_ids.max()) >= weight.out_features):
        raise IndexError(f"a token id is outside [0, {weight.out_features})")
    rows = weight.matrix[token_ids.to(torch.int64).clamp(min=0)]
    rows[token_ids < 0] = 0.0
    return rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight; with residual: residual += x in place, and that sum is normalised."""
    if residual is not None:
        residual += x
        x = residual
    wide = x.to(torch.float32)
    rows = wide.reshape(-1, wide.shape[-1])
    mean = torch.empty(rows.shape[0], 1, dtype=torch.float32, device=x.device)
    for r in range(rows.shape[0]):
        mean[r] = rows[r].clone().square().mean()
    scale = torch.rsqrt(mean + eps).reshape(*wide.shape[:-1], 1)
    return (wide * scale * weight.to(torch.float32)).to(x.dtype)


def rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """rms_norm in float32, then each row divided by its scale: (values of `dtype`, scales). A row's largest magnitude
    becomes 127 in int8, 448 in float8_e4m3fn; int8 rounds halves up."""
    if residual is not None:
        residual += x
        x = residual
    normal = rms_norm(x.to(torch.float32), weight, eps)
    largest = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}[dtype]
    scales = normal.abs().amax(dim=-1).clamp(min=1e-30) / largest
    steps = (normal / scales[..., None]).clamp(-largest, largest)
    return (torch.floor(steps + 0.5) if dtype == torch.int8 else steps).to(dtype), scales


def gather_rows(source: Tensor, rows: Tensor) -> Tensor:
    """source[rows] of [N, H], zeros for rows outside [0, N)."""
    inside = (rows >= 0) & (rows < source.shape[0])
    found = source[rows.to(torch.int64).clamp(0, source.shape[0] - 1)]
    return torch.where(inside[:, None], found, torch.zeros_like(found))


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D] by the angles of cos_sin [T, D] (cosines, then sines), element i paired with i + D/2."""
    half = x.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rope_and_cache(
    qkv: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Normalise (when asked) and rotate q and k, write k and v into the slots of the cache, return q [T, Hq, D].

    Where value_cache is key_cache there is no v, in qkv neither. Slots below 0 are padding: nothing is written for
    them. k_scale, v_scale float32 [Hkv]: what is written is the value divided by its head's scale, for caches of
    float8_e4m3fn saturated and rounded to nearest even.
    """
    tokens, page_size, head_dim = qkv.shape[0], key_cache.shape[2], key_cache.shape[3]
    kept = [(key_cache, k_scale)] if value_cache is key_cache else [(key_cache, k_scale), (value_cache, v_scale)]
    heads = qkv.reshape(tokens, num_q_heads + len(kept) * num_kv_heads, head_dim).to(torch.float32)
    q, k, *v = torch.split(heads, [num_q_heads] + [num_kv_heads] * len(kept), dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    angles = cos_sin[positions.to(torch.int64)]
    q, k = rotate(q, angles), rotate(k, angles)
    live = slots >= 0
    where = slots[live].to(torch.int64)
    pages, offsets = where // page_size, where % page_size
    for (cache, scale), new in zip(kept, [k, *v], strict=True):
        rows = new[live] if scale is None else new[live] / scale[:, None]
        if cache.dtype == torch.float8_e4m3fn:
            # Torch indexes bytes, not 8-bit floats
            cache.view(torch.uint8)[pages, :, offsets] = quantize_e4m3(rows).view(torch.uint8)
        else:
            cache[pages, :, offsets] = rows.to(cache.dtype)
    return q.to(qkv.dtype).contiguous()


def quantize_e4m3(x: Tensor) -> Tensor:
    """float8_e4m3fn of x, saturated at ±448, rounded to nearest even."""
    return x.to(torch.float32).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """softmax(q·kᵀ·scale)·v for every query over the keys that it may see; only those keys' slots are read.

    softcap > 0: a score x counts as softcap · tanh(x / softcap). sinks float32 [Hq]: a score of each head's without a
    value. k_scale, v_scale float32 [Hkv]: a cached number stands for itself times its head's scale. Rows of q past
    q_starts[S] are padding, their results 0.
    """
    tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = key_cache.shape[1], key_cache.shape[2]
    group = num_q_heads // num_kv_heads
    out = torch.zeros(tokens, num_q_heads * head_dim, dtype=torch.float32, device=q.device)
    starts, lengths = q_starts.tolist(), kv_lens.tolist()
    for s, length in enumerate(lengths):
        pages = page_table[s, : -(-length // page_size)].to(torch.int64)
        keys = _gather_pages(key_cache, pages, k_scale)
        values = _gather_pages(value_cache, pages, v_scale)
        first = length - (starts[s + 1] - starts[s])
        for t in range(starts[s], starts[s + 1]):
            position = first + t - starts[s]
            low = max(0, position - window + 1) if window > 0 else 0
            k = keys[low : position + 1].transpose(0, 1).to(torch.float32, copy=True)
            v = values[low : position + 1].transpose(0, 1).to(torch.float32, copy=True)
            query = q[t].reshape(num_kv_heads, group, head_dim).to(torch.float32, copy=True)
            scores = query @ k.transpose(1, 2) * scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                sink = sinks.to(torch.float32).reshape(num_kv_heads, group, 1)
                scores = torch.cat([scores, sink], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : k.shape[1]]
            out[t] = (weights @ v).reshape(-1)
    return out.to(q.dtype)


def _gather_pages(cache: Tensor, pages: Tensor, scale: Tensor | None) -> Tensor:
    """Slots of the pages in order, [slots, Hkv, D], times the scales of their heads; as they lie without scales."""
    num_kv_heads, head_dim = cache.shape[1], cache.shape[3]
    taken = cache.view(torch.uint8)[pages].view(cache.dtype) if cache.dtype == torch.float8_e4m3fn else cache[pages]
    rows = taken.transpose(1, 2).reshape(-1, num_kv_heads, head_dim)
    return rows if scale is None else rows.to(torch.float32) * scale[:, None]


def gated(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(first half) · second half."""
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    if activation == "silu":
        active = gate / (1.0 + torch.exp(-gate))
    elif activation == "gelu_tanh":
        active = 0.5 * gate * (1.0 + torch.tanh(0.7978845608028654 * (gate + 0.044715 * gate**3)))
    elif activation == "gelu":
        active = 0.5 * gate * (1.0 + torch.erf(gate * 0.7071067811865476))
    elif activation == "clamped_silu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1.0
        active = gate / (1.0 + torch.exp(-1.702 * gate))
    else:
        raise ValueError(f"unknown activation {activation!r}; known: {', '.join(get_args(Activation))}")
    return (active * up).to(gate_up.dtype)


class ReferenceOps:
    """The reference functions behind the `Ops` protocol."""

    name = "reference"

    def pack(self, parts: Sequence[WeightPart], bias: Tensor | None = None) -> LinearWeight:
        """See `pack`."""
        return pack(parts, bias)

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """See `linear`."""
        return linear(x, _dense(weight))

    def embed(self, token_ids: Tensor, weight: LinearWeight) -> Tensor:
        """See `embed`."""
        return embed(token_ids, _dense(weight))

    rms_norm = staticmethod(rms_norm)
    rope_and_cache = staticmethod(rope_and_cache)
    paged_attention = staticmethod(paged_attention)
    gated = staticmethod(gated)

    def pack_experts(self, parts: Iterable[ExpertParts], experts: int) -> ExpertWeights:
        """See `kernels.reference_moe.pack_experts`."""
        from kernels import reference_moe

        return reference_moe.pack_experts(parts, experts)

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `kernels.reference_moe.route`."""
        from kernels import reference_moe

        return reference_moe.route(logits, routing, bias)

    def run_experts(
        self, x: Tensor, weights: ExpertWeights, ids: Tensor, scales: Tensor, activation: Activation = "silu"
    ) -> Tensor:
        """See `kernels.reference_moe.run_experts`."""
        from kernels import reference_moe

        return reference_moe.run_experts(x, weights, ids, scales, activation, self.linear)


def _dense(weight: LinearWeight) -> DenseWeight:
    if not isinstance(weight, DenseWeight):
        raise TypeError(f"this weight was packed by another implementation: {type(weight).__name__}")
    return weight


def step_inputs(
    buffer: Tensor, layout: StepLayout, token_table: Tensor, page_table: Tensor, page_size: int, into: StepInputs
) -> None:
    """Apply the page updates and carried tokens of a packed step to the tables, then fill the step's inputs."""
    header = buffer[:HEADER].tolist()
    seqs, tokens = header[SEQS], header[TOKENS]
    row, index, page = layout.pages_of(buffer)[:, : header[PAGES]].to(torch.int64)
    page_table[row, index] = page.to(torch.int32)
    for padded, padding in (
        (into.token_ids, -1), (into.positions, 0), (into.slots, -1), (into.q_starts, tokens), (into.kv_lens, 0),
        (into.logit_rows, -1), (into.sample_rows, -1), (into.sample_positions, 0),
    ):  # fmt: skip
        padded.fill_(padding)
    described = layout.seqs_of(buffer)[:, :seqs].T.tolist()
    for s, (request, first, position, source) in enumerate(described):
        count = (described[s + 1][1] if s + 1 < seqs else tokens) - first
        if source >= 0:
            carried = layout.tokens_of(buffer)[source : source + count]
            token_table[request, position : position + count] = carried
        where = torch.arange(position, position + count, device=buffer.device)
        into.q_starts[s], into.kv_lens[s] = first, position + count
        into.token_ids[first : first + count] = token_table[request, position : position + count]
        into.positions[first : first + count] = where.to(torch.int32)
        into.slots[first : first + count] = page_table[request, where // page_size] * page_size + where % page_size
        used = -(-(position + count) // page_size)
        into.page_table[s, :used] = page_table[request, :used]
    for r, s in enumerate(layout.logits_of(buffer)[: header[LOGITS]].tolist()):
        into.logit_rows[r] = into.q_starts[s + 1] - 1
        into.sample_rows[r], into.sample_positions[r] = described[s][0], into.kv_lens[s]


def gumbel_noise(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Gumbel(0, 1) noise of tokens, float64, a pure function of (seed, position, token id): the hash of
    `kernels.sampling` in int64 arithmetic (the products of 32-bit halves may wrap; their low 32 bits do not change)."""
    low, high = noise_key(seed, position)

    def mix(x: Tensor, addend: int) -> Tensor:
        x = x ^ (x >> 16)
        x = ((x * 0x7FEB352D) + addend) & 0xFFFFFFFF
        x = x ^ (x >> 15)
        x = (x * 0x846CA68B) & 0xFFFFFFFF
        return x ^ (x >> 16)

    noise = mix(mix(token_ids.to(torch.int64), 0) ^ low, high)
    return -torch.log(-torch.log((noise.to(torch.float64) + 0.5) / 2**32))


def kept_tokens(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Ids that survive top_k, then top_p of what is left, then min_p of the largest; most probable first, lowest id
    first among equals. logits [vocab]."""
    scaled = logits.to(torch.float64) / temperature
    order = torch.sort(scaled, descending=True, stable=True).indices
    if top_k > 0:
        order = order[:top_k]
    probabilities = torch.softmax(scaled[order], dim=0)
    before = torch.cumsum(probabilities, 0) - probabilities
    return order[(before < top_p) & (probabilities >= min_p * probabilities[0])]


def sample(
    logits: Tensor,
    temperature: float,
    seed: int,
    position: int,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    """A draw from softmax(logits / temperature) after truncation, by Gumbel-max. logits [vocab], temperature > 0."""
    kept = kept_tokens(logits, temperature, top_k, top_p, min_p)
    scores = logits.to(torch.float64)[kept] / temperature + gumbel_noise(seed, position, kept)
    return int(kept[scores.argmax()])
