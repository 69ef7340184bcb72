"""EngineConfig: every knob of one engine process. A field's docstring is its help text on the command line and in
admin tools.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Device = Literal["auto", "cpu", "cuda"]
KernelChoice = Literal["auto", "triton", "cpu", "reference"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine process, which serves one model."""

    model: str = "smollm2-135m"
    """Model to load: a built-in name, a GGUF file, a folder with safetensors, or a hub id such as org/name."""
    served_name: str = ""
    """Name that clients use for the model; empty takes it from `model`."""
    cache_dir: str = ""
    """Folder for fetched models and built kernels; empty is the user's cache folder."""
    device: Device = "auto"
    """Device to run on; auto takes CUDA when there is one."""
    kernels: KernelChoice = "auto"
    """Implementation of the model's operations; auto takes the fastest for the device."""
    dtype: Dtype = "auto"
    """Activation and weight type; auto keeps packed weights packed and otherwise takes the checkpoint's own on GPUs,
    float32 on CPUs.
    """
    activation_bits: Literal[8, 16] = 8
    """What activations are rounded to where they meet packed weights on a CPU: 8 is the fastest, 16 gives the answers
    of float32 at nearly the same speed for a few streams and at 0.6 of it for long prompts and large batches.
    """
    kv_dtype: Dtype = "auto"
    """Type of the KV cache; auto is float16 for packed weights on a CPU and the activation type otherwise."""
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
    prefix_cache: bool = True
    """Reuse the KV pages of equal prompt prefixes within one tenant."""
    threads: int = 0
    """CPU threads of the engine process; 0 takes all cores."""
    usage_retention_s: int = 86_400
    """How long final token counts stay readable by request id, in seconds."""
