"""How a model wants to be sampled when a request does not say: its publisher's recommendation.

A small model at the format's own default, temperature 1, rarely says anything sensible; its publisher knows better.
Folders carry the recommendation in generation_config.json; the built-in model's is here.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import orjson

from engine.sampling_params import SamplingParams
from engine.weights.sources import ModelSource

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
NONE: Mapping[str, float] = {}

# The card says temperature 0.2; but packed to four bits, asked for the capital of France, this model gives "The" 0.156
# and "L" 0.154 as the first token, and every second answer at 0.2 would ramble in French. Greedy, it says Paris.
_BUILTIN: dict[str, dict[str, float]] = {"smollm2-135m": {"temperature": 0.0}}


def recommended_sampling(source: ModelSource) -> Mapping[str, float]:
    """Sampling settings by SamplingParams' names; nothing where there is no recommendation or it makes no sense."""
    if source.kind == "gguf":
        return _BUILTIN.get(source.name, NONE)
    file = source.path / "generation_config.json"
    try:
        described = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return NONE
    if not isinstance(described, dict):
        return NONE
    found = {name: described[name] for name in FIELDS if described.get(name) is not None}
    if described.get("do_sample") is False:
        found = {"temperature": 0.0, **{k: v for k, v in found.items() if k == "repetition_penalty"}}
    try:
        msgspec.convert(found, SamplingParams).verify()
    except ValueError:
        return NONE
    return found
