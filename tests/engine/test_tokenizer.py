"""Tokenizers against transformers' own: from a GGUF file's metadata and from a folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, trainers
from transformers import AutoTokenizer

from engine.tokenizer import LONG, Detokenizer, TemplateError, Tokenizer
from engine.weights.errors import WeightsError
from engine.weights.gguf_header import GGUFHeader
from engine.weights.sources import ModelSource

TEXT = Path(__file__).resolve().parents[2] / "benchmarks" / "text" / "the-mill.txt"
STRINGS = [
    "",
    "Hello, world!",
    "What is the capital of France?",
    "naïve café — “quotes” … Ünïcödé",
    "日本語のテキスト、中文文本，한국어",
    "مرحبا بالعالم שלום",
    "😀👩‍👩‍👧‍👦🇫🇷 emoji 🏳️‍🌈",
    "def f(x):\n    return [i ** x for i in range(10)]\n\n\n# done\t\tend",
    "a  b   c    d\n\n  e \t f",
    "trailing space ",
    "I'm you're HE'LL we've they'd",
    "<div class=\"x\">&amp;</div> {'json': [true, null]}",
    "https://example.org/path?query=value&other=thing#part",
    "<|im_start|>user\nhi<|im_end|>\n",
    "\r\n\r\n\x00\x07\u200b\u00a0",
]
DIGITS = ["2024", "in 2024, 3.14159 and 1,000,000", "x=42;y=-7", "½ ٣ 四 ²"]
# Numbers apart: transformers does not read from the file that this model's digits stand alone
plain_text = st.text(st.characters(exclude_categories=("Cs", "Nd", "Nl", "No")), max_size=60)
MESSAGES = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|> 2+2?"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": " c "},
    ],
]


@pytest.fixture(scope="module")
def ours(model_path: Path) -> Tokenizer:
    return Tokenizer.load(ModelSource(model_path, "gguf", "smollm2-135m"))


@pytest.fixture(scope="module")
def theirs(model_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_path.parent, gguf_file=model_path.name)


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folder")
    theirs.save_pretrained(path)
    return path


def test_gguf_ids_are_transformers_own(ours: Tokenizer, theirs: Any) -> None:
    text = TEXT.read_text()
    for string in [*STRINGS, *text.split("\n\n")]:
        if not any(char.isnumeric() for char in string):
            assert ours.encode(string) == theirs(string).input_ids, string
    assert ours.vocab_size == len(theirs)


def test_long_texts_are_encoded_as_short_ones_are(ours: Tokenizer, theirs: Any) -> None:
    long = "".join(char for char in "\n".join(STRINGS) * 4 + TEXT.read_text() if not char.isnumeric())
    assert len(long) > LONG
    assert ours.encode(long) == theirs(long).input_ids


@given(plain_text)
def test_gguf_ids_are_transformers_own_on_any_text(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    # Not always the text itself: this vocabulary has no token for some control characters and drops them
    assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)


@given(st.lists(st.integers(0, 49_151), max_size=30), st.booleans())
def test_decoding_any_ids_is_transformers_own(ours: Tokenizer, theirs: Any, ids: list[int], skip: bool) -> None:
    expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert ours.decode(ids, skip_special=skip) == expected


@given(st.lists(st.integers(0, 49_151), max_size=30), st.data())
def test_incremental_text_is_decoding_at_once(ours: Tokenizer, ids: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = Detokenizer(ours)
    assert detokenizer.push(ids[:cut]) + detokenizer.push(ids[cut:]) + detokenizer.finish() == ours.decode(ids)


@pytest.mark.parametrize("text", DIGITS)
def test_digits_stand_alone(ours: Tokenizer, text: str) -> None:
    ids = ours.encode(text)
    assert ours.decode(ids) == text
    for index in ids:
        digits = [char for char in ours.token_text(index) if char.isdigit()]
        assert len(digits) <= 1
        assert not digits or ours.token_text(index).strip() == digits[0] == ours.token_text(index)


def test_chat_is_transformers_own(ours: Tokenizer, theirs: Any) -> None:
    for messages in MESSAGES:
        for prompt in (True, False):
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert ours.render_chat(messages, prompt) == expected
    ids = ours.encode_chat(MESSAGES[0])
    assert ids == theirs.apply_chat_template(MESSAGES[0], add_generation_prompt=True, return_dict=True)["input_ids"]


def test_special_tokens(ours: Tokenizer) -> None:
    assert ours.eos_token_ids == (0, 2)
    assert ours.token_text(2) == "<|im_end|>"
    assert ours.is_special(2) and not ours.is_special(500)
    assert ours.decode([2, 504]) == "The"
    assert ours.decode([2, 504], skip_special=False) == "<|im_end|>The"
    assert (ours.token_bytes(504), ours.token_bytes(10**6)) == (b"The", b"")
    half = ours.encode("😀")[0]
    assert ours.token_text(half).endswith("�") and ours.token_bytes(half)[0] == 0xF0


def test_a_folder_is_transformers_own(folder: Path, theirs: Any) -> None:
    ours = Tokenizer.load(ModelSource(folder, "safetensors", "x"))
    for string in [*STRINGS, *DIGITS]:
        ids = theirs(string).input_ids
        assert ours.encode(string) == ids
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    for messages in MESSAGES:
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(messages) == expected


def test_a_folder_with_the_template_in_its_configuration(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "tokenizer.json", tmp_path)
    settings_file = tmp_path / "tokenizer_config.json"
    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ bos_token }}|{{ messages|length }}"},
    ]
    settings_file.write_text(json.dumps({"chat_template": named, "bos_token": {"content": "<s>"}}))
    assert Tokenizer.load(ModelSource(tmp_path, "safetensors", "x")).render_chat(MESSAGES[0]) == "<s>|1"
    settings_file.write_text(json.dumps({"chat_template": "plain"}))
    (tmp_path / "config.json").write_text('{"vocab_size": 50000}')
    plain = Tokenizer.load(ModelSource(tmp_path, "safetensors", "x"))
    assert plain.render_chat(MESSAGES[0]) == "plain"
    # Ids that only pad the model's matrix have no text
    assert plain.vocab_size == 50_000 and plain.decode([49_999]) == ""
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(ModelSource(tmp_path, "safetensors", "x")).render_chat(MESSAGES[0]) == "from the file"


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    source = ModelSource(tmp_path, "safetensors", "x")
    with pytest.raises(WeightsError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(source)
    (tmp_path / "tokenizer.json").write_text("[")
    with pytest.raises(WeightsError, match=r"tokenizer\.json: not valid JSON"):
        Tokenizer.load(source)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Magic"}}')
    with pytest.raises(WeightsError, match=r"tokenizer\.json: not a readable tokenizer"):
        Tokenizer.load(source)


def test_a_model_without_template_refuses_chat_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path / "m.gguf", "gpt-2"))
    assert not tokenizer.has_chat_template
    assert tokenizer.decode(tokenizer.encode("plain text")) == "plain text"
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer.render_chat(MESSAGES[0])


def write_tokenizer(file: Path, write: Callable[[gguf.GGUFWriter], None], size: int) -> ModelSource:
    """A GGUF file with a tokenizer and as little of a model as transformers accepts."""
    writer = gguf.GGUFWriter(file, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 1)
    write(writer)
    writer.add_tensor("token_embd.weight", np.zeros((size, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource(file, "gguf", "m")


def trained() -> tuple[list[str], list[str]]:
    """A small byte-level vocabulary with its merges, trained on English prose."""
    tokenizer = Backend(models.BPE())
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([*TEXT.read_text().split("\n"), "1 12 123 1234 the\n\n\n\nTHE"] * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return list(model["vocab"]), [" ".join(pair) for pair in model["merges"]]


def write_byte_level(file: Path, rule: str, **fields: bool) -> ModelSource:
    tokens, merges = trained()
    tokens = ["<s>", "</s>", *tokens, "<think>"]

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(rule)
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, *[1] * (len(tokens) - 3), 4])
        writer.add_token_merges(merges)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        for name, value in fields.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    return write_tokenizer(file, write, len(tokens))


@pytest.mark.parametrize("rule", ["gpt-2", "default", "llama-bpe", "qwen2", "tekken"])
def test_splitting_rules_are_transformers_own(rule: str, tmp_path: Path) -> None:
    source = write_byte_level(tmp_path / "m.gguf", rule, add_bos_token=False)
    ours, theirs = Tokenizer.load(source), AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in [*STRINGS, *DIGITS, "<think>1234567 </think>", "Mixed CASE text'S\r\n\r\n  end"]:
        if rule == "qwen2":
            text = unicodedata.normalize("NFC", text)
        assert ours.encode(text) == theirs(text).input_ids, text


def test_bos_is_added_as_the_file_or_the_family_says(tmp_path: Path) -> None:
    def starts(rule: str, **fields: bool) -> list[int]:
        return Tokenizer.load(write_byte_level(tmp_path / "m.gguf", rule, **fields)).encode("a")

    letter = starts("gpt-2")
    assert len(letter) == 1
    assert starts("llama-bpe") == [0, *letter]
    assert starts("llama-bpe", add_bos_token=False) == letter
    assert starts("gpt-2", add_bos_token=True, add_eos_token=True) == [0, *letter, 1]
    tokenizer = Tokenizer.load(write_byte_level(tmp_path / "m.gguf", "llama-bpe"))
    assert tokenizer.encode("a", add_special=False) == letter


def write_sentencepiece(file: Path, **fields: bool) -> ModelSource:
    tokenizer = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=special, show_progress=False, max_token_length=8)
    words = [f" {word}" for word in TEXT.read_text().split()]
    tokenizer.train_from_iterator(words, trainer)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        for name, value in fields.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    return write_tokenizer(file, write, len(tokens))


def test_sentencepiece_is_transformers_own(tmp_path: Path) -> None:
    source = write_sentencepiece(tmp_path / "m.gguf")
    ours, theirs = Tokenizer.load(source), AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in [*STRINGS, *DIGITS, *TEXT.read_text().split("\n\n")[:6]]:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        assert (
            ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text
        )


def test_sentencepiece_puts_a_space_before_every_text(tmp_path: Path) -> None:
    """As Llama 2's own tokenizer.json and llama.cpp do, also where the text begins with one."""
    ours = Tokenizer.load(write_sentencepiece(tmp_path / "m.gguf"))
    assert ours.token_text(ours.encode("the")[1]).startswith(" ")
    assert ours.decode(ours.encode(" the")) == " the"
    bare = Tokenizer.load(write_sentencepiece(tmp_path / "m.gguf", add_space_prefix=False))
    assert bare.decode(bare.encode("the")) == "the"
    assert not bare.token_text(bare.encode("the")[1]).startswith(" ")


