"""Folders with safetensors: one file or shards with an index, and config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.config import Shapes
from engine.models.family import config_from_json, tensor_shapes
from engine.weights.checkpoint import check_shapes
from engine.weights.errors import WeightsError
from engine.weights.stop_tokens import folder_stop_tokens, read_json

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TYPES = ("F32", "F16", "BF16")


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

    def __init__(self, folder: Path) -> None:
        """Open the folder and check every header. Raises WeightsError naming the file and the field or tensor that is
        wrong."""
        config_file = folder / "config.json"
        if not config_file.exists():
            raise WeightsError(f"{config_file}: no such file; a folder with safetensors needs it")
        self.path = folder
        config = config_from_json(config_file, read_json(config_file), folder_stop_tokens(folder))
        self._file_of = _tensor_files(folder)
        self._handles: dict[Path, _OpenFile] = {}
        shapes: Shapes = {}
        needed = tensor_shapes(config, config_file)
        for name, file in self._file_of.items():
            if name in needed:
                shapes[name] = self._shape(file, name)
        check_shapes(folder, needed, shapes)
        self.config = config

    def get(self, name: str) -> Tensor:
        """Return a tensor in the type it is stored in. Raises WeightsError naming file and tensor."""
        file = self._file_of.get(name)
        if file is None:
            raise WeightsError(f"{self.path}: tensor {name!r} is missing")
        try:
            return self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(f"{file}: tensor {name!r}: cannot be read: {error}") from error

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
