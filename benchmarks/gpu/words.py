"""A vocabulary in which every token is a word: text of n words is n tokens, and every token of an answer is seen.

Token i is a space and a made-up word of consonants and vowels; the last two ids are control tokens. The pre-tokenizer
cuts text at spaces, and a piece that the vocabulary holds is one token without any merge.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

CONSONANTS, VOWELS = "bcdfghjklmnprstv", "aeio"
SYLLABLES = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
SPECIALS = ("<|begin|>", "<|end|>")
SPACE = "\u0120"
"""What stands for a space in the names of byte-level tokens"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A conversation is its messages' texts, so that a prompt has exactly as many tokens as its message has words."""


def words(vocab_size: int) -> int:
    """How many ids of a vocabulary are words: the first ones."""
    return vocab_size - len(SPECIALS)


def word(index: int) -> str:
    """The word of a token id, without its space."""
    text = SYLLABLES[index % len(SYLLABLES)]
    while index := index // len(SYLLABLES):
        text = SYLLABLES[index % len(SYLLABLES)] + text
    return text


def text_of(ids: Sequence[int]) -> str:
    """Text that is encoded as exactly these ids, all of them words."""
    return "".join(f" {word(index)}" for index in ids)


def count_words(text: str) -> int:
    """Tokens in a piece of an answer: each begins with the only space that it has."""
    return text.count(" ")


def end_id(vocab_size: int) -> int:
    """The id that ends an answer."""
    return vocab_size - 1


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json of a vocabulary of this size."""
    count = words(vocab_size)
    vocabulary = {SPACE + word(index): index for index in range(count)}
    if len(vocabulary) != count:
        raise ValueError(f"{count} ids have only {len(vocabulary)} words")
    added = [
        {
            "id": count + place, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for place, content in enumerate(SPECIALS)
    ]  # fmt: skip
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": bytes_,
        "post_processor": None,
        "decoder": bytes_,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(description, ensure_ascii=False), "utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
