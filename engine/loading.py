"""From a configuration to a warm engine, with an account of every MiB and second in the log."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

import kernels
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import Device, open_device
from engine.distributed import LeadingModel, Shard, Team, TeamDevice
from engine.embedding import Embedder
from engine.exact import LoadedModel
from engine.models.blocks import DecoderModel
from engine.models.registry import CausalLM, load_model
from engine.monitor import MONITOR, watch_triton
from engine.sampling_params import SamplingParams
from engine.sizing import MIB, free_host_bytes, token_bytes
from engine.tokenizer import Tokenizer
from engine.weights.errors import WeightsError
from engine.weights.sources import ModelSource, resolve
from engine.wire import Submit, pack_tokens
from kernels.interface import Ops

log = logging.getLogger("engine.core")

WARM_UP_CONTEXT = 64
TRIAL_CACHE_MIB = 256
"""KV cache of the engine that shows how much memory steps take."""


def load(config: EngineConfig, *, clock: Callable[[], float] = time.monotonic) -> EngineCore:
    """Load the model that `config` names and return an engine whose kernels have all run once.

    Raises WeightsError (model cannot be found, read or run) or ValueError (a setting that cannot be met, in words).
    """
    MONITOR.disarm()
    took: dict[str, float] = {}
    at = clock()

    def lap(stage: str) -> None:
        nonlocal at
        now = clock()
        took[stage] = now - at
        at = now

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // config.tensor_parallel)
    config = msgspec.structs.replace(config, device=device, threads=threads)
    team = None
    if config.tensor_parallel > 1:
        team = Team(config, device)
        lap("ranks")
        if device == "cuda":  # what ranks say to each other is not recorded
            config = msgspec.structs.replace(config, graphs="off")
    cache = Path(config.cache_dir) if config.cache_dir else None
    source = resolve(config.model, cache)
    lap("find the model")
    kernel_cache = cache / "kernels" if cache else None
    ops = kernels.table(
        device,
        config.kernels,
        threads,
        kernel_cache,
        config.activation_bits,
        split=config.split_keys,
        deterministic=config.deterministic,
    )
    if ops.name == "triton":
        watch_triton()
    # The native operations have threads of their own; torch's would only spin beside them after every small operation.
    torch.set_num_threads(1 if ops.name == "cpu" else threads)
    lap("kernels")
    draft = load_draft(config, source, ops)
    model = load_model(source, config, ops, None if team is None else team.shard)
    if team is not None:
        assert isinstance(model, DecoderModel), "texts are not embedded by several ranks"
        model = LeadingModel(model, team)
    if isinstance(model, Embedder) and not model.skips_cached:
        config = msgspec.structs.replace(config, prefix_cache=False)
    lap("weights")
    place = open_device(device) if team is None else TeamDevice(open_device(device), team)
    warm_up(config, model, ops, place, draft)
    lap("warm-up")
    free, workspace = free_bytes(config, model, ops, place, draft)
    lap("workspace")
    core = EngineCore(config, model, ops, clock=clock, device=place, free_bytes=free, draft=draft)
    lap("KV cache and graphs")
    plan = core.plan
    log.info(
        "%s on %s (%s kernels, %d threads): weights %.1f MiB%s; KV cache %.1f MiB = %d pages of %d tokens in %s,"
        " %.1f KiB a token; context %d",
        source.name,
        device,
        ops.name,
        threads,
        model.weight_bytes / MIB,
        ", packed" if model.packed else "",
        plan.bytes / MIB,
        plan.num_pages,
        plan.page_size,
        plan.dtype,
        plan.token_bytes / 1024,
        plan.max_context,
    )
    if draft is not None:
        log.info(
            "draft %s: weights %.1f MiB%s; of the KV cache %.1f MiB, %.1f KiB a token",
            config.draft_model,
            draft.weight_bytes / MIB,
            ", packed" if draft.packed else "",
            plan.tokens * plan.beside / MIB,
            plan.beside / 1024,
        )
    if core.steps.summary:
        log.info("steps: %s; workspace of the largest step %.1f MiB", core.steps.summary, workspace / MIB)
    MONITOR.arm()
    log.info("start-up took %.2f s: %s", sum(took.values()), ", ".join(f"{name} {took[name]:.2f} s" for name in took))
    return core


def load_rank(config: EngineConfig, shard: Shard) -> DecoderModel:
    """Load the part of the model that a rank other than the first has. Raises as `load` does."""
    cache = Path(config.cache_dir) if config.cache_dir else None
    ops = kernels.table(
        config.device,
        config.kernels,
        config.threads,
        cache / "kernels" if cache else None,
        config.activation_bits,
        split=config.split_keys,
        deterministic=config.deterministic,
    )
    torch.set_num_threads(1 if ops.name == "cpu" else config.threads)
    model = load_model(resolve(config.model, cache), config, ops, shard)
    assert isinstance(model, DecoderModel), "texts are not embedded by several ranks"
    return model


def load_draft(config: EngineConfig, source: ModelSource, ops: Ops) -> CausalLM | None:
    """Load the draft model for the model of this source; None where none guesses. Raises WeightsError, or ValueError
    where it cannot guess for that model, naming draft_model."""
    if config.speculate != "draft":
        return None
    if not config.draft_model:
        raise ValueError("speculate draft needs a draft_model")
    if config.tensor_parallel > 1:
        raise ValueError("speculate draft runs in one process: tensor_parallel must be 1")
    try:
        found = resolve(config.draft_model, Path(config.cache_dir) if config.cache_dir else None)
        same_vocabulary(source, found)
        alone = msgspec.structs.replace(config, task="generate", lora=(), max_loras=0)
        return load_model(found, alone, ops)
    except WeightsError as error:
        raise WeightsError(f"draft_model: {error}") from error


def same_vocabulary(source: ModelSource, draft: ModelSource) -> None:
    """Raise ValueError where the tokenizers of two models differ in a token. A folder without one is taken as it is."""
    if any(one.kind != "gguf" and not (one.path / "tokenizer.json").exists() for one in (source, draft)):
        return
    ours, its = (Tokenizer.load(one).vocabulary.all_bytes for one in (source, draft))
    if len(ours) != len(its):
        text = f"a vocabulary of {len(its)} tokens, {source.name} one of {len(ours)}: they must be the same"
        raise ValueError(f"draft_model {draft.name} has {text}")
    for token, (one, other) in enumerate(zip(ours, its, strict=True)):
        if one != other:
            text = f"its token {token} is {other!r}, that of {source.name} is {one!r}: they must be the same"
            raise ValueError(f"draft_model {draft.name}: {text}")


def free_bytes(
    config: EngineConfig, model: LoadedModel, ops: Ops | None, device: Device, draft: LoadedModel | None = None
) -> tuple[int, int]:
    """(memory that the KV cache may be sized from, workspace of the largest step), in bytes.

    On a GPU every bucket runs once on a small cache, which compiles all kernels and shows what steps take beside the
    weights; that is set aside twice, for the graphs' pool and for what runs outside of graphs.
    """
    if device.name == "cpu":
        return free_host_bytes(), 0
    from engine.cuda import free_memory, peak_memory

    def run() -> None:
        small = msgspec.structs.replace(config, graphs="off", kv_memory_mib=TRIAL_CACHE_MIB, max_context=0)
        EngineCore(small, model, ops, device=device, free_bytes=free_memory(), draft=draft)

    workspace = max(0, peak_memory(run) - TRIAL_CACHE_MIB * MIB)
    return max(0, free_memory() - 2 * workspace), workspace


def warm_up(
    config: EngineConfig,
    model: LoadedModel,
    ops: Ops | None,
    device: Device | None = None,
    draft: LoadedModel | None = None,
) -> None:
    """Run a prompt and a few decode steps, greedy and sampled, on a small engine of their own that is then dropped."""
    length = min(WARM_UP_CONTEXT, model.config.max_position)
    small = msgspec.structs.replace(config, kv_memory_mib=0, max_context=0, max_running=2, step_tokens=length)
    per_token = sum(token_bytes(one.config, "float32") for one in (model, draft) if one is not None)
    # An automatic cache takes a share of what is free, so this much free memory gives a few hundred tokens.
    core = EngineCore(small, model, ops, device=device, free_bytes=per_token * 4 * length * 8, draft=draft)
    prompt = pack_tokens(i % model.config.vocab_size for i in range(length // 2))
    tokens = 1 if isinstance(model, Embedder) else 4
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True, logprobs=0)
        refused = core.submit(Submit(request_id=name, prompt=prompt, params=params))
        if refused is not None:
            raise ValueError(f"the warm-up request was refused: {refused.message}")
    while core.has_work():
        for progress in core.step():
            if progress.error is not None:
                raise ValueError(f"the model does not run: {progress.error}")
