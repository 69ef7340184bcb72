"""When a step's attention goes by FlashAttention: a step with a long prompt in it, where that was measured faster.

Such a step runs unrecorded, because a library's launch depends on the lengths, and gathers keys and values out of their
pages first. Both cost, so a step goes that way only where the attention is so much that it pays: costs are measured on
the device at the start, the decision is arithmetic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.batch import KVTensors
from engine.config import EngineConfig
from engine.runner import Flight
from kernels.interface import Ops
from kernels.long_prefill import GATHER_BYTES, Library, LongPrefill, gathered_bytes, library

log = logging.getLogger(__name__)

Seconds = Callable[[Callable[[], object]], float]
"""How long the device, or the host, takes for some work"""
Lengths = tuple[list[int], list[int]]
"""Queries and keys of each sequence"""
MOST_KEYS = 8192
"""Keys of the sequence that costs are measured with, at most"""


class Attention(Protocol):
    """A layer's attention (engine.layers.attention.PagedAttention)."""

    q_heads: int
    window: int
    softcap: float
    scale: float
    sinks: Tensor | None


@runtime_checkable
class HasAttentions(Protocol):
    """A model that tells how its layers attend."""

    @property
    def attentions(self) -> Sequence[Attention]:
        """One a layer."""
        ...


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds on one device, with one model's heads."""

    paged_s: float
    """a layer's attention over pages, for each query and key that it sees"""
    library_s: float
    """the library's"""
    gather_s: float
    """a layer's keys and values out of their pages, for each key"""
    launch_s: float
    """launching a step that is not recorded"""

    def saved_s(self, queries: Sequence[int], keys: Sequence[int], layers: int) -> float:
        """What the library saves in a step; below 0 what it loses. queries, keys: of each sequence; the queries are
        its last tokens. The launch counts in full, though the device hides some of it."""
        pairs = sum(seen(q, k) for q, k in zip(queries, keys, strict=True))
        layer_s = (self.paged_s - self.library_s) * pairs - self.gather_s * sum(keys)
        return layers * layer_s - self.launch_s


def seen(queries: int, keys: int) -> int:
    """Pairs of a query and a key that it sees."""
    return queries * keys - queries * (queries - 1) // 2


class LongPrefills:
    """Which steps go by the library."""

    def __init__(self, by: Library, kv: KVTensors, layers: int, costs: Costs | None) -> None:
        """layers: those that the library can do. costs: None sends every step with a prompt that way."""
        self.by = by
        self.costs = costs
        self._kv = kv
        self._layers = layers
        self._most_keys = GATHER_BYTES // max(1, gathered_bytes(1, kv.keys[0]))

    @property
    def summary(self) -> str:
        """Who does it, and what that costs, in words."""
        if self.costs is None:
            return f"prompts by {self.by.name}"
        paged, by, gather, launch = self.costs.paged_s, self.costs.library_s, self.costs.gather_s, self.costs.launch_s
        return (
            f"long prompts by {self.by.name}: {by * 1e12:.1f} ps a pair of query and key instead of {paged * 1e12:.1f},"
            f" {gather * 1e9:.2f} ns to gather a key, {launch * 1e3:.2f} ms to launch"
        )

    def lengths(self, flight: Flight) -> Lengths | None:
        """Queries and keys of each sequence of a step that goes that way."""
        packed = flight.packed
        if packed.same or packed.tokens == packed.seqs or len(packed.lens) != len(flight.work):
            return None
        queries, keys = [part.tokens for part in flight.work], packed.lens.tolist()
        if sum(keys) > self._most_keys:
            return None
        pays = self.costs is None or self.costs.saved_s(queries, keys, self._layers) > 0
        return (queries, keys) if pays else None

    def plan(self, lengths: Lengths, page_table: Tensor) -> LongPrefill:
        """The step's attention. page_table: the device's, a row a sequence."""
        queries, keys = lengths
        return LongPrefill(self.by, queries, keys, page_table, self._kv.page_size)


