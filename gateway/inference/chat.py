"""`POST /v1/chat/completions`: a conversation in, answers out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.answer import Delta
from engine.sampling_params import SamplingParams
from engine.tokenizer import TemplateError, Tokenizer
from engine.wire import TokenLogprobs
from gateway.inference import errors
from gateway.inference.sampling import sampling_params
from gateway.inference.schema import ChatRequest, parse_chat, template_messages
from gateway.inference.sinks import Collected
from gateway.inference.sse import ChatChunks
from gateway.inference.surface import check_generates, room_for_answer


class ChatAsk:
    """A parsed chat request."""

    def __init__(self, body: bytes) -> None:
        """Raises ApiError naming the field that is wrong."""
        self.request: ChatRequest
        self.request, self.ignored = parse_chat(body)
        self._messages = template_messages(self.request)

    @property
    def text_size(self) -> int:
        """Characters of all messages."""
        size = 0
        for message in self._messages:
            size += len(message["content"])
        return size

    def check(self, dimensions: int) -> None:
        """The model generates. Raises ApiError."""
        check_generates(self.request.model, "chat/completions", dimensions)

    def encode(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The conversation through the model's chat template; one prompt."""
        try:
            ids = tokenizer.encode_chat(self._messages)
        except TemplateError as error:
            raise errors.invalid("messages", f"The model's chat template refuses these messages: {error}") from error
        if not ids:
            raise errors.invalid("messages", "The messages have no content.")
        return [ids]

    def params(self, prompt_tokens: int, max_context: int, recommended: Mapping[str, float]) -> SamplingParams:
        """Sampling settings with the answer's limit."""
        request = self.request
        limit = room_for_answer(request.asked_max_tokens, prompt_tokens, max_context, "messages")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return sampling_params(request, limit, logprobs, recommended)

    def openings(self, tokenizer: Tokenizer) -> dict[int, str]:
        """Answers begin with nothing."""
        return {}

    def logprobs(self, tokenizer: Tokenizer, index: int, delta: Delta) -> dict[str, Any] | None:
        """`{"content": […], "refusal": null}`, one entry per token."""
        if delta.logprobs is None:
            return None
        return {"content": _entries(tokenizer, delta.token_ids, delta.logprobs), "refusal": None}

    def chunks(self, request_id: str, created: int) -> ChatChunks:
        """Events of `chat.completion.chunk`."""
        return ChatChunks(_id(request_id), created, self.request.model, self.request.include_usage)

    def body(
        self, request_id: str, created: int, choices: list[Collected], usage: dict[str, Any], tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """A `chat.completion` object."""
        rendered = []
        for index, choice in enumerate(choices):
            logprobs: dict[str, Any] | None = None
            if self.request.logprobs:
                content: list[dict[str, Any]] = []
                for delta in choice.deltas:
                    content += _entries(tokenizer, delta.token_ids, delta.logprobs or [])
                logprobs = {"content": content, "refusal": None}
            rendered.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": logprobs,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
            )
        answer: dict[str, Any] = {
            "id": _id(request_id),
            "object": "chat.completion",
            "created": created,
            "model": self.request.model,
            "choices": rendered,
            "usage": usage,
            "service_tier": "default",
            "system_fingerprint": None,
        }
        if self.request.metadata is not None:
            answer["metadata"] = self.request.metadata
        return answer


def _id(request_id: str) -> str:
    return "chatcmpl-" + request_id.replace("-", "")


def _entries(tokenizer: Tokenizer, ids: list[int], logprobs: list[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        {
            **_token(tokenizer, index, entry.logprob),
            "top_logprobs": [_token(tokenizer, other, logprob) for other, logprob in entry.top],
        }
        for index, entry in zip(ids, logprobs, strict=False)
    ]


def _token(tokenizer: Tokenizer, index: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(index)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}
