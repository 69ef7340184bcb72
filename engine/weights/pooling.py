"""How an embedding model makes one vector of a text's hidden states, from what lies beside its weights: the modules of
sentence-transformers, or GGUF's pooling_type."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from engine.weights.errors import WeightsError
from engine.weights.gguf_header import GGUFHeader
from engine.weights.sources import ModelSource
from engine.weights.stop_tokens import read_json

Pooling = Literal["last", "mean", "cls"]

_MODES: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_GGUF: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}


@dataclass(frozen=True, slots=True)
class Embedding:
    """From hidden states to a vector."""

    pooling: Pooling
    """The last token's state, the mean of all, or the first token's"""
    normalize: bool
    """Vectors have length 1"""


DEFAULT = Embedding("last", normalize=True)
"""For a decoder that does not say."""


def read_embedding(source: ModelSource) -> Embedding | None:
    """What the files say; None where they say nothing of embedding. Raises WeightsError naming file and field."""
    if source.kind == "gguf":
        header = GGUFHeader.read(source.path)
        kind = header.get(f"{header.require('general.architecture', str)}.pooling_type", int)
        if not kind:
            return None
        if kind not in _GGUF:
            raise WeightsError(f"{source.path}: pooling_type {kind} is not supported (supported: 1, 2, 3)")
        return Embedding(_GGUF[kind], normalize=True)
    file = source.path / "modules.json"
    return _modules(source.path, file) if file.exists() else None


def _modules(folder: Path, file: Path) -> Embedding:
    """Transformer, Pooling and, where vectors have length 1, Normalize; anything else is refused."""
    kinds: dict[str, str] = {}
    for module in _list(file):
        kind = str(module.get("type")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise WeightsError(
                f"{file}: module {kind or module!r} is not supported (supported: Transformer, Pooling, Normalize)"
            )
        kinds[kind] = str(module.get("path") or "")
    if "Pooling" not in kinds:
        raise WeightsError(f"{file}: there is no Pooling module")
    name = kinds["Pooling"]
    if Path(name).name != name:
        raise WeightsError(f"{file}: {name!r} is not a plain folder name")
    return Embedding(_mode(folder / name / "config.json"), normalize="Normalize" in kinds)


def _mode(file: Path) -> Pooling:
    settings = read_json(file)
    on = sorted(field for field, value in settings.items() if field.startswith("pooling_mode_") and value is True)
    if len(on) != 1 or on[0] not in _MODES:
        raise WeightsError(f"{file}: pooling by {' and '.join(on) or 'nothing'} is not supported ({', '.join(_MODES)})")
    return _MODES[on[0]]


def _list(file: Path) -> list[Any]:
    try:
        value = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise WeightsError(f"{file}: cannot be read: {error}") from error
    if not isinstance(value, list):
        raise WeightsError(f"{file}: should hold a list of modules")
    return value
