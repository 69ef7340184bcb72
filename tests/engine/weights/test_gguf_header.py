from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.weights.errors import WeightsError
from engine.weights.gguf import GGUFCheckpoint
from engine.weights.gguf_header import GGUFHeader

Write = Callable[..., dict[str, np.ndarray]]


def test_agrees_with_the_gguf_package(tmp_path: Path, gguf_file: Write) -> None:
    file = tmp_path / "m.gguf"
    gguf_file(
        file, "Q4_1", fields={"tokenizer.ggml.tokens": ["a", "ö", "😀"], "x.flag": True, "x.real": 0.5, "x.n": [1, -2]}
    )
    ours, theirs = GGUFHeader.read(file), gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.fields == fields
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.offset, info.nbytes, info.format) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type.name)


def test_every_truncation_is_a_clear_error(tmp_path: Path, gguf_file: Write) -> None:
    whole, cut = tmp_path / "m.gguf", tmp_path / "cut.gguf"
    gguf_file(whole, fields={"tokenizer.ggml.tokens": ["abc"] * 40, "x.numbers": list(range(50))})
    raw = whole.read_bytes()
    header = min(info.offset for info in GGUFHeader.read(whole).tensors.values())
    lengths = [*range(0, header, 3), *range(header, len(raw), len(raw) // 50), len(raw) - 1]
    for length in lengths:
        cut.write_bytes(raw[:length])
        with pytest.raises(WeightsError) as caught:
            GGUFCheckpoint(cut, packed=True)
        assert str(cut) in str(caught.value)


def test_flipped_bytes_never_escape_as_another_error(tmp_path: Path, gguf_file: Write) -> None:
    whole, broken = tmp_path / "m.gguf", tmp_path / "broken.gguf"
    gguf_file(whole, fields={"tokenizer.ggml.tokens": ["abc"] * 5})
    raw = whole.read_bytes()
    header = min(info.offset for info in GGUFHeader.read(whole).tensors.values())
    rng, refused = random.Random(7), 0
    started = time.perf_counter()
    for _ in range(400):
        data = bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(header)] = rng.randrange(256)
        broken.write_bytes(data)
        try:
            GGUFCheckpoint(broken, packed=True)
        except WeightsError as error:
            refused += 1
            assert str(broken) in str(error)
    assert refused > 200
    # No corrupt count makes the reader loop or allocate
    assert time.perf_counter() - started < 30


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 something else", "not a GGUF file: it starts with"),
        (b"GGUF" + struct.pack("<I", 1), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "is not supported (2 and 3, little-endian, are)"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "metadata field 0 of"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**60), "truncated or corrupt"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 77), "unknown value type 77"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**61),
            "metadata field 'k': the file ends",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sI", 1, b"t", 99), "tensor 't': 99 dimensions"),
    ],
)
def test_bad_headers(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        GGUFHeader.read(file)
    assert message in str(caught.value)


def test_duplicates_are_refused(tmp_path: Path) -> None:
    field = struct.pack("<Q1sII", 1, b"k", 4, 7)
    file = tmp_path / "twice.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + field * 2)
    with pytest.raises(WeightsError, match="'k': appears twice"):
        GGUFHeader.read(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"nowhere\.gguf: cannot be read"):
        GGUFHeader.read(tmp_path / "nowhere.gguf")


def test_typed_access(tmp_path: Path, gguf_file: Write) -> None:
    gguf_file(tmp_path / "m.gguf", fields={"x.text": "t", "x.words": ["a"], "x.whole": 3})
    header = GGUFHeader.read(tmp_path / "m.gguf")
    assert header.require("x.text", str) == "t"
    assert header.get("x.none", int) is None
    assert header.get("x.whole", float) == 3.0
    assert header.get_list("x.words", str) == ["a"]
    assert header.get_list("x.none", str) is None
    with pytest.raises(WeightsError, match="should be an array of int"):
        header.get_list("x.words", int)
    with pytest.raises(WeightsError, match="should be an array of str"):
        header.get_list("x.text", str)
