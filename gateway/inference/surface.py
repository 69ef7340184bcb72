"""What the pipeline needs to know of one wire format: a parsed request that can be tokenised and answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from engine.answer import Delta
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from gateway.inference import errors
from gateway.inference.sampling import Sampling
from gateway.inference.sinks import Collected
from gateway.inference.sse import Chunks


class Ask(Protocol):
    """One parsed request."""

    @property
    def request(self) -> Sampling:
        """The fields that all formats share."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Paths of unknown fields."""

    @property
    def text_size(self) -> int:
        """Characters to tokenise."""

    def check(self, dimensions: int) -> None:
        """The model can do this: `dimensions` are the numbers of its vectors, 0 for a model that generates. Raises
        ApiError."""

    def encode(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The prompts as token ids, each of which is answered `n` times. Raises ApiError."""

    def params(self, prompt_tokens: int, max_context: int, recommended: Mapping[str, float]) -> SamplingParams:
        """What to ask of the engine for a prompt of this length, as recommended where the request does not say.

        Raises ApiError.
        """

    def openings(self, tokenizer: Tokenizer) -> dict[int, str]:
        """Text that choices begin with."""

    def logprobs(self, tokenizer: Tokenizer, index: int, delta: Delta) -> dict[str, Any] | None:
        """The rendered log-probabilities of a delta."""

    def chunks(self, request_id: str, created: int) -> Chunks:
        """The renderer of an event stream."""

    def body(
        self, request_id: str, created: int, choices: list[Collected], usage: dict[str, Any], tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """The whole answer."""


def check_generates(model: str, route: str, dimensions: int) -> None:
    """Raise ApiError for a model that embeds."""
    if dimensions:
        raise errors.wrong_task(model, route, "it embeds text (POST /v1/embeddings) and does not generate it")


def room_for_answer(asked: int | None, prompt_tokens: int, max_context: int, param: str) -> int:
    """How many tokens may be generated: what was asked for, or all that is left of the context. Raises ApiError."""
    left = max_context - prompt_tokens
    if asked is not None and asked > left:
        raise errors.context_length_exceeded(max_context, prompt_tokens, asked, param)
    if left < 1:
        raise errors.context_length_exceeded(max_context, prompt_tokens, None, param)
    return left if asked is None else asked
