"""What running in fewer bytes costs in quality: the default model's quantised blocks with integer products, against the
same weights made dense in float32. --formats adds these dense weights quantised again at load.

The default model's weights are published here in blocks of 4 bits alone. Quantised again in the same blocks they fall
on the very same values, which would flatter int4; "int4, blocks moved" therefore measures what 4 bits cost: every row
is moved by half a block before it is quantised, and back after.

Three measures. Perplexity of a fixed text, in windows of 512 tokens. Teacher-forced agreement on the same text: how
often both have the same most probable token, and the mean Kullback-Leibler divergence of the packed distribution from
the float32 one. Greedy agreement: answers of 64 tokens to fixed questions, how many are equal and for how many tokens
on average they are.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import kernels
from benchmarks.rig import results
from engine.batch import ForwardBatch, KVTensors
from engine.config import Dtype, EngineConfig, Quantize
from engine.layers.linear import LayerLoader
from engine.models.family import find_family
from engine.models.registry import CausalLM, load_model
from engine.tokenizer import Tokenizer
from engine.weights.checkpoint import open_checkpoint
from engine.weights.quantize import VOCABULARY
from engine.weights.sources import ModelSource, resolve
from kernels.blocks import BLOCK, dequantize
from kernels.interface import BlockFormat
from kernels.quantize import quantize_blocks

TEXT = Path(__file__).resolve().parent / "text" / "the-mill.txt"
WINDOW = 512
ANSWER = 64
PAGE = 16
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 12 plus 30?",
    "Name three fruits.",
    "Explain why the sky is blue.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What is photosynthesis?",
    "List the planets of the solar system.",
    "Write a haiku about winter.",
    "How many days are in a leap year?",
    "What does a water mill do?",
    "Write a Python function that adds two numbers.",
    "What is the opposite of hot?",
    "Describe a cat in one sentence.",
)


class Runner:
    """One sequence at a time through a model and its own paged cache."""

    def __init__(self, model: CausalLM, kv_dtype: torch.dtype, positions: int) -> None:
        config, pages = model.config, -(-positions // PAGE)
        self._model = model
        self.weight_bytes = model.weight_bytes
        self._table = torch.arange(pages, dtype=torch.int32).reshape(1, -1)
        self._kv = KVTensors.allocate(
            layers=config.num_layers,
            num_pages=pages,
            kv_heads=config.num_kv_heads,
            page_size=PAGE,
            head_dim=config.head_dim,
            dtype=kv_dtype,
            device="cpu",
        )

    def step(self, ids: Sequence[int], start: int, last_only: bool = False) -> Tensor:
        """Logits float32 of the ids at positions start, start + 1, …: [len(ids), vocab], or [1, vocab]."""
        count = len(ids)
        at = torch.arange(start, start + count, dtype=torch.int32)
        batch = ForwardBatch(
            token_ids=torch.tensor(ids, dtype=torch.int32),
            positions=at,
            slots=at,
            q_starts=torch.tensor([0, count], dtype=torch.int32),
            kv_lens=torch.tensor([start + count], dtype=torch.int32),
            page_table=self._table,
            logit_rows=torch.arange(count - 1 if last_only else 0, count),
        )
        with torch.inference_mode():
            return self._model.forward(batch, self._kv).clone()

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most probable tokens after the prompt, up to the end of the answer."""
        out: list[int] = []
        piece, start = list(prompt), 0
        while len(out) < count:
            token = int(self.step(piece, start, last_only=True)[0].argmax())
            out.append(token)
            if token in self._model.config.eos_token_ids:
                break
            piece, start = [token], start + len(piece)
        return out


@dataclass(frozen=True)
class Agreement:
    """Comparison of two models on one text."""

    tokens: int
    perplexity: float
    perplexity_float32: float
    same_top: float
    divergence: float


def load(
    source: ModelSource,
    dtype: Dtype,
    kv_dtype: torch.dtype,
    threads: int,
    activation_bits: int = 8,
    quantize: Quantize = "none",
) -> Runner:
    """Load the model with native CPU operations."""
    ops = kernels.table("cpu", "cpu", threads, activation_bits=activation_bits)
    model = load_model(source, EngineConfig(device="cpu", dtype=dtype, quantize=quantize, threads=threads), ops)
    return Runner(model, kv_dtype, 2 * WINDOW)


