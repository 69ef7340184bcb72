"""Checkpoints of random weights, made on the spot: a Llama of any shape as a folder that every engine here can load.

A model of 8 billion parameters is 16 GB, of which drawing and writing must take seconds: one layer is drawn, on the
device where there is one, and its bytes are written into every layer's file, by several threads. How fast a model runs
does not depend on what its weights are, as long as they are spread like a model's: rows that keep the size of what they
multiply, so that nothing overflows, and a head large enough that the most probable token stands out.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.words import end_id, words, write_tokenizer

HEAD_SCALE = 3.0
"""Spread of the logits."""
WRITERS = 8
NAMES = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    max_position: int
    dtype: str

    @property
    def layer_parameters(self) -> int:
        """Of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.inner + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model, embedding and head apart."""
        return self.layers * self.layer_parameters + 2 * self.vocab * self.hidden + self.hidden

    @property
    def item_bytes(self) -> int:
        """Of one weight."""
        return 4 if self.dtype == "float32" else 2

    @property
    def swept_bytes(self) -> int:
        """What one step reads of the weights: all but the embedding."""
        return (self.parameters - self.vocab * self.hidden) * self.item_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in the checkpoint's type."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.item_bytes


LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256, 16384, "bfloat16")
"""Llama 3's 8B, with positions enough for a prompt of 8,192 tokens and an answer."""
SMALL = Shape(4, 512, 8, 2, 64, 1408, 4096, 4096, "float32")
"""What is compared with transformers on a GPU: float32, in which both agree to a few units of the last place."""
TINY = Shape(2, 128, 4, 2, 32, 256, 512, 2048, "float32")
"""What a CPU runs in milliseconds."""


def make(folder: Path, shape: Shape, *, device: str = "cpu", seed: int = 0, alike: bool = False) -> Path:
    """Write a checkpoint into an empty or new folder; returns it. alike: all layers have the bytes of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device=device).manual_seed(seed)
    (folder / "config.json").write_text(json.dumps(configuration(shape), indent=1), "utf-8")
    write_tokenizer(folder, shape.vocab)
    files: dict[str, str] = {}
    with ThreadPoolExecutor(WRITERS) as pool:
        written = []
        tensors: list[tuple[str, Tensor]] = []
        for name, file, part in _parts(shape, generator, alike):
            tensors = part if part else tensors  # the layer before is written once more
            held = [(f"{name}{ending}", tensor) for ending, tensor in tensors]
            files |= dict.fromkeys((key for key, _ in held), file)
            written.append(pool.submit(write_safetensors, folder / file, held))
        for one in written:
            one.result()
    index = {"metadata": {"total_size": shape.parameters * shape.item_bytes}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return folder


def configuration(shape: Shape) -> dict[str, object]:
    """config.json of the shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": end_id(shape.vocab) - 1,
        "eos_token_id": end_id(shape.vocab),
        "torch_dtype": shape.dtype,
    }


def _parts(
    shape: Shape, generator: torch.Generator, alike: bool
) -> Iterator[tuple[str, str, list[tuple[str, Tensor]]]]:
    """(prefix of names, file, tensors by the ends of their names), the tensors on the CPU; none: those before again."""
    count = shape.layers + 1
    for layer in range(shape.layers):
        file = f"model-{layer + 1:05d}-of-{count:05d}.safetensors"
        drawn = [] if alike and layer else _layer(shape, generator)
        yield f"model.layers.{layer}.", file, drawn
    dtype: torch.dtype = getattr(torch, shape.dtype)
    head = _draw(generator, dtype, HEAD_SCALE * shape.hidden**-0.5, shape.vocab, shape.hidden)
    head[words(shape.vocab) :] = 0  # a control token is never the most probable one: it would have no text
    last = [
        ("model.embed_tokens.weight", _draw(generator, dtype, 1.0, shape.vocab, shape.hidden)),
        ("model.norm.weight", _gain(generator, dtype, shape.hidden)),
        ("lm_head.weight", head),
    ]
    yield "", f"model-{count:05d}-of-{count:05d}.safetensors", last


def _layer(shape: Shape, generator: torch.Generator) -> list[tuple[str, Tensor]]:
    dtype: torch.dtype = getattr(torch, shape.dtype)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = {
        "self_attn.q_proj": (q, shape.hidden),
        "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden),
        "self_attn.o_proj": (shape.hidden, q),
        "mlp.gate_proj": (shape.inner, shape.hidden),
        "mlp.up_proj": (shape.inner, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.inner),
    }
    drawn = [(f"{name}.weight", _draw(generator, dtype, k**-0.5, n, k)) for name, (n, k) in matrices.items()]
    norms = ("input_layernorm", "post_attention_layernorm")
    return [*drawn, *((f"{name}.weight", _gain(generator, dtype, shape.hidden)) for name in norms)]


def _draw(generator: torch.Generator, dtype: torch.dtype, spread: float, *size: int) -> Tensor:
    drawn = torch.randn(*size, generator=generator, dtype=dtype, device=generator.device)
    return drawn.mul_(spread).cpu()


def _gain(generator: torch.Generator, dtype: torch.dtype, width: int) -> Tensor:
    drawn = torch.rand(width, generator=generator, dtype=torch.float32, device=generator.device)
    return drawn.add_(0.5).to(dtype).cpu()


def write_safetensors(path: Path, tensors: list[tuple[str, Tensor]]) -> None:
    """Write contiguous CPU tensors as one file of the safetensors format, without a copy of them."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.nbytes
        kind = NAMES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in tensors:
            _write_all(file.fileno(), memoryview(tensor.view(-1).view(torch.uint8).numpy()))


def _write_all(descriptor: int, data: memoryview) -> None:
    """A single write stops at 2 GiB."""
    while data:
        data = data[os.write(descriptor, data) :]
