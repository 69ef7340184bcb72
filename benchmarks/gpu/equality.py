"""The engine against transformers on a small random model: the same greedy tokens, log-probabilities as close as two
implementations come.

In float32 the tokens must be equal, up to the first position where transformers' own two best logits are closer than
both round. In bfloat16 two correct programs may differ; there the engine's error against float32 is held against that
of transformers in bfloat16, on the engine's own tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.checkpoint import SMALL, TINY
from benchmarks.gpu.in_process import engine, engine_settings
from benchmarks.gpu.supervise import Context
from benchmarks.gpu.words import words
from engine.client import EngineClient
from engine.generation import EngineError
from engine.sampling_params import SamplingParams
from engine.wire import Progress, TokenLogprobs, unpack_tokens

LENGTHS = (1, 7, 33, 100, 257, 500)
TOP = 20
NEAR_TIE = 1e-3
"""Logits closer than this may change places in float32."""
CLOSE = 2e-3
"""Largest difference of log-probabilities in float32"""
OWN = {"kv_memory_mib": 64, "max_running": 16, "step_tokens": 256, "max_step_ms": 0.0}


@dataclass(slots=True)
class Answer:
    """Tokens of one prompt, each with the log-probabilities of itself and of the most probable ones."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def prompts_of(names: int, lengths: Sequence[int], seed: int = 5) -> list[list[int]]:
    """Random words."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, names, (length,), generator=generator).tolist() for length in lengths]


async def answers(client: EngineClient, prompts: Sequence[Sequence[int]], tokens: int, logprobs: bool) -> list[Answer]:
    """Ask for all of them at once, greedily. Raises RuntimeError where one fails."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=TOP if logprobs else None)
    loop = asyncio.get_running_loop()
    ends: list[asyncio.Future[Answer]] = []
    for index, prompt in enumerate(prompts):
        end: asyncio.Future[Answer] = loop.create_future()
        found = Answer()

        def said(progress: Progress | EngineError, end: asyncio.Future[Answer] = end, found: Answer = found) -> None:
            if end.done():  # nobody waits any more: another answer failed
                return
            if isinstance(progress, EngineError):
                end.set_exception(RuntimeError(str(progress)))
                return
            found.tokens += unpack_tokens(progress.tokens)
            found.logprobs += progress.logprobs or []
            if progress.finish_reason == "length":
                end.set_result(found)
            elif progress.finish_reason is not None:
                end.set_exception(RuntimeError(f"{progress.finish_reason}: {progress.error}"))

        client.submit(f"equal-{loop.time()}-{index}", prompt, params, on_progress=said)
        ends.append(end)
    return list(await asyncio.gather(*ends))


def greedy(model: Any, prompt: Sequence[int], count: int, device: str) -> tuple[list[int], list[float], Tensor]:
    """transformers, token by token: tokens, the distance between the two best logits of each, log-probabilities
    [count, vocab]."""
    ids, past = torch.tensor([list(prompt)], device=device), None
    tokens: list[int] = []
    margins: list[float] = []
    rows: list[Tensor] = []
    for _ in range(count):
        out = model(ids, past_key_values=past, use_cache=True)
        past, row = out.past_key_values, out.logits[0, -1].float()
        best = row.topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        rows.append(torch.log_softmax(row, 0).cpu())
        ids = best.indices[:1].view(1, 1)
    return tokens, margins, torch.stack(rows)


def compare(mine: Answer, tokens: Sequence[int], margins: Sequence[float], logprobs: Tensor) -> tuple[str, float]:
    """(what is wrong, or nothing; the largest difference of log-probabilities while the tokens agree)."""
    worst = 0.0
    if not len(mine.tokens) == len(mine.logprobs) == len(tokens):
        return f"{len(mine.tokens)} tokens and {len(mine.logprobs)} log-probabilities", worst
    for at, (got, wanted) in enumerate(zip(mine.tokens, tokens, strict=True)):
        if got != wanted:
            near = margins[at] < NEAR_TIE
            return ("" if near else f"token {at} is {got}, should be {wanted} by {margins[at]:.3g}"), worst
        entry = mine.logprobs[at]
        pairs = [(got, entry.logprob), *entry.top]
        worst = max(worst, *(abs(value - float(logprobs[at, token])) for token, value in pairs))
    return "", worst


def errors(mine: Answer, prompt: Sequence[int], exact: Any, rounded: Any, device: str) -> tuple[float, float]:
    """Mean error of the chosen tokens' log-probabilities against float32, on the engine's own tokens: (the engine's,
    that of transformers in the same type)."""
    ids = torch.tensor([[*prompt, *mine.tokens]], device=device)
    chosen = torch.tensor(mine.tokens).view(-1, 1)
    found = []
    for model in (exact, rounded):
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float().cpu()
        found.append(torch.log_softmax(logits, 1).gather(1, chosen).view(-1))
    ours = torch.tensor([entry.logprob for entry in mine.logprobs])
    return float((ours - found[0]).abs().mean()), float((found[1] - found[0]).abs().mean())


def run(context: Context) -> None:
    """Both types on a GPU; float32 alone on a CPU, where activations are float32 whatever the weights are."""
    from transformers import LlamaForCausalLM

    folder, device = context.fact("small"), context.device
    shape, count = (TINY, 16) if context.tiny else (SMALL, 64)
    prompts = prompts_of(words(shape.vocab), LENGTHS[:4] if context.tiny else LENGTHS)
    torch.set_num_threads(1 if context.tiny else 8)
    kinds = ("float32",) if context.tiny else ("float32", "bfloat16")
    ours = asyncio.run(_ask(context, folder, prompts, count, kinds))
    with torch.inference_mode():
        exact = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        worst = 0.0
        for prompt, mine in zip(prompts, ours["float32"], strict=True):
            wrong, apart = compare(mine, *greedy(exact, prompt, count, device))
            worst = max(worst, apart)
            context.recorder.check(f"{count} greedy tokens of a prompt of {len(prompt)}", not wrong, wrong)
        context.recorder.figure("equality.float32_worst_logprob", worst)
        context.recorder.check("float32 log-probabilities", worst <= CLOSE, f"{worst:.3g} apart, at most {CLOSE}")
        if "bfloat16" in ours:
            rounded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
            pairs = [
                errors(mine, prompt, exact, rounded, device)
                for prompt, mine in zip(prompts, ours["bfloat16"], strict=True)
            ]
            engines, theirs = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
            context.recorder.figure("equality.bfloat16_error", engines)
            context.recorder.figure("equality.bfloat16_error_of_transformers", theirs)
            said = f"mean error {engines:.3g} against {theirs:.3g} of transformers"
            context.recorder.check("bfloat16 log-probabilities", engines <= 2 * theirs + 1e-3, said)


async def _ask(
    context: Context, folder: str, prompts: Sequence[Sequence[int]], count: int, kinds: Sequence[str]
) -> dict[str, list[Answer]]:
    """The engine's answers in each type."""
    found: dict[str, list[Answer]] = {}
    for kind in kinds:
        settings = engine_settings(context, folder, **OWN, dtype=kind)
        async with engine(settings, context.work, f"equality-{kind}", context.deadline.left) as (client, _):
            async with asyncio.timeout(context.deadline.left):
                found[kind] = await answers(client, prompts, count, logprobs=True)
    return found
