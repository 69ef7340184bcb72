"""Quantised safetensors: which of a checkpoint's matrices are stored as codes, and how they are read.

Every brand of checkpoint is brought to `kernels.interface.ScaledWeight` here, so that kernels know four formats and no
brands. A matrix counts as quantised where its codes are there, as dense where its weight is a float tensor: lists of
modules that were left alone (`modules_to_not_convert`, `ignore`) say in advance which must be dense.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from engine.weights.errors import WeightsError
from kernels.interface import ScaledWeight

FLOATS = ("F32", "F16", "BF16")
"""Types of dense tensors and of scales, as safetensors names them."""


class Stored(Protocol):
    """The tensors of an opened checkpoint, by their names in a causal model."""

    def header(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Type and shape, or None where there is no such tensor. Raises WeightsError."""
        ...

    def tensor(self, name: str) -> Tensor:
        """The tensor as stored. Raises WeightsError."""
        ...

    def wrong(self, name: str, what: str) -> WeightsError:
        """An error that names the file and the tensor."""
        ...


class Scheme(Protocol):
    """One way of storing quantised matrices."""

    name: str
    """In a word, for messages and the log"""

    def shape(self, stored: Stored, name: str) -> tuple[int, ...] | None:
        """Shape of the tensor that `name` stands for, from headers alone; None where it is not quantised. Raises
        WeightsError for codes and scales that do not fit."""
        ...

    def read(self, stored: Stored, name: str) -> ScaledWeight:
        """The matrix; a tensor of more dimensions as one, its last dimension the inputs. Raises WeightsError."""
        ...


class Settings:
    """quantization_config, or an object in it; every error names the file and the field."""

    def __init__(self, file: Path, data: dict[str, Any], path: str = "quantization_config") -> None:
        self.file = file
        self.data = data
        self.path = path

    def choice(self, key: str, allowed: Sequence[object], default: object = None) -> Any:
        """The field's value, one of `allowed`. Raises WeightsError."""
        value = self.data.get(key, default)
        value = default if value is None else value
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[list(allowed).index(value)], bool):
            known = ", ".join(repr(one) for one in allowed)
            raise self.wrong(key, f"is {value!r}, which is not supported (supported: {known})")
        return value

    def names(self, key: str) -> list[str]:
        """The field's list of names, empty where it is missing. Raises WeightsError."""
        value = self.data.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.wrong(key, f"should be a list of names, not {value!r}")
        for name in value:
            try:
                re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
            except re.error as error:
                raise self.wrong(key, f"has {name!r}, which is no regular expression: {error}") from error
        return value

    def inner(self, key: str) -> Settings:
        """The object in a field. Raises WeightsError where it is none."""
        value = self.data.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, f"should be an object, not {value!r}")
        return Settings(self.file, value, f"{self.path}.{key}")

    def refuse(self, *keys: str) -> None:
        """Raise WeightsError for a field that says anything."""
        for key in keys:
            if self.data.get(key):
                raise self.wrong(key, f"is {self.data[key]!r}, which is not supported")

    def wrong(self, key: str, what: str) -> WeightsError:
        """An error that names the file and the field."""
        return WeightsError(f"{self.file}: field '{self.path}.{key}' {what}")


def listed(module: str, names: Sequence[str]) -> bool:
    """Whether a list of modules names this one: in full, by its beginning or end at a dot, or by "re:" and a regular
    expression for its beginning."""
    for name in names:
        if name.startswith("re:"):
            if re.match(name[3:], module):
                return True
        elif module == name or module.startswith(f"{name}.") or module.endswith(f".{name}") or f".{name}." in module:
            return True
    return False


def module_of(name: str) -> str:
    """model.layers.0.mlp.up_proj.weight → model.layers.0.mlp.up_proj; other tensors as they are."""
    return name.removesuffix(".weight")


def expect(stored: Stored, name: str, types: Sequence[str], *shapes: tuple[int, ...]) -> None:
    """Raise WeightsError unless the tensor is there, of one of the types and shapes."""
    found = stored.header(name)
    if found is None:
        raise stored.wrong(name, "is missing")
    if found[0] not in types:
        raise stored.wrong(name, f"has type {found[0]}, should be {' or '.join(types)}")
    if found[1] not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise stored.wrong(name, f"has shape {list(found[1])}, should be {wanted}")


def read_scheme(file: Path, config: object) -> Scheme | None:
    """The scheme that a config.json's quantization_config asks for; None without one. Raises WeightsError naming the
    field that asks for what is not supported."""
    if not config:
        return None
    if not isinstance(config, dict):
        raise WeightsError(f"{file}: field 'quantization_config' should be an object, not {config!r}")
    settings = Settings(file, config)
    return _schemes()[settings.choice("quant_method", list(_schemes()))](settings)


def _schemes() -> dict[str, Callable[[Settings], Scheme]]:
    from engine.weights.quantized_compressed import CompressedScheme
    from engine.weights.quantized_fp8 import Fp8Scheme
    from engine.weights.quantized_mxfp4 import Mxfp4Scheme
    from engine.weights.quantized_packed import AwqScheme, GptqScheme

    return {
        "fp8": Fp8Scheme,
        "compressed-tensors": CompressedScheme,
        "gptq": GptqScheme,
        "awq": AwqScheme,
        "mxfp4": Mxfp4Scheme,
    }