def compare_text(packed: Runner, dense: Runner, ids: Sequence[int]) -> Agreement:
    """Teacher-forced comparison over windows of the text."""
    loss = loss_dense = divergence = 0.0
    same = count = 0
    for start in range(0, len(ids) - 1, WINDOW):
        window = ids[start : start + WINDOW + 1]
        targets = torch.tensor(window[1:]).unsqueeze(1)
        ours = packed.step(window[:-1], 0).log_softmax(-1)
        theirs = dense.step(window[:-1], 0).log_softmax(-1)
        loss -= float(ours.gather(1, targets).sum())
        loss_dense -= float(theirs.gather(1, targets).sum())
        divergence += float((theirs.exp() * (theirs - ours)).sum())
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        count += len(window) - 1
    return Agreement(count, math.exp(loss / count), math.exp(loss_dense / count), same / count, divergence / count)


def equal_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens from the start are equal."""
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


def blocks_moved(source: ModelSource, format: BlockFormat, head: BlockFormat, threads: int) -> Runner:
    """The model with weights that went through blocks which begin in the middle of the file's own, run dense in
    float32: the loss of the format by itself. head: format of the vocabulary's matrices."""

    def quantized(name: str, matrix: Tensor) -> Tensor:
        kind = head if name in VOCABULARY else format
        return dequantize(quantize_blocks(matrix.roll(BLOCK // 2, 1), kind)).roll(-(BLOCK // 2), 1)

    ops = kernels.table("cpu", "cpu", threads)
    checkpoint = open_checkpoint(source, packed=False, codes=False)
    config = checkpoint.config
    loader = LayerLoader(checkpoint, ops, dtype=torch.float32, device="cpu", quantize=quantized)
    model = find_family(config.architecture, checkpoint.path).load(loader, config, config.max_position)
    return Runner(model, torch.float32, 2 * WINDOW)


def formats(source: ModelSource, threads: int, bits: int, every: bool) -> Iterator[tuple[str, Runner]]:
    """Each format as the engine runs it: quantised weights with a float16 cache, unless it says otherwise."""
    yield "packed (the file's own)", load(source, "auto", torch.float16, threads, bits)
    if every:
        yield "packed, KV cache fp8", load(source, "auto", torch.float8_e4m3fn, threads, bits)
        for kind in ("int8", "int4"):
            yield kind, load(source, "float32", torch.float16, threads, bits, quantize=kind)
        for format, head in (("q4_1", "q8_0"), ("q4_0", "q8_0"), ("q4_1", "q4_1")):
            name = f"int4, blocks moved: {format}, vocabulary {head}"
            yield name, blocks_moved(source, format, head, threads)  # type: ignore[arg-type]  # of the tuple above


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF model, by built-in name or path")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, 0 for all")
    parser.add_argument("--activation-bits", type=int, choices=(8, 16), default=8, help="of what meets packed weights")
    parser.add_argument("--formats", action="store_true", help="also quantised at load: int8, int4")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="how many of the questions to ask")
    options = parser.parse_args(argv)
    source = resolve(options.model)
    tokenizer = Tokenizer.load(source)
    ids = tokenizer.encode(TEXT.read_text("utf-8"))
    dense = load(source, "float32", torch.float32, options.threads)
    questions = QUESTIONS[: options.questions]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in questions]
    wanted = [dense.answer(prompt, ANSWER) for prompt in prompts]
    rows: list[results.Row] = []
    found: list[dict[str, object]] = []
    for name, runner in formats(source, options.threads, options.activation_bits, options.formats):
        text = compare_text(runner, dense, ids)
        given = [runner.answer(prompt, ANSWER) for prompt in prompts]
        prefixes = [equal_prefix(ours, theirs) for ours, theirs in zip(given, wanted, strict=True)]
        equal = sum(ours == theirs for ours, theirs in zip(given, wanted, strict=True))
        rows.append(
            {
                "weights": name,
                "perplexity": round(text.perplexity, 3),
                "float32's": round(text.perplexity_float32, 3),
                "same top": round(text.same_top, 4),
                "divergence, nats": float(f"{text.divergence:.3g}"),
                "equal answers": f"{equal} of {len(given)}",
                "equal tokens": round(sum(prefixes) / max(len(prefixes), 1), 1),
                "MiB": round(runner.weight_bytes / 2**20, 1),
            }
        )
        said = [
            {"question": question, "answer": tokenizer.decode(ours), "float32": tokenizer.decode(theirs), "equal": same}
            for question, ours, theirs, same in zip(questions, given, wanted, prefixes, strict=True)
        ]
        found.append({"weights": name, "teacher_forced": text, "answers": said})
    results.report(
        "formats_quality" if options.formats else "quality" if options.activation_bits == 8 else "quality_16bit",
        rows,
        {
            "model": source.name,
            "activation_bits": options.activation_bits,
            "text": TEXT.name,
            "summary": rows,
            "formats": found,
        },
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
