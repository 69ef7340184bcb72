"""`POST /v1/completions`: text or token ids in, continuations out. Each prompt is a metered request of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from engine.answer import Delta
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from gateway.inference import errors
from gateway.inference.decode import decode
from gateway.inference.sampling import POLICY, Count, Sampling, check_sampling, sampling_params
from gateway.inference.sinks import Collected
from gateway.inference.sse import CompletionChunks
from gateway.inference.surface import check_generates, room_for_answer

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5
MAX_CHOICES = 128
"""Most prompts times n in one request."""


class CompletionRequest(Sampling, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | Annotated[list[str | Count | list[Count]], Meta(min_length=1)]
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: str | None = None


def parse_completion(body: bytes) -> tuple[CompletionRequest, tuple[str, ...]]:
    """Decode and check a completion body; also returns the ignored fields. Raises ApiError naming the field."""
    request, ignored = decode(body, CompletionRequest, POLICY)
    check_sampling(request)
    n = request.n or 1
    if request.suffix:
        raise errors.unsupported("suffix", "is not available on this server")
    if request.best_of is not None:
        if request.best_of < n:
            raise errors.invalid("best_of", f"'best_of' ({request.best_of}) must not be less than 'n' ({n}).")
        if request.best_of > n:
            raise errors.unsupported("best_of", "is available only where it equals 'n'")
    if request.echo and request.logprobs is not None:
        raise errors.unsupported("echo", "is not available together with 'logprobs'")
    return request, ignored


class CompletionAsk:
    """A parsed completion request."""

    def __init__(self, body: bytes) -> None:
        """Raises ApiError naming the field that is wrong."""
        self.request: CompletionRequest
        self.request, self.ignored = parse_completion(body)
        self._prompts = _prompts(self.request.prompt)
        choices = len(self._prompts) * (self.request.n or 1)
        if choices > MAX_CHOICES:
            raise errors.invalid("prompt", f"{choices} choices are over this server's limit of {MAX_CHOICES}.")
        self._offsets: dict[int, int] = {}

    @property
    def text_size(self) -> int:
        """Characters of all prompts."""
        return sum(len(prompt) for prompt in self._prompts if isinstance(prompt, str))

    def check(self, dimensions: int) -> None:
        """The model generates. Raises ApiError."""
        check_generates(self.request.model, "completions", dimensions)

    def encode(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Prompts as token ids."""
        encoded: list[list[int]] = []
        for index, prompt in enumerate(self._prompts):
            where = "prompt" if len(self._prompts) == 1 else f"prompt[{index}]"
            ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            if not ids:
                raise errors.invalid(where, f"Invalid value for '{where}': it must not be empty.")
            for token in ids:
                if token >= tokenizer.vocab_size:
                    raise errors.invalid(
                        where, f"Token id {token} in '{where}' is outside the vocabulary of {tokenizer.vocab_size}."
                    )
            encoded.append(ids)
        return encoded

    def params(self, prompt_tokens: int, max_context: int, recommended: Mapping[str, float]) -> SamplingParams:
        """Sampling settings with the answer's limit, 16 tokens where none was asked for."""
        request = self.request
        asked = request.max_tokens
        if asked is None:
            asked = max(1, min(DEFAULT_MAX_TOKENS, max_context - prompt_tokens))
        limit = room_for_answer(asked, prompt_tokens, max_context, "prompt")
        return sampling_params(request, limit, request.logprobs, recommended)

    def openings(self, tokenizer: Tokenizer) -> dict[int, str]:
        """With `echo`, each choice begins with its prompt."""
        if not self.request.echo:
            return {}
        n = self.request.n or 1
        texts = [
            prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special=False)
            for prompt in self._prompts
        ]
        return {index * n + choice: text for index, text in enumerate(texts) for choice in range(n)}

    def logprobs(self, tokenizer: Tokenizer, index: int, delta: Delta) -> dict[str, Any] | None:
        """Parallel lists over the delta's tokens; offsets go on from the choice's earlier deltas."""
        if delta.logprobs is None:
            return None
        offset = self._offsets.get(index, 0)
        tokens: list[str] = []
        offsets: list[int] = []
        for token in delta.token_ids:
            tokens.append(tokenizer.token_text(token))
            offsets.append(offset)
            offset += len(tokens[-1])
        self._offsets[index] = offset
        top = None
        if self.request.logprobs:
            top = [
                {tokenizer.token_text(other): logprob for other, logprob in (*entry.top, (token, entry.logprob))}
                for token, entry in zip(delta.token_ids, delta.logprobs, strict=False)
            ]
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in delta.logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def chunks(self, request_id: str, created: int) -> CompletionChunks:
        """Events of `text_completion`."""
        return CompletionChunks(_id(request_id), created, self.request.model, self.request.include_usage)

    def body(
        self, request_id: str, created: int, choices: list[Collected], usage: dict[str, Any], tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """A `text_completion` object."""
        rendered = []
        for index, choice in enumerate(choices):
            logprobs: dict[str, Any] | None = None
            for delta in choice.deltas:
                more = self.logprobs(tokenizer, index, delta)
                if logprobs is None or more is None:
                    logprobs = more
                else:
                    for name, values in more.items():
                        if values is not None:
                            logprobs[name] += values
            rendered.append(
                {
                    "index": index,
                    "text": choice.text,
                    "logprobs": logprobs,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
            )
        return {
            "id": _id(request_id),
            "object": "text_completion",
            "created": created,
            "model": self.request.model,
            "choices": rendered,
            "usage": usage,
            "system_fingerprint": None,
        }


def _id(request_id: str) -> str:
    return "cmpl-" + request_id.replace("-", "")


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """The four forms of `prompt`: text, texts, token ids, lists of token ids. Raises ApiError for a mixture."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(entry) for entry in prompt}
    if len(kinds) > 1:
        raise errors.invalid("prompt", "'prompt' must hold only strings, only token ids, or only lists of token ids.")
    return [prompt] if kinds == {int} else list(prompt)
