"""The bytes behind every token id, read out of a tokenizer's own description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.weights.errors import WeightsError

_REPLACEMENT = "�"


class Vocabulary:
    """Token id → bytes, for text made of tokens. Ids that the model has but the tokenizer lacks are empty."""

    __slots__ = ("all_bytes", "plain_bytes", "special_ids", "strips_leading_space")

    def __init__(self, all_bytes: list[bytes], special_ids: frozenset[int], strips_leading_space: bool) -> None:
        """all_bytes: bytes of every id, special tokens included."""
        self.all_bytes = all_bytes
        self.special_ids = special_ids
        """Control tokens: not part of an answer's text"""
        self.plain_bytes = [b"" if index in special_ids else raw for index, raw in enumerate(all_bytes)]
        """The same with special tokens empty"""
        self.strips_leading_space = strips_leading_space
        """SentencePiece: the space that encoding puts before a text is taken off again"""


def read_vocabulary(description: Mapping[str, Any], file: object, size: int = 0) -> Vocabulary:
    """Build it from a parsed tokenizer.json; size is the model's own vocabulary. Raises WeightsError for a decoder
    other than byte-level or SentencePiece."""
    model, added = description.get("model") or {}, description.get("added_tokens") or []
    vocabulary: dict[str, int] = model.get("vocab") or {}
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise WeightsError(f"{file}: tokenizer model {model.get('type')!r} is not supported (supported: BPE)")
    kinds = _decoder_kinds(description.get("decoder"))
    ids = {**vocabulary, **{entry["content"]: entry["id"] for entry in added}}
    table = [b""] * max(size, max(ids.values()) + 1)
    if "ByteLevel" in kinds:
        to_byte = byte_alphabet()
        for token, index in ids.items():
            table[index] = _byte_level(token, to_byte)
    elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
        for token, index in vocabulary.items():
            table[index] = _sentencepiece(token)
        for entry in added:
            table[entry["id"]] = entry["content"].replace("▁", " ").encode()
    else:
        raise WeightsError(
            f"{file}: tokenizer decoder {sorted(kinds)} is not supported (supported: ByteLevel, ByteFallback)"
        )
    special = frozenset(entry["id"] for entry in added if entry.get("special"))
    return Vocabulary(table, special, bool(kinds & {"Strip", "Metaspace"}))


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character → the byte that it stands for.

    Printable Latin-1 characters stand for themselves; the other 68 bytes get the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _byte_level(token: str, to_byte: Mapping[str, int]) -> bytes:
    try:
        return bytes([to_byte[char] for char in token])
    except KeyError:
        # An added token is written as it is
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode()


def _decoder_kinds(decoder: Mapping[str, Any] | None) -> set[str]:
    if not decoder:
        return set()
    parts = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    return {str(part.get("type")) for part in parts or []}
