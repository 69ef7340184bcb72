"""Text to token ids and back, and conversations to prompts, from whatever files the model came in. Never loads
torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer as Backend

from engine.chat_template import ChatTemplate, TemplateError
from engine.detokenizer import Detokenizer
from engine.vocabulary import Vocabulary, read_vocabulary
from engine.weights.errors import WeightsError
from engine.weights.gguf_header import GGUFHeader
from engine.weights.gguf_tokenizer import gguf_tokenizer
from engine.weights.sources import ModelSource
from engine.weights.stop_tokens import folder_stop_tokens, gguf_stop_tokens, read_json, token_text

__all__ = ["Detokenizer", "TemplateError", "Tokenizer"]

# Of the library's own threads, which a batch of texts would start: a process that has them must not fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

LONG = 1_000
"""Characters from which on a text is encoded without keeping where each token came from: in 0.6 of the time."""
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads."""

    def __init__(
        self,
        backend: Backend,
        vocabulary: Vocabulary,
        eos_token_ids: tuple[int, ...],
        template: ChatTemplate | None,
    ) -> None:
        """template: None where the model has none; then chat is refused and plain completion works."""
        self._backend = backend
        self.vocabulary = vocabulary
        self.eos_token_ids = eos_token_ids
        """Every token that ends an answer, ascending"""
        self._template = template

    @classmethod
    def load(cls, source: ModelSource) -> Tokenizer:
        """Read the tokenizer and chat template of a model. Raises WeightsError naming file and field."""
        if source.kind == "gguf":
            return _from_gguf(source.path)
        return _from_folder(source.path)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id of the model."""
        return len(self.vocabulary.all_bytes)

    @property
    def has_chat_template(self) -> bool:
        """True when conversations can be rendered."""
        return self._template is not None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Text → ids. Special tokens written out in the text become their ids; add_special puts BOS in front where the
        model has it."""
        backend = self._backend
        if len(text) > LONG:
            encoding = backend.encode_batch_fast([text], add_special_tokens=add_special)[0]
        else:
            encoding = backend.encode(text, add_special_tokens=add_special)
        ids: list[int] = encoding.ids
        return ids

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: object
    ) -> str:
        """Conversation → prompt text by the model's chat template. Raises TemplateError."""
        if self._template is None:
            raise TemplateError("the model has no chat template; use plain completion")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: object
    ) -> list[int]:
        """Conversation → prompt ids. The template writes BOS itself, so none is added. Raises TemplateError."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables), add_special=False)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Ids → text; bytes that are no UTF-8 become U+FFFD. Raises IndexError for an id not in the vocabulary."""
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return detokenizer.push(ids) + detokenizer.finish()

    def token_bytes(self, index: int) -> bytes:
        """Bytes of one token, special ones included; empty for an id that the tokenizer does not know."""
        table = self.vocabulary.all_bytes
        return table[index] if 0 <= index < len(table) else b""

    def token_text(self, index: int) -> str:
        """Text of one token; bytes that are no UTF-8 on their own become U+FFFD."""
        return self.token_bytes(index).decode("utf-8", errors="replace")

    def is_special(self, index: int) -> bool:
        """True for control tokens, which are not part of an answer's text."""
        return index in self.vocabulary.special_ids


def _from_gguf(path: Path) -> Tokenizer:
    header = GGUFHeader.read(path)
    backend = gguf_tokenizer(header)
    source = header.get("tokenizer.chat_template", str)
    tokens = header.get_list("tokenizer.ggml.tokens", str) or []
    named: dict[str, str] = {}
    for name, key in zip(_NAMED, ("bos", "eos", "unknown", "padding")):
        index = header.get(f"tokenizer.ggml.{key}_token_id", int)
        if index is not None and 0 <= index < len(tokens):
            named[name] = tokens[index]
    vocabulary = read_vocabulary(orjson.loads(backend.to_str()), path, len(tokens))
    return Tokenizer(backend, vocabulary, gguf_stop_tokens(header), ChatTemplate(source, named) if source else None)


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise WeightsError(f"{file}: no such file; a tokenizer in another format cannot be read")
    description = read_json(file)
    try:
        backend = Backend.from_buffer(file.read_bytes())
    except ValueError as error:
        raise WeightsError(f"{file}: not a readable tokenizer: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    settings_file = folder / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.exists() else {}
    named = {name: text for name in _NAMED if (text := token_text(settings.get(name))) is not None}
    source = _template_source(folder, settings)
    template = ChatTemplate(source, named) if source else None
    # A model's vocabulary may be padded beyond its tokenizer's: such an id has no text, but it must not be an error
    model = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    padded = model.get("vocab_size")
    vocabulary = read_vocabulary(description, file, padded if isinstance(padded, int) else 0)
    return Tokenizer(backend, vocabulary, folder_stop_tokens(folder), template)


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or the template (or the one named "default") in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise WeightsError(f"{file}: cannot be read: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
