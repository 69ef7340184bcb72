"""Reads the header of a GGUF file: metadata and the table of tensors, checked against the file's size. No tensor data,
no torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The `gguf` package's
own reader makes one numpy view per array element, which takes seconds for a vocabulary, and answers a truncated file
with whatever numpy raises; this one takes tens of milliseconds and names the field that is wrong.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engine.weights.errors import WeightsError

GGUFValue = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]
_T = TypeVar("_T", int, float, bool, str)

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_MAX_DIMS = 4

TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
"""ggml type id → (name, elements per block, bytes per block) of the formats that can be read."""

_OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first (ggml writes the innermost first)."""
    format: str
    """Name of the storage format, a first member of TENSOR_TYPES' values."""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


class GGUFHeader:
    """Metadata and tensor table of one file."""

    __slots__ = ("fields", "path", "tensors")

    def __init__(self, path: Path, fields: dict[str, GGUFValue], tensors: dict[str, TensorInfo]) -> None:
        self.path = path
        self.fields = fields
        self.tensors = tensors

    @classmethod
    def read(cls, path: Path) -> GGUFHeader:
        """Parse and check the header. Raises WeightsError naming the file and the field or tensor that is wrong."""
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
        except ValueError as error:
            # mmap refuses an empty file with ValueError
            raise WeightsError(f"{path}: not a GGUF file: {error}") from error
        except OSError as error:
            raise WeightsError(f"{path}: cannot be read: {error}") from error

    def require(self, key: str, kind: type[_T]) -> _T:
        """Return a metadata value of the given type. Raises WeightsError when it is missing or of another type."""
        value = self.get(key, kind)
        if value is None:
            raise WeightsError(f"{self.path}: metadata field {key!r} is missing")
        return value

    def get(self, key: str, kind: type[_T]) -> _T | None:
        """Return a metadata value of the given type or None when it is missing. Raises WeightsError for another
        type."""
        value = self.fields.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            return kind(value)
        if type(value) is not kind:
            raise WeightsError(
                f"{self.path}: metadata field {key!r} should be of type {kind.__name__}, not {type(value).__name__}"
            )
        return value

    def get_list(self, key: str, kind: type[_T]) -> list[_T] | None:
        """Return a metadata array or None when it is missing. Raises WeightsError for another type."""
        value = self.fields.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or (value and type(value[0]) is not kind):
            raise WeightsError(f"{self.path}: metadata field {key!r} should be an array of {kind.__name__}")
        return value  # type: ignore[return-value]  # arrays have one element type, checked on the first


class _Reader:
    """A cursor over the file's bytes that never runs past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0
        self.what = "header"

    def fail(self, problem: str) -> WeightsError:
        return WeightsError(f"{self.path}: {self.what}: {problem}")

    def need(self, count: int) -> None:
        if self.at + count > self.size:
            raise self.fail(
                f"the file ends after {self.size} bytes, {self.at + count} needed: it is truncated or corrupt"
            )

    def scalar(self, code: str) -> int | float | bool:
        size = struct.calcsize("<" + code)
        self.need(size)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        assert isinstance(value, int | float | bool)
        return value

    def unsigned(self, code: str) -> int:
        return int(self.scalar(code))

    def string(self) -> str:
        length = self.unsigned("Q")
        self.need(length)
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        # The hot loop of the header: vocabularies have hundreds of thousands of entries
        data, size, at = self.data, self.size, self.at
        unpack = struct.Struct("<Q").unpack_from
        out: list[str] = []
        for _ in range(count):
            if at + 8 > size:
                break
            (length,) = unpack(data, at)
            at += 8
            if at + length > size:
                break
            out.append(data[at : at + length].decode("utf-8", errors="replace"))
            at += length
        self.at = at
        if len(out) != count:
            raise self.fail(f"the file ends within an array of {count} strings: it is truncated or corrupt")
        return out

    def value(self, kind: int) -> GGUFValue:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.fail(f"unknown value type {kind}: the file is corrupt")
        inner, count = self.unsigned("I"), self.unsigned("Q")
        if inner == _STRING:
            self.need(8 * count)
            return self.strings(count)
        if inner not in _SCALARS:
            raise self.fail(f"arrays of value type {inner} are not supported")
        code = _SCALARS[inner]
        size = struct.calcsize("<" + code) * count
        self.need(size)
        values = list(struct.unpack_from(f"<{count}{code}", self.data, self.at))
        self.at += size
        return values


def _parse(path: Path, data: mmap.mmap) -> GGUFHeader:
    reader = _Reader(path, data)
    if data[:4] != b"GGUF":
        raise WeightsError(f"{path}: not a GGUF file: it starts with {bytes(data[:4])!r} instead of b'GGUF'")
    reader.at = 4
    version = reader.unsigned("I")
    if version not in (2, 3):
        raise WeightsError(f"{path}: GGUF version {version} is not supported (2 and 3, little-endian, are)")
    tensor_count, field_count = reader.unsigned("Q"), reader.unsigned("Q")
    fields: dict[str, GGUFValue] = {}
    for index in range(field_count):
        reader.what = f"metadata field {index} of {field_count}"
        key = reader.string()
        reader.what = f"metadata field {key!r}"
        if key in fields:
            raise reader.fail("appears twice")
        fields[key] = reader.value(reader.unsigned("I"))
    infos: list[tuple[str, tuple[int, ...], int, int]] = []
    for index in range(tensor_count):
        reader.what = f"tensor {index} of {tensor_count}"
        name = reader.string()
        reader.what = f"tensor {name!r}"
        dims = reader.unsigned("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise reader.fail(f"{dims} dimensions: the file is corrupt")
        shape = tuple(reversed([reader.unsigned("Q") for _ in range(dims)]))
        infos.append((name, shape, reader.unsigned("I"), reader.unsigned("Q")))
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise WeightsError(f"{path}: metadata field 'general.alignment': {alignment!r} is not a power of two")
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise WeightsError(f"{path}: tensor {name!r}: appears twice")
        tensors[name] = _tensor_info(path, len(data), name, shape, kind, start + offset)
    return GGUFHeader(path, fields, tensors)


def _tensor_info(path: Path, size: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
    if kind not in TENSOR_TYPES:
        known = ", ".join(entry[0] for entry in TENSOR_TYPES.values())
        named = _OTHER_TYPES.get(kind, f"type {kind}")
        raise WeightsError(f"{path}: tensor {name!r}: format {named} is not supported (supported: {known})")
    format, block, block_bytes = TENSOR_TYPES[kind]
    if shape[-1] % block:
        raise WeightsError(
            f"{path}: tensor {name!r}: rows of {shape[-1]} are not a multiple of {format}'s block of {block}"
        )
    elements = 1
    for dim in shape:
        elements *= dim
    nbytes = elements // block * block_bytes
    if offset + nbytes > size:
        ends = f"ends at byte {offset + nbytes} but the file has {size}"
        raise WeightsError(f"{path}: tensor {name!r}: {ends}: it is truncated or corrupt")
    return TensorInfo(name, shape, format, offset, nbytes)
