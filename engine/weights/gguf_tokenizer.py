"""Builds a tokenizer out of a GGUF file's metadata: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

The metadata says which vocabulary and merges a model has, and names how text is split before merging; the splitting
rules themselves are those of the models' own tokenizer.json files, as llama.cpp knows them (llama-vocab.cpp).
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.weights.errors import WeightsError
from engine.weights.gguf_header import GGUFHeader

_CONTROL = 3
_USER_DEFINED = 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,
    "tekken": _TEKKEN_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}
_DIGITS_FIRST = ("smollm", "starcoder", "refact", "command-r")
"""Digits are cut out one by one before GPT-2's own rule."""
_GPT2 = ("default", "gpt-2", "mpt", "olmo", "jais", "phi-2", "exaone")
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""A piece that is a token as it stands is not built by merges."""
_ADD_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""The default where the file does not say."""


def gguf_tokenizer(header: GGUFHeader) -> Tokenizer:
    """Return the tokenizer that the metadata describes. Raises WeightsError naming the file and the field."""
    tokens = header.get_list("tokenizer.ggml.tokens", str)
    if not tokens:
        raise WeightsError(f"{header.path}: metadata field 'tokenizer.ggml.tokens' is missing")
    kind = header.require("tokenizer.ggml.model", str)
    if kind == "gpt2":
        tokenizer, bos = _byte_level(header, tokens)
    elif kind == "llama":
        tokenizer, bos = _sentencepiece(header, tokens)
    else:
        raise WeightsError(f"{header.path}: tokenizer {kind!r} is not supported (supported: gpt2, llama)")
    _add_tokens(header, tokenizer, tokens)
    _add_ends(header, tokenizer, tokens, default_bos=bos)
    return tokenizer


def _byte_level(header: GGUFHeader, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """GPT-2's BPE over bytes; returns it and whether a text starts with BOS by default."""
    merges = header.get_list("tokenizer.ggml.merges", str)
    if merges is None:
        raise WeightsError(f"{header.path}: metadata field 'tokenizer.ggml.merges' is missing")
    pairs = [_pair(header, merge) for merge in merges]
    rule = header.get("tokenizer.ggml.pre", str) or "default"
    model = _model(header, tokens, pairs, ignore_merges=rule in _WHOLE_WORDS)
    tokenizer = Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule not in _SPLITS)
    if rule in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[rule]), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        if _SPLITS[rule] is _QWEN2_SPLIT:
            tokenizer.normalizer = normalizers.NFC()
    elif rule in _DIGITS_FIRST:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif rule in _GPT2:
        tokenizer.pre_tokenizer = byte_level
    else:
        known = ", ".join([*_SPLITS, *_DIGITS_FIRST, *_GPT2])
        raise WeightsError(
            f"{header.path}: metadata field 'tokenizer.ggml.pre': {rule!r} is not supported (supported: {known})"
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule in _ADD_BOS


def _sentencepiece(header: GGUFHeader, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE with byte fallback; the merges follow from the scores where the file has none."""
    merges = header.get_list("tokenizer.ggml.merges", str)
    if merges is not None:
        pairs = [_pair(header, merge) for merge in merges]
    else:
        scores = header.get_list("tokenizer.ggml.scores", float)
        if scores is None or len(scores) != len(tokens):
            raise WeightsError(
                f"{header.path}: metadata field 'tokenizer.ggml.scores' should have {len(tokens)} entries"
            )
        pairs = merges_from_scores(tokens, scores)
    unknown = header.get("tokenizer.ggml.unknown_token_id", int)
    unk = tokens[unknown] if unknown is not None and 0 <= unknown < len(tokens) else None
    tokenizer = Tokenizer(_model(header, tokens, pairs, unk=unk))
    prefix = header.get("tokenizer.ggml.add_space_prefix", bool)
    spaces = normalizers.Replace(" ", "▁")
    start: list[decoders.Decoder] = []
    if prefix is None or prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        start = [decoders.Strip(" ", 1, 0)]
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *start]
    )
    return tokenizer, True


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to build a token out of two others, best-scored tokens first: the order in which SentencePiece
    merges."""
    ids = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, score in zip(tokens, scores):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-score, ids[left], ids[right], (left, right)))
    found.sort(key=lambda entry: entry[:3])
    return [pair for *_, pair in found]


def _model(
    header: GGUFHeader,
    tokens: list[str],
    pairs: list[tuple[str, str]],
    *,
    unk: str | None = None,
    ignore_merges: bool = False,
) -> models.BPE:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    spm = unk is not None
    try:
        return models.BPE(
            vocab=vocabulary, merges=pairs, unk_token=unk, fuse_unk=spm, byte_fallback=spm, ignore_merges=ignore_merges
        )
    except Exception as error:  # what the library raises for a merge whose parts or result are not in the vocabulary
        raise WeightsError(f"{header.path}: metadata field 'tokenizer.ggml.merges': {error}") from error


def _pair(header: GGUFHeader, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or not left or not right:
        raise WeightsError(f"{header.path}: metadata field 'tokenizer.ggml.merges': {merge!r} is not a pair")
    return left, right


def _add_tokens(header: GGUFHeader, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Control tokens are special; user-defined ones are matched whole in the text as well."""
    kinds = header.get_list("tokenizer.ggml.token_type", int) or []
    control = [token for token, kind in zip(tokens, kinds) if kind == _CONTROL]
    defined = [token for token, kind in zip(tokens, kinds) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])


def _add_ends(header: GGUFHeader, tokenizer: Tokenizer, tokens: list[str], *, default_bos: bool) -> None:
    """Put BOS and EOS around a text where the file says so."""
    before = _end(header, tokens, "bos", default_bos)
    after = _end(header, tokens, "eos", False)
    if before or after:
        single = " ".join([*(token for token, _ in before), "$A", *(token for token, _ in after)])
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[*before, *after])


def _end(header: GGUFHeader, tokens: list[str], name: str, default: bool) -> list[tuple[str, int]]:
    wanted = header.get(f"tokenizer.ggml.add_{name}_token", bool)
    index = header.get(f"tokenizer.ggml.{name}_token_id", int)
    if not (default if wanted is None else wanted) or index is None:
        return []
    if not 0 <= index < len(tokens):
        raise WeightsError(f"{header.path}: metadata field 'tokenizer.ggml.{name}_token_id': {index} is not a token")
    return [(tokens[index], index)]
