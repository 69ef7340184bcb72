"""Where a model comes from: a built-in name, a GGUF file, a folder with safetensors, or a hub id. Nothing here loads
torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.weights.builtin import BUILTIN_MODELS, fetch_builtin
from engine.weights.errors import WeightsError

Progress = Callable[[str, int, int], None]
"""Called while a model is fetched with (what is fetched, bytes done, bytes in all or 0 where unknown)."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine's disk."""

    path: Path
    """The GGUF file, or the folder with safetensors and config.json"""
    kind: Literal["gguf", "safetensors"]
    name: str
    """Short name for people and for the API"""


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/headrace, or ~/.cache/headrace."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def resolve(model: str, cache_dir: Path | None = None, progress: Progress | None = None) -> ModelSource:
    """Find a model, fetching it into cache_dir when it is not there yet. Raises WeightsError with what to do about it.

    A built-in name wins over a path, a path over a hub id. Processes that fetch the same model at once wait for each
    other.
    """
    cache = cache_dir or default_cache_dir()
    if model in BUILTIN_MODELS:
        return ModelSource(fetch_builtin(BUILTIN_MODELS[model], cache, progress), "gguf", model)
    path = Path(model).expanduser()
    if path.exists():
        return _local(path)
    if model.startswith((".", "/", "~")) or path.suffix in (".gguf", ".safetensors"):
        raise WeightsError(f"{model}: no such file or folder")
    if _HUB_ID.fullmatch(model):
        return ModelSource(_from_hub(model, cache), "safetensors", model)
    raise WeightsError(
        f"{model!r} is not a model: give a built-in name ({', '.join(BUILTIN_MODELS)}), a .gguf file, "
        "a folder with safetensors, or a hub id such as org/name"
    )


def _local(path: Path) -> ModelSource:
    path = path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise WeightsError(f"{path}: a model file should be a .gguf; for safetensors give the folder")
        return ModelSource(path, "gguf", path.stem)
    if (path / "config.json").exists() and any(path.glob("*.safetensors*")):
        return ModelSource(path, "safetensors", path.name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(files[0], "gguf", files[0].stem)
    if files:
        raise WeightsError(f"{path}: several GGUF files, name one of them: {', '.join(file.name for file in files)}")
    raise WeightsError(f"{path}: neither config.json with *.safetensors nor a .gguf file is there")


def _from_hub(repo: str, cache: Path) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # It shows its own progress bars, and resumes and locks its own files
        folder = Path(snapshot_download(repo, cache_dir=cache / "hub", allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        # The hub's messages run over several lines; ours is one
        reason = " ".join(str(error).split())
        raise WeightsError(f"{repo}: cannot be fetched from the hub: {reason}") from error
    if not (folder / "config.json").exists() or not any(folder.glob("*.safetensors")):
        raise WeightsError(
            f"{repo}: the repository has no config.json with *.safetensors; for GGUF, download a file and name it"
        )
    return folder
