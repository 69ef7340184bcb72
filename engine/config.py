"""EngineConfig: every knob of one engine process. A field's docstring is its help text on the command line and in
admin tools.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Device = Literal["auto", "cpu", "cuda"]
KernelChoice = Literal["auto", "triton", "cpu", "reference"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8"]
Quantize = Literal["none", "fp8", "int8", "int4"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine process, which serves one model."""

    model: str = "smollm2-135m"
    """Model to load: a built-in name, a GGUF file, a folder with safetensors, or a hub id such as org/name."""
    served_name: str = ""
    """Name that clients use for the model; empty takes it from `model`."""
    task: Literal["auto", "generate", "embed"] = "auto"
    """What the model is for: generate answers, or embed texts as vectors; auto goes by the checkpoint, which says how
    its vectors are pooled where it is for embedding.
    """
    cache_dir: str = ""
    """Folder for fetched models and built kernels; empty is the user's cache folder."""
    device: Device = "auto"
    """Device to run on; auto takes CUDA when there is one."""
    kernels: KernelChoice = "auto"
    """Implementation of the model's operations; auto takes the fastest for the device."""
    dtype: Dtype = "auto"
    """Activation and weight type; auto keeps quantised weights as they are and otherwise takes the checkpoint's own on
    GPUs (where GGUF's blocks become dense), float32 on CPUs. Any other makes every weight dense in that type.
    """
    quantize: Quantize = "none"
    """Quantise dense weights as they are loaded: fp8 or int8 (a scale for each row), or int4 (a scale and a zero for
    each 128 inputs; embedding and head take 8 bits). On a CPU int8 and fp8 are both blocks of 32 of 8 bits and int4 is
    blocks of 32 of 4 bits (embedding and head: 8), the fastest there. A checkpoint that is quantised already is
    refused, unless dtype says what to make it first.
    """
    activation_bits: Literal[8, 16] = 8
    """What activations are rounded to where they meet packed weights on a CPU, or fp8 ones on a GPU that multiplies
    those: 8 is the fastest, 16 gives the answers of unrounded ones. On a CPU 16 is nearly as fast for a few streams,
    and has 0.6 of the speed for long prompts and large batches.
    """
    kv_dtype: CacheDtype = "auto"
    """Type of the KV cache; auto is float16 for packed weights on a CPU and the activation type otherwise. fp8 (e4m3)
    takes a byte a number, so that twice the tokens fit; keys and values are rounded to 4 significant bits.
    """
    kv_memory_mib: int = 0
    """Memory for the KV cache in MiB; 0 sizes it from what is free (on CPUs: a quarter of free memory, at most 2
    GiB).
    """
    page_size: int = 16
    """Tokens per KV page: 16, 32 or 64."""
    max_context: int = 0
    """Most tokens of prompt and answer together; 0 takes the model's own limit, cut to what the KV cache holds."""
    max_running: int = 64
    """Most sequences that share a step."""
    max_queued: int = 512
    """Most sequences that wait; one more is refused at once."""
    fused_steps: bool = True
    """Run a step of the model as one operation where the kernels have one for it; the results are the same bits."""
    step_tokens: int = 256
    """Token budget of one step: running sequences first, the rest is prefill, in chunks."""
    graphs: Literal["auto", "on", "off"] = "auto"
    """Pad steps to a table of sizes and record them: on a GPU as CUDA graphs (auto, on), or run at the same sizes
    without (off); on a CPU steps have exactly their size (auto, off) or are padded as on a GPU (on), for tests.
    """
    device_sampling: bool = True
    """Choose tokens on the device, where its kernels can; otherwise each step's logits go to the host, which waits."""
    overlap: bool = True
    """Decide and launch a step while the one before it still runs, on devices that compute by themselves."""
    just_in_time: bool = True
    """Where steps overlap, decide and launch the next one just before the one that runs is done, so that it has who
    arrived meanwhile; otherwise as soon as there is room for it.
    """
    max_step_ms: float = 0.0
    """Longest step aimed at, in milliseconds: prompts are cut so that running sequences get their next token in time;
    0 computes step_tokens however long they take.
    """
    fast_share: float = 0.5
    """Part of each step's prefill that short prompts may take before longer ones, the shortest first; 0: all in order
    of arrival.
    """
    fast_tokens: int = 256
    """A prompt is short with at most this many tokens that are not in the prefix cache."""
    target_ttft_ms: float = 0.0
    """Target for the first token in milliseconds: a request that others ahead of it would make miss it is refused with
    503 and a time to come back; 0 queues it, up to max_queued. (A prompt that is too long for the target by itself may
    wait half of it.)
    """
    step_timeout_s: float = 60.0
    """Seconds after which a step that has not ended is given up: its requests fail and the engine starts again; 0
    waits for ever.
    """
    flash_prefill: Literal["auto", "on", "off"] = "auto"
    """Attention of steps with a long prompt by FlashAttention (flash-attn, or torch's own): auto where it is there,
    takes the KV cache's type (16 bits, that of the activations) and was measured at the start to be faster; on for
    every step with a prompt, or a refusal to start. On CPUs auto is off, and on is for tests, with graphs on.
    """
    split_keys: bool = True
    """Cut long sequences along their keys where a step has few of them, so that a GPU is busy; on CPUs of no effect."""
    deterministic: bool = False
    """Make a request's logits the same bits whatever else is in its steps and however its prompt is cut. On CPUs they
    are that anyway; on a GPU it costs speed (fixed tiles, no split keys, matrix products of a fixed number of rows),
    and without it they are the same bits only where steps fall into the same bucket.
    """
    speculate: Literal["off", "lookup", "draft"] = "off"
    """Guess next tokens and check several in one step: lookup guesses that a text goes on as it did after the same
    words before, draft asks a smaller model, draft_model. Tokens are the same as without; a request whose guesses do
    not pay runs without them. Steps with guesses do not overlap.
    """
    draft_model: str = ""
    """Smaller model with the same vocabulary that guesses where speculate is draft: named like model, loaded with the
    same dtype and quantize. Its keys and values are part of the KV cache's memory.
    """
    speculate_tokens: int = 8
    """Most tokens that are guessed for a request in one step."""
    lora: tuple[str, ...] = ()
    """Adapters to load at the start, each NAME=FOLDER: a folder as PEFT writes it. Clients name them as models."""
    max_loras: int = 0
    """Most adapters that are loaded at once; 0 is as many as are named at the start."""
    max_lora_rank: int = 64
    """Highest rank of an adapter. On GPUs memory is taken for max_loras of this rank."""
    prefix_cache: bool = True
    """Reuse the KV pages of equal prompt prefixes within one tenant."""
    tensor_parallel: int = 1
    """Processes that share each layer of the model, on a GPU of its own each, or on CPUs: 2 halve what each holds."""
    threads: int = 0
    """CPU threads of the engine process; 0 takes all cores."""
    usage_retention_s: int = 86_400
    """How long final token counts stay readable by request id, in seconds."""
