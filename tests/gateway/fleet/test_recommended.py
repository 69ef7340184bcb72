"""The publisher's sampling settings are read where they make sense."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.sampling_params import SamplingParams
from engine.weights.sources import ModelSource
from gateway.fleet.recommended import recommended_sampling


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 5}',
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        (
            '{"do_sample": false, "temperature": 0.6, "repetition_penalty": 1.1}',
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ('{"temperature": null}', {}),
        ('{"temperature": 9}', {}),
        ('{"temperature": "hot"}', {}),
        ("[]", {}),
        ("{", {}),
        (None, {}),
    ],
    ids=str,
)
def test_a_folder_s_generation_config(tmp_path: Path, text: str | None, expected: dict[str, float]) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    found = recommended_sampling(ModelSource(tmp_path, "safetensors", "x"))
    assert found == expected
    msgspec.convert(dict(found), SamplingParams).verify()


def test_the_built_in_model_is_greedy() -> None:
    assert recommended_sampling(ModelSource(Path("x.gguf"), "gguf", "smollm2-135m")) == {"temperature": 0.0}
    assert recommended_sampling(ModelSource(Path("x.gguf"), "gguf", "other")) == {}
