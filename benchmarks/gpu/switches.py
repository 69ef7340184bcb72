"""The same tokens with each optimisation on and off: every switch of the engine, chunk sizes, and too little memory.

Switches are the engine's own: every boolean field of EngineConfig is turned to what it is not by default, and every
field that can be "off" takes each of its values, so that a new one is compared from the day it exists. Each variant is
an engine process with the small model; it is asked the same prompts twice, so that the second time finds them in the
prefix cache where there is one.
"""

from __future__ import annotations

import asyncio
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from benchmarks.gpu.checkpoint import SMALL, TINY
from benchmarks.gpu.equality import NEAR_TIE, OWN, Answer, answers, prompts_of
from benchmarks.gpu.in_process import engine, engine_settings
from benchmarks.gpu.supervise import Context
from benchmarks.gpu.words import words
from engine.config import EngineConfig

LENGTHS = (100, 40, 130, 17, 90, 120, 64, 110)
TOKENS = 64
CHUNKS = (16, 256, 2048)
TIGHT_TOKENS = 512
"""Tokens in the cache of the variant with too little memory: some requests have to be put off and go on later."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A name and the settings that differ."""

    name: str
    settings: Mapping[str, Any]
    preempts: bool = False
    """Requests have to be put off in it"""


def variants(tight_mib: int, tiny: bool, devices: int = 1) -> list[Variant]:
    """Everything that must not change a token; the first is what the others are compared with. devices: how many there
    are to share a model."""
    found = [Variant("as it is", {}), Variant("too little memory", {"kv_memory_mib": tight_mib}, preempts=True)]
    for field in msgspec.structs.fields(EngineConfig):
        if field.type is bool:
            found.append(Variant(f"{field.name} {'off' if field.default else 'on'}", {field.name: not field.default}))
        choices = typing.get_args(field.type)
        if "off" in choices:
            found += [
                Variant(f"{field.name} {choice}", {field.name: choice}) for choice in choices if choice != field.default
            ]
    if tiny:  # one of each kind
        return [*found[:3], Variant("chunks of 16", {"step_tokens": 16})]
    paced = [Variant("steps of 2 ms", {"max_step_ms": 2.0}), Variant("no lane for short prompts", {"fast_share": 0.0})]
    if devices > 1:
        paced.append(Variant("two ranks", {"tensor_parallel": 2, "graphs": "off"}))
    return [*found, *paced, *(Variant(f"chunks of {chunk}", {"step_tokens": chunk}) for chunk in CHUNKS)]


def differences(mine: list[Answer], base: list[Answer]) -> str:
    """Where answers differ first by more than a near tie; nothing where they do not."""
    for number, (got, wanted) in enumerate(zip(mine, base, strict=True)):
        if len(got.tokens) != len(wanted.tokens) or len(got.logprobs) != len(got.tokens):
            return f"prompt {number}: {len(got.tokens)} tokens and {len(got.logprobs)} log-probabilities"
        for at, (one, other) in enumerate(zip(got.tokens, wanted.tokens, strict=True)):
            if one != other:
                top = wanted.logprobs[at].top
                if top[0][1] - top[1][1] >= NEAR_TIE:
                    return f"prompt {number}: token {at} is {one}, was {other}"
                break
    return ""


def run(context: Context) -> None:
    """Several engines at a time where there are processors for it."""
    asyncio.run(_run(context))


async def _run(context: Context) -> None:
    shape = TINY if context.tiny else SMALL
    prompts = prompts_of(words(shape.vocab), LENGTHS, seed=6)
    item = 4  # keys and values are float32
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * item
    devices = 1 if context.device == "cpu" else torch.cuda.device_count()
    listed = variants(max(1, TIGHT_TOKENS * token_bytes >> 20), context.tiny, devices)
    room = asyncio.Semaphore(max(2, min(4, (os.cpu_count() or 1) // 4)))

    async def answer(number: int, variant: Variant) -> tuple[list[Answer], list[Answer], int]:
        own = {**OWN, "dtype": "float32", **variant.settings}
        if own.get("speculate") == "draft":
            own["draft_model"] = str(context.fact("small"))  # the model itself: all of its guesses are right
        settings = engine_settings(context, context.fact("small"), **own)
        async with room, engine(settings, context.work, f"switch-{number}", context.deadline.left) as (client, _):
            async with asyncio.timeout(context.deadline.left):
                first = await answers(client, prompts, TOKENS, logprobs=True)
                second = await answers(client, prompts, TOKENS, logprobs=True)
                return first, second, (await client.snapshot()).preemptions

    asked = [asyncio.create_task(answer(number, variant)) for number, variant in enumerate(listed)]
    base, _, _ = await asked[0]
    for variant, task in zip(listed, asked, strict=True):
        name = f"the same tokens: {variant.name}"
        try:
            first, second, preemptions = await task
        except Exception as error:  # whatever a variant fails with is what was found of it
            context.recorder.check(name, False, f"{type(error).__name__}: {error}")
            continue
        wrong = differences(first, base) or differences(second, base)
        if variant.preempts and not preemptions:
            wrong = wrong or "nothing had to be put off"
        context.recorder.check(name, not wrong, wrong)
        row = {"variant": variant.name, "same tokens": "no" if wrong else "yes", "put off": preemptions}
        context.recorder.row("Switches", row)
