"""The peer: transformers' continuous batching on the same weights, in the same run, asked for the same.

It runs in this process, as its users run it. With flash-attn installed it takes that, otherwise torch's attention over
a mask. Where its continuous batching does not start, plain `generate` is measured instead, and the result says so.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from benchmarks.gpu.supervise import Context
from benchmarks.gpu.workload import Workload, workload
from benchmarks.rig.results import percentile

POLL_S = 0.5
PAGE = 256
STEP_TOKENS = 2048
WINDOW = 64
"""Tokens of each stream at most: without flash-attn a step of many streams takes a good part of a second."""


class PeerError(Exception):
    """The peer did not answer."""


class Peer(Protocol):
    """One way to use transformers."""

    name: str

    def times(self, prompts: Sequence[Sequence[int]], tokens: int, until: float) -> list[list[float]]:
        """Answer all prompts at once; the times of time.perf_counter() at which each one's tokens were known. Raises
        PeerError when that takes longer than until time.monotonic() reaches `until`."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Batching:
    """Its ContinuousBatchingManager."""

    name = "continuous batching"

    def __init__(self, model: Any, load: Workload, tiny: bool) -> None:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        page = 32 if tiny else PAGE
        most = max(load.batches.values())
        longest = max(length for length, _ in load.prompts.values())
        wanted = {
            "page_size": page,
            "num_blocks": most * -(-(load.context + load.window) // page) + 2 * -(-longest // page),
            "max_batch_tokens": 128 if tiny else STEP_TOKENS,
            "max_requests_per_batch": most,
            "auto_switch_to_flash": False,  # it would look for kernels on the hub; what is installed is chosen below
        }
        known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        if "page_size" not in known:  # its name before 5.17
            wanted["block_size"] = wanted["page_size"]
        config = ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=load.answer)
        self._manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
        self._manager.start()

    def times(self, prompts: Sequence[Sequence[int]], tokens: int, until: float) -> list[list[float]]:
        """See Peer."""
        known = inspect.signature(self._manager.add_request).parameters
        asked = {"max_new_tokens": tokens, "record_timestamps": True, "eos_token_id": -1}
        asked = {name: value for name, value in asked.items() if name in known}
        order = [self._manager.add_request(list(prompt), **asked) for prompt in prompts]
        found: dict[str, list[float]] = {}
        while len(found) < len(order):
            if time.monotonic() > until:
                raise PeerError(f"{len(found)} of {len(order)} answers in time")
            output = self._manager.get_result(timeout=POLL_S)
            now = time.perf_counter()
            if output is None:
                if not self._manager.is_running():
                    raise PeerError("its loop has ended")
                continue
            if output.error is not None:
                raise PeerError(str(output.error))
            if output.is_finished():
                if len(output.generated_tokens) != tokens:
                    raise PeerError(f"{len(output.generated_tokens)} tokens instead of {tokens}")
                found[output.request_id] = list(output.timestamps or []) or [now]
        return [found[name] for name in order]

    def close(self) -> None:
        """See Peer."""
        known = inspect.signature(self._manager.stop).parameters
        at_once = {"hard_stop": True} if "hard_stop" in known else {}
        self._manager.stop(block=True, timeout=10, **at_once)


class Plain:
    """`generate`, one prompt after the other."""

    name = "plain generate"

    def __init__(self, model: Any) -> None:
        self._model = model

    def times(self, prompts: Sequence[Sequence[int]], tokens: int, until: float) -> list[list[float]]:
        """See Peer. Tokens are known when all are: they are spread evenly after a first one that is timed by itself."""
        found = []
        for prompt in prompts:
            if time.monotonic() > until:
                raise PeerError(f"{len(found)} of {len(prompts)} answers in time")
            first = self._generate(prompt, 1)
            if tokens == 1:
                found.append([first[1]])
                continue
            begun, ended = self._generate(prompt, tokens)
            step = (ended - begun - (first[1] - first[0])) / max(1, tokens - 1)
            found.append([ended - step * (tokens - 1 - n) for n in range(tokens)])
        return found

    def close(self) -> None:
        """See Peer."""

    def _generate(self, prompt: Sequence[int], tokens: int) -> tuple[float, float]:
        ids = torch.tensor([list(prompt)], device=self._model.device)
        begun = time.perf_counter()
        self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()
        return begun, time.perf_counter()


def run(context: Context) -> None:
    """First tokens, one stream, many streams, as long as there is time."""
    from transformers import LlamaForCausalLM

    load, recorder = workload(context.tiny), context.recorder
    if context.tiny:
        torch.set_num_threads(1)
    flash = context.device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if flash else "sdpa"
    began = time.monotonic()
    model = LlamaForCausalLM.from_pretrained(
        context.fact("model"), dtype=getattr(torch, load.shape.dtype), attn_implementation=attention
    )
    model = model.to(context.device).eval()
    recorder.figure("peer.load_s", time.monotonic() - began)
    peer = _peer(context, model, load)
    recorder.fact("peer", f"transformers, {peer.name}, attention by {attention}")
    until = time.monotonic() + context.deadline.left
    try:
        _measure(context, peer, load, until)
    except PeerError as error:
        recorder.note(f"the peer's later figures are missing: {error}")
    finally:
        peer.close()


def _peer(context: Context, model: Any, load: Workload) -> Peer:
    batching: Batching | None = None
    try:
        batching = Batching(model, load, context.tiny)
        batching.times([load.prompt("peer/warm", load.chat_prompt)], 2, time.monotonic() + context.deadline.left / 2)
    except Exception as error:  # another project's code: what it raises is its own affair, the run goes on
        context.recorder.note(f"continuous batching does not run here ({type(error).__name__}: {error})")
        if batching is not None:
            batching.close()
        return Plain(model)
    return batching


def _measure(context: Context, peer: Peer, load: Workload, until: float) -> None:
    recorder = context.recorder
    for name, (length, times) in load.prompts.items():
        found = []
        for i in range(min(times, 5) + 1):
            prompt = load.prompt(f"first/{name}/{i}", length)
            sent = time.perf_counter()
            found.append(1e3 * (peer.times([prompt], 1, until)[0][0] - sent))
        recorder.figure(f"peer.ttft_{name}_ms", percentile(found[1:], 0.5))
    found = []
    for i in range(2):
        (times_of,) = peer.times([load.prompt(f"one/{i}", load.chat_prompt)], load.answer, until)
        found.append(1e3 * (times_of[-1] - times_of[0]) / max(1, len(times_of) - 1))
    recorder.figure("peer.tpot_1_ms", found[-1])
    length = load.context - load.window // 2
    for name, streams in load.batches.items():
        prompts = [load.prompt(f"batch/{name}/{n}", length) for n in range(streams)]
        # As with ours: computed once before, so that what is in its prefix cache lets all begin at about the same time
        peer.times(prompts, 1, until)
        answers = peer.times(prompts, min(load.window, WINDOW), until)
        rate, whole = overlap_rate(answers)
        recorder.figure(f"peer.decode_{name}_tok_s", rate)
        if whole:
            recorder.note(f"the peer's {streams} streams never ran at the same time: their whole time counts")


def overlap_rate(answers: Sequence[Sequence[float]]) -> tuple[float, bool]:
    """Tokens per second while all answers were under way; where they never were, over the time from the first token to
    the last (True)."""
    begin, end = max(times[0] for times in answers), min(times[-1] for times in answers)
    whole = end <= begin
    if whole:
        begin, end = min(times[0] for times in answers), max(times[-1] for times in answers)
    counted = sum(begin < when <= end for times in answers for when in times)
    return counted / max(end - begin, 1e-9), whole
