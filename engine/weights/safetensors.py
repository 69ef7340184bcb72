"""Folders with safetensors: one file or shards with an index, and config.json."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.config import Shapes
from engine.models.family import config_from_json, tensor_shapes
from engine.weights.checkpoint import check_shapes
from engine.weights.errors import WeightsError
from engine.weights.quantized import read_scheme
from engine.weights.stop_tokens import folder_stop_tokens, read_json
from kernels.interface import ScaledWeight
from kernels.scaled import dequantize_scaled

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TYPES = ("F32", "F16", "BF16")
_STEMS = ("model.", "", "language_model.model.", "model.language_model.")
"""What the names of a decoder's tensors begin with: a causal model, a decoder alone, and the text part of models that
see images, in two spellings."""


class _Slice(Protocol):
    """What safetensors knows of a tensor before it reads it; the library's own classes carry no types."""

    def get_dtype(self) -> str: ...
    def get_shape(self) -> list[int]: ...


class _OpenFile(Protocol):
    """An open safetensors file."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def get_slice(self, name: str) -> _Slice: ...


class SafetensorsCheckpoint:
    """A folder whose configuration and tensor headers have been checked."""

    def __init__(self, folder: Path, *, codes: bool = True) -> None:
        """Open the folder and check every header. codes: quantised matrices stay codes with scales; otherwise they come
        as float32. Raises WeightsError naming the file and the field or tensor that is wrong."""
        config_file = folder / "config.json"
        if not config_file.exists():
            raise WeightsError(f"{config_file}: no such file; a folder with safetensors needs it")
        self.path = folder
        data = read_json(config_file)
        config = config_from_json(config_file, data, folder_stop_tokens(folder))
        self._codes = codes
        self._scheme = read_scheme(config_file, data.get("quantization_config"))
        self.quantized = self._scheme.name if self._scheme else ""
        self._file_of = _tensor_files(folder)
        self._names = _plain_names(self._file_of)
        self._handles: dict[Path, _OpenFile] = {}
        needed = tensor_shapes(config, config_file)
        shapes: Shapes = {}
        if self._scheme is not None:
            found = {name: self._scheme.shape(self, name) for name in needed}
            shapes = {name: shape for name, shape in found.items() if shape is not None}
        for plain, name in self._names.items():
            if plain in needed and plain not in shapes:
                shapes[plain] = self._shape(self._file_of[name], name)
        check_shapes(folder, needed, shapes)
        self.config = config

    def get(self, name: str) -> Tensor | ScaledWeight:
        """Return a tensor, by the name it has in a causal model, in the type it is stored in, or a quantised matrix.
        Raises WeightsError naming file and tensor."""
        if self._scheme is None or self._scheme.shape(self, name) is None:
            return self.tensor(name)
        part = self._scheme.read(self, name)
        return part if self._codes else dequantize_scaled(part)

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored. Raises WeightsError naming file and tensor."""
        name = self._names.get(name, name)
        file = self._file_of.get(name)
        if file is None:
            raise WeightsError(f"{self.path}: tensor {name!r} is missing")
        try:
            return self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(f"{file}: tensor {name!r}: cannot be read: {error}") from error

    def header(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Type and shape of a tensor as stored, None where there is no such tensor. Raises WeightsError."""
        name = self._names.get(name, name)
        file = self._file_of.get(name)
        if file is None:
            return None
        try:
            view = self._open(file).get_slice(name)
        except SafetensorError as error:
            raise WeightsError(f"{file}: tensor {name!r}: {error}") from error
        return view.get_dtype(), tuple(view.get_shape())

    def wrong(self, name: str, what: str) -> WeightsError:
        """An error that names the tensor and the file it lies in, or the folder where it is missing."""
        name = self._names.get(name, name)
        return WeightsError(f"{self._file_of.get(name, self.path)}: tensor {name!r} {what}")

    def _shape(self, file: Path, name: str) -> tuple[int, ...]:
        try:
            view = self._open(file).get_slice(name)
        except SafetensorError as error:
            raise WeightsError(f"{file}: tensor {name!r}: {error}") from error
        if view.get_dtype() not in _TYPES:
            raise WeightsError(
                f"{file}: tensor {name!r}: type {view.get_dtype()} is not supported (supported: {', '.join(_TYPES)})"
            )
        return tuple(view.get_shape())

    def _open(self, file: Path) -> _OpenFile:
        handle = self._handles.get(file)
        if handle is None:
            handle = self._handles[file] = _open(file)
        return handle


def _open(file: Path) -> _OpenFile:
    try:
        # The library checks the header against the file's size here
        return cast(_OpenFile, safe_open(file, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file}: not a readable safetensors file: {error}") from error


def _plain_names(names: Iterable[str]) -> dict[str, str]:
    """Name as a causal model has it → name in the files."""
    found = list(names)
    stem = next((stem for stem in _STEMS if f"{stem}embed_tokens.weight" in found), "model.")
    if stem == "model.":
        return {name: name for name in found}
    head = f"{stem.removesuffix('model.')}lm_head." if stem.endswith(".model.") else "lm_head."
    plain = {f"model.{name.removeprefix(stem)}": name for name in found if name.startswith(stem)}
    return plain | {f"lm_head.{name.removeprefix(head)}": name for name in found if name.startswith(head)}


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name → the file it lies in."""
    index = folder / _INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
            raise WeightsError(f"{index}: field 'weight_map' should map tensor names to file names")
        files = {}
        for name, value in weight_map.items():
            if Path(value).name != value:
                raise WeightsError(f"{index}: field 'weight_map': {value!r} is not a plain file name")
            files[name] = folder / value
        return files
    single = folder / _SINGLE
    if not single.exists():
        found = sorted(folder.glob("*.safetensors"))
        if len(found) != 1:
            raise WeightsError(f"{folder}: neither {_SINGLE} nor {_INDEX} is there")
        single = found[0]
    return dict.fromkeys(_open(single).keys(), single)