def long_prefills(
    config: EngineConfig,
    model: object,
    kv: KVTensors,
    device: str,
    costs: Callable[[Library, Attention], Costs],
    *,
    activations: torch.dtype,
) -> LongPrefills | None:
    """Which steps go by a library, if any. costs: measures, for a layer; activations: their type. Raises ValueError
    naming the setting."""
    wanted = config.flash_prefill
    if wanted == "off" or (wanted == "auto" and (device == "cpu" or config.deterministic)):
        return None
    if config.deterministic:
        raise ValueError("flash_prefill must not be on in deterministic mode: a row would depend on its step")
    by = library(device)
    layers = [one for one in model.attentions if _can(by, one)] if isinstance(model, HasAttentions) else []
    why = _in_the_way(by, kv.keys[0].dtype, activations) or ("" if layers else "can do no layer of this model")
    if by is None or why:
        reason = f"{by.name} {why}" if by is not None else why
        if wanted == "on":
            raise ValueError(f"flash_prefill is on, but {reason}")
        log.info("long prompts stay with the paged kernels: %s", reason)
        return None
    if wanted == "on":
        return LongPrefills(by, kv, len(layers), None)
    found = costs(by, layers[0])
    if found.library_s >= found.paged_s:
        log.info("long prompts stay with the paged kernels: %s is not faster here", by.name)
        return None
    return LongPrefills(by, kv, len(layers), found)


def _in_the_way(by: Library | None, cache: torch.dtype, activations: torch.dtype) -> str:
    """Why a library takes no queries of this type with a cache of that one; empty where it does."""
    if by is None:
        return "no FlashAttention is installed"
    types = f"{_name(activations)} queries with a {_name(cache)} KV cache (kv_dtype)"
    if cache != activations:
        return f"takes no {types}: the types must be the same"
    return "" if not by.types or activations in by.types else f"takes no {types}"


def _name(kind: torch.dtype) -> str:
    """As the settings name it."""
    return "fp8" if kind == torch.float8_e4m3fn else str(kind).removeprefix("torch.")


def _can(by: Library | None, layer: Attention) -> bool:
    return by is not None and layer.window == 0 and layer.sinks is None and (by.softcap or not layer.softcap)


def measure(
    ops: Ops, by: Library, kv: KVTensors, *, num_heads: int, scale: float, step_tokens: int, max_context: int,
    dtype: torch.dtype, seconds: Seconds, launch_s: float,
) -> Costs:  # fmt: skip
    """Time both ways for a chunk of a long prompt: step_tokens queries at the end of as many keys as fit. dtype: of
    activations."""
    cache, size = kv.keys[0], kv.page_size
    pages = min(MOST_KEYS, max_context, GATHER_BYTES // max(1, gathered_bytes(1, cache))) // size
    pages = max(1, min(pages, cache.shape[0]))
    keys = pages * size
    queries = min(step_tokens, keys)
    place = cache.device
    q = torch.zeros(queries, num_heads, cache.shape[3], dtype=dtype, device=place)
    table = torch.arange(pages, dtype=torch.int32, device=place)[None]
    starts = torch.tensor([0, queries], dtype=torch.int32, device=place)
    lens = torch.tensor([keys], dtype=torch.int32, device=place)
    plan = LongPrefill(by, [queries], [keys], table, size)
    whole_s = seconds(lambda: plan.attend(q, kv.keys[0], kv.values[0], scale, 0.0))
    gather_s = seconds(lambda: (plan.gathered(kv.keys[0]), plan.gathered(kv.values[0])))
    paged_s = seconds(lambda: ops.paged_attention(q, kv.keys[0], kv.values[0], starts, lens, table, scale))
    pairs = seen(queries, keys)
    return Costs(paged_s / pairs, max(0.0, whole_s - gather_s) / pairs, gather_s / keys, launch_s)
