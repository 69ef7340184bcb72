"""`headrace serve` with two real models on this CPU: moved about under load, and no request is dropped."""

from __future__ import annotations

import json
import shutil
import threading
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.weights.sources import ModelSource
from tests.gateway.test_serve import Process, free_port

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


def tiny(folder: Path, tokenizer: Path, seed: int) -> Path:
    """A model of random weights with the byte tokenizer."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=258, num_key_value_heads=1, head_dim=64, max_position_embeddings=256, eos_token_id=257, **shape
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    return folder


@pytest.mark.slow
def test_two_models_are_moved_about_under_load_and_no_request_is_dropped(
    tmp_path: Path, tiny_model: ModelSource
) -> None:
    folders = [tiny(tmp_path / name, tiny_model.path, seed) for seed, name in enumerate(("one", "two"))]
    options = ("--model", str(folders[1]), "--kv-memory-mib", "16", "--threads", "1", "--wake-s", "120")
    process = Process(tmp_path / "data", str(folders[0]), free_port(), options)
    address = f"http://127.0.0.1:{process.port}"
    try:
        process.until_said(f"Headrace serves one, two at {address}")
        key = json.loads((tmp_path / "data" / "first-run.json").read_text())["api_key"]

        def move(path: str, model: str) -> dict[str, Any]:
            request = urllib.request.Request(
                f"{address}/v1/{path}",
                data=json.dumps({"model": model}).encode(),
                headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                moved: dict[str, Any] = json.load(answer)
            return moved

        with openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=180) as client:

            def ask(model: str) -> str:
                answer = client.chat.completions.create(
                    model=model, messages=HELLO, max_tokens=12, temperature=0.0, extra_body={"ignore_eos": True}
                )
                assert answer.usage is not None and answer.usage.completion_tokens == 12
                return answer.choices[0].message.content or ""

            expected = {model: ask(model) for model in ("one", "two")}
            assert expected["one"] != expected["two"]
            woken: list[float] = []
            for model in ("one", "two"):
                assert move("sleep_model", model)["state"] == "asleep"
                assert ask(model) == expected[model]
                woken.append(move("load_model", model)["woke_in_s"])
            assert max(woken) < 1.0
            over = threading.Event()
            answers: list[tuple[str, str]] = []
            failures: list[BaseException] = []

            def hammer(model: str) -> None:
                while not over.is_set():
                    try:
                        answers.append((model, ask(model)))
                    except BaseException as error:
                        failures.append(error)
                        return

            asking = [threading.Thread(target=hammer, args=(model,)) for model in ("one", "two") for _ in range(2)]
            for thread in asking:
                thread.start()
            for path in ("sleep_model", "unload_model", "sleep_model"):
                before = len(answers)
                assert move(path, "two")["id"] == "two"
                while sum(model == "two" for model, _ in answers[before:]) < 2 and not failures:
                    assert ask("one") == expected["one"]
            over.set()
            for thread in asking:
                thread.join(180)
            assert not failures
            assert {text for model, text in answers if model == "two"} == {expected["two"]}
            assert {text for model, text in answers if model == "one"} == {expected["one"]}
    finally:
        process.stop()
