"""`POST /v1/embeddings`: texts or token ids in, a vector for each out. Each input is a metered request of its own,
whose answer has no tokens."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from engine.answer import Delta
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from gateway.inference import errors
from gateway.inference.decode import FieldPolicy, decode
from gateway.inference.sampling import POLICY, Count, Positive, Sampling
from gateway.inference.sinks import Collected
from gateway.inference.sse import Chunks, CompletionChunks

MAX_INPUTS = 2048
"""Most texts of one request."""

_POLICY = FieldPolicy(denied=POLICY.denied, inert={"add_special_tokens": (True,)})


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/embeddings`."""

    input: str | list[str | Count | list[Count]]
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    user: str | None = None


class EmbeddingAsk:
    """A parsed embedding request."""

    def __init__(self, body: bytes) -> None:
        """Raises ApiError naming the field that is wrong."""
        self.wanted: EmbeddingRequest
        self.wanted, self.ignored = decode(body, EmbeddingRequest, _POLICY)
        self.request = Sampling(model=self.wanted.model, user=self.wanted.user)
        self._inputs = _inputs(self.wanted.input)

    @property
    def text_size(self) -> int:
        """Characters of all inputs."""
        return sum(len(text) for text in self._inputs if isinstance(text, str))

    def check(self, dimensions: int) -> None:
        """The model's vectors have `dimensions` numbers, 0 for a model that has none. Raises ApiError."""
        asked = self.wanted.dimensions
        if not dimensions:
            raise errors.wrong_task(self.wanted.model, "embeddings", "it generates text and does not embed it")
        if asked is not None and asked > dimensions:
            raise errors.invalid(
                "dimensions", f"Invalid value for 'dimensions': {asked} is more than the {dimensions} of this model."
            )

    def encode(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Inputs as token ids; texts with the tokens that the model has before or behind them."""
        encoded: list[list[int]] = []
        for index, text in enumerate(self._inputs):
            ids = tokenizer.encode(text) if isinstance(text, str) else text
            for token in ids:
                if token >= tokenizer.vocab_size:
                    raise errors.invalid(
                        _where(index, self._inputs),
                        f"Token id {token} in '{_where(index, self._inputs)}' is outside the vocabulary of"
                        f" {tokenizer.vocab_size}.",
                    )
            encoded.append(ids)
        return encoded

    def params(self, prompt_tokens: int, max_context: int, recommended: Mapping[str, float]) -> SamplingParams:
        """One step more than the prompt, which gives the vector."""
        if prompt_tokens > max_context:
            raise errors.context_length_exceeded(max_context, prompt_tokens, None, "input")
        return SamplingParams(max_tokens=1, temperature=0.0)

    def openings(self, tokenizer: Tokenizer) -> dict[int, str]:
        """None: there is no text."""
        return {}

    def logprobs(self, tokenizer: Tokenizer, index: int, delta: Delta) -> dict[str, Any] | None:
        """None: there are no tokens."""
        return None

    def chunks(self, request_id: str, created: int) -> Chunks:
        """Never asked for: vectors are not streamed."""
        return CompletionChunks(request_id, created, self.wanted.model, False)

    def body(
        self, request_id: str, created: int, choices: list[Collected], usage: dict[str, Any], tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """A list of `embedding` objects in the order of the inputs."""
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._render(choice.vector)}
                for index, choice in enumerate(choices)
            ],
            "model": self.wanted.model,
            "usage": {
                "prompt_tokens": usage["prompt_tokens"],
                "total_tokens": usage["total_tokens"],
                "prompt_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
            },
        }

    def _render(self, vector: bytes | None) -> str | orjson.Fragment:
        if vector is None:  # an engine that forgot it: the same request was sent to it twice
            raise errors.internal()
        if self.wanted.dimensions is not None:
            vector = shortened(vector, self.wanted.dimensions)
        if self.wanted.encoding_format == "base64":
            return base64.b64encode(vector).decode("ascii")
        # In pieces: one that writes millions of numbers at once lets nobody else run.
        return orjson.Fragment(orjson.dumps(_numbers(vector).tolist()))


def shortened(vector: bytes, dimensions: int) -> bytes:
    """The first numbers of a vector float32, stretched to the length of the whole."""
    numbers = _numbers(vector)
    kept = numbers[:dimensions]
    whole, part = math.hypot(*numbers), math.hypot(*kept)
    if len(kept) == len(numbers) or part == 0.0:
        return kept.tobytes()
    return array("f", (number * (whole / part) for number in kept)).tobytes()


def _numbers(vector: bytes) -> array[float]:
    numbers = array("f")
    numbers.frombytes(vector)
    return numbers


def _inputs(given: str | list[Any]) -> list[str | list[int]]:
    """The four forms of `input`: text, texts, token ids, lists of token ids. Raises ApiError for a mixture, for too
    many, and for empty ones."""
    if isinstance(given, str):
        inputs: list[str | list[int]] = [given]
    else:
        kinds = {type(entry) for entry in given}
        if len(kinds) > 1:
            raise errors.invalid("input", "'input' must hold only strings, only token ids, or only lists of token ids.")
        inputs = [given] if kinds <= {int} else list(given)
    if len(inputs) > MAX_INPUTS:
        raise errors.invalid("input", f"'input' has {len(inputs)} entries, over the limit of {MAX_INPUTS}.")
    for index, text in enumerate(inputs):
        if not text:
            where = _where(index, inputs)
            raise errors.invalid(where, f"Invalid value for '{where}': it must not be empty.")
    return inputs


def _where(index: int, inputs: list[str | list[int]]) -> str:
    return "input" if len(inputs) == 1 else f"input[{index}]"
