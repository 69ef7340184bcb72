"""`headrace serve` with a real embedding model: transformers' hidden states through the real client, with money."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import Qwen3Config, Qwen3Model

from engine.weights.sources import ModelSource
from tests.gateway.test_serve import Process, free_port

TEXTS = ["the quick brown fox", "jumps", "over " * 60, "the quick brown fox jumps again"]
END = 257


@pytest.fixture
def embedder(tiny_model: ModelSource, tmp_path: Path) -> Path:
    """A folder as sentence-transformers saves it: its tokenizer puts an end behind every text."""
    folder = tmp_path / "embedder"
    model: Any = Qwen3Model(
        Qwen3Config(vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512)
    )  # fmt: skip
    model.save_pretrained(folder)
    backend = Tokenizer.from_file(str(tiny_model.path / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="$A <|im_end|>", special_tokens=[("<|im_end|>", END)])  # type: ignore[assignment]
    backend.save(str(folder / "tokenizer.json"))
    shutil.copy(tiny_model.path / "tokenizer_config.json", folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder


def expected(folder: Path) -> np.ndarray:
    backend, model = Tokenizer.from_file(str(folder / "tokenizer.json")), Qwen3Model.from_pretrained(folder)
    with torch.inference_mode():
        rows = [model(torch.tensor([backend.encode(text).ids])).last_hidden_state[0, -1] for text in TEXTS]
    return torch.nn.functional.normalize(torch.stack(rows)).numpy()


@pytest.mark.slow
def test_texts_are_embedded_and_paid_for(embedder: Path, tmp_path: Path) -> None:
    options = ("--device", "cpu", "--threads", "1", "--kv-memory-mib", "16", "--price-prompt", "2")
    made = Process(tmp_path / "data", str(embedder), free_port(), options)
    try:
        made.wait_ready()
        key = json.loads((tmp_path / "data" / "first-run.json").read_text())["api_key"]
        with openai.OpenAI(base_url=f"http://127.0.0.1:{made.port}/v1", api_key=key, max_retries=0) as client:
            raw = client.embeddings.with_raw_response.create(model="embedder", input=TEXTS)
            first = raw.parse()
            again = client.embeddings.create(model="embedder", input=TEXTS)
            with pytest.raises(openai.NotFoundError, match="not supported at /v1/completions"):
                client.completions.create(model="embedder", prompt="Hi")
        wanted = expected(embedder)
        for answer in (first, again):
            np.testing.assert_allclose([item.embedding for item in answer.data], wanted, atol=1e-5)
            assert answer.usage.prompt_tokens == sum(len(text) + 1 for text in TEXTS)
        assert again.usage.model_dump()["prompt_tokens_details"]["cached_tokens"] >= 16 * (len(TEXTS[2]) // 16)
        assert int(raw.headers["x-cost-nanousd"]) > 0
    finally:
        assert made.stop() == 0
