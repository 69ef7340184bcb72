"""Which tokens end an answer: what the files declare, and the end-of-turn markers of the chat formats among the
vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from engine.weights.errors import WeightsError
from engine.weights.gguf_header import GGUFHeader

END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<|end|>",
    "<end_of_turn>",
)
"""Control tokens that end a message or a text in the chat formats of the supported families."""


def read_json(file: Path) -> dict[str, Any]:
    """Parse a JSON object. Raises WeightsError naming the file."""
    try:
        value = orjson.loads(file.read_bytes())
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read: {error}") from error
    except orjson.JSONDecodeError as error:
        raise WeightsError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{file}: should hold a JSON object")
    return value


def declared_ids(value: object) -> set[int]:
    """Token ids of an eos_token_id field: an integer, a list of them, or nothing."""
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int) and not isinstance(item, bool)}


def gguf_stop_tokens(header: GGUFHeader) -> tuple[int, ...]:
    """Ids that end an answer of a GGUF model, ascending."""
    ids: set[int] = set()
    for key in ("eos", "eot", "eom"):
        value = header.get(f"tokenizer.ggml.{key}_token_id", int)
        if value is not None:
            ids.add(value)
    tokens = header.get_list("tokenizer.ggml.tokens", str) or []
    kinds = header.get_list("tokenizer.ggml.token_type", int) or []
    # 3 is a control token: the same text as an ordinary token ends nothing
    ids |= _markers((token, index) for index, (token, kind) in enumerate(zip(tokens, kinds)) if kind == 3)
    return tuple(sorted(ids))


def folder_stop_tokens(folder: Path) -> tuple[int, ...]:
    """Ids that end an answer of a model in a folder, ascending: the union of what its configuration files declare."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            ids |= declared_ids(read_json(folder / name).get("eos_token_id"))
    tokenizer = folder / "tokenizer.json"
    if tokenizer.exists():
        added = {
            entry["content"]: entry["id"]
            for entry in read_json(tokenizer).get("added_tokens", [])
            if entry.get("special")
        }
        ids |= _markers(added.items())
        named = token_text(_optional(folder / "tokenizer_config.json").get("eos_token"))
        if named in added:
            ids.add(added[named])
    return tuple(sorted(ids))


def token_text(value: object) -> str | None:
    """Text of a token in tokenizer_config.json, where it is a string or an object with "content"."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _markers(tokens: Iterable[tuple[str, int]]) -> set[int]:
    return {index for token, index in tokens if token in END_OF_TURN}