@settings(max_examples=30)
@given(st.text(max_size=40))
def test_sentencepiece_round_trip(sentencepiece: Tokenizer, text: str) -> None:
    # U+2581 is how a space is written in these vocabularies
    text = text.replace("▁", "")
    assert sentencepiece.decode(sentencepiece.encode(text)) == text


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_sentencepiece(tmp_path_factory.mktemp("spm") / "m.gguf"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not supported"),
        ({"tokenizer.ggml.pre": "poro-chat"}, "'tokenizer.ggml.pre': 'poro-chat' is not supported"),
        ({"tokenizer.ggml.tokens": []}, "'tokenizer.ggml.tokens' is missing"),
        ({"tokenizer.ggml.merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"tokenizer.ggml.merges": ["one"]}, "'one' is not a pair"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "'tokenizer.ggml.merges'"),
        ({"tokenizer.ggml.bos_token_id": 10**6, "tokenizer.ggml.add_bos_token": True}, "1000000 is not a token"),
    ],
)
def test_gguf_tokenizers_that_cannot_be_built(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_byte_level(tmp_path / "m.gguf", "gpt-2")
    header = GGUFHeader.read(source.path)
    fields = {key: value for key, value in {**header.fields, **change}.items() if value is not None}
    monkeypatch.setattr(GGUFHeader, "read", lambda path: GGUFHeader(path, fields, header.tensors))
    with pytest.raises(WeightsError) as caught:
        Tokenizer.load(source)
    assert message in str(caught.value)
    assert str(source.path) in str(caught.value)


def test_torch_is_never_loaded() -> None:
    code = "import sys, engine.tokenizer, engine.detokenizer, engine.weights.sources; print('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "False"
