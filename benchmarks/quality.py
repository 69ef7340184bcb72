"""What running packed costs in quality: the default model's quantised blocks with integer products, against the same
weights made dense in float32.

Three measures. Perplexity of a fixed text, in windows of 512 tokens. Teacher-forced agreement on the same text: how
often both have the same most probable token, and the mean Kullback-Leibler divergence of the packed distribution from
the float32 one. Greedy agreement: answers of 64 tokens to fixed questions, how many are equal and for how many tokens
on average they are.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import kernels
from benchmarks.rig import results
from engine.batch import ForwardBatch, KVTensors
from engine.config import Dtype, EngineConfig
from engine.models.registry import CausalLM, load_model
from engine.tokenizer import Tokenizer
from engine.weights.sources import ModelSource, resolve

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


def load(source: ModelSource, dtype: Dtype, kv_dtype: torch.dtype, threads: int, activation_bits: int = 8) -> Runner:
    """Load the model with native CPU operations."""
    ops = kernels.table("cpu", "cpu", threads, activation_bits=activation_bits)
    model = load_model(source, EngineConfig(device="cpu", dtype=dtype, threads=threads), ops)
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF model, by built-in name or path")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, 0 for all")
    parser.add_argument("--activation-bits", type=int, choices=(8, 16), default=8, help="of what meets packed weights")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="how many of the questions to ask")
    options = parser.parse_args(argv)
    source = resolve(options.model)
    tokenizer = Tokenizer.load(source)
    # As the engine runs them: packed weights with a float16 cache, dense ones with a float32 cache
    packed = load(source, "auto", torch.float16, options.threads, options.activation_bits)
    dense = load(source, "float32", torch.float32, options.threads)
    text = compare_text(packed, dense, tokenizer.encode(TEXT.read_text("utf-8")))
    answers: list[dict[str, object]] = []
    for question in QUESTIONS[: options.questions]:
        prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
        ours, theirs = packed.answer(prompt, ANSWER), dense.answer(prompt, ANSWER)
        answers.append(
            {
                "question": question,
                "packed": tokenizer.decode(ours),
                "float32": tokenizer.decode(theirs),
                "equal": ours == theirs,
                "equal_prefix": equal_prefix(ours, theirs),
                "tokens": len(theirs),
            }
        )
    equal = sum(bool(entry["equal"]) for entry in answers)
    prefixes = [int(str(entry["equal_prefix"])) for entry in answers]
    rows: list[results.Row] = [
        {"measure": "perplexity, float32", "value": text.perplexity_float32},
        {"measure": "perplexity, packed", "value": text.perplexity},
        {"measure": "perplexity, packed over float32", "value": round(text.perplexity / text.perplexity_float32, 5)},
        {"measure": "same most probable token", "value": round(text.same_top, 4)},
        {"measure": "mean divergence, nats", "value": text.divergence},
        {"measure": f"equal greedy answers of {len(answers)}", "value": equal},
        {"measure": "mean equal greedy tokens", "value": sum(prefixes) / max(len(prefixes), 1)},
    ]
    results.report(
        "quality" if options.activation_bits == 8 else "quality_16bit",
        rows,
        {
            "model": source.name,
            "activation_bits": options.activation_bits,
            "text": TEXT.name,
            "teacher_forced": text,
            "answers": answers,
        },
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
