"""The body of a chat completion: every field of the current format, typed, and what is refused until it acts.

A field that does not act is accepted at the value that asks for nothing and refused with `unsupported_parameter`
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.inference import errors
from gateway.inference.decode import decode
from gateway.inference.sampling import POLICY, Positive, Sampling, check_sampling

MAX_MESSAGES = 4096

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Level = Literal["low", "medium", "high"]


class _Closed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of nested objects: an unknown field is noticed."""


class CacheBreakpoint(_Closed):
    """`prompt_cache_breakpoint` of a content part."""

    mode: Literal["explicit"]


class TextPart(_Closed, tag_field="type", tag="text"):
    """A piece of text."""

    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class RefusalPart(_Closed, tag_field="type", tag="refusal"):
    """A refusal that the assistant gave earlier."""

    refusal: str


class ImageUrl(_Closed):
    """Where an image is."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(_Closed, tag_field="type", tag="image_url"):
    """An image."""

    image_url: ImageUrl
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputAudio(_Closed):
    """Encoded sound."""

    data: str
    format: Literal["wav", "mp3"]


class AudioPart(_Closed, tag_field="type", tag="input_audio"):
    """Sound."""

    input_audio: InputAudio
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class FileSource(_Closed):
    """A file by content or id."""

    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None


class FilePart(_Closed, tag_field="type", tag="file"):
    """A file."""

    file: FileSource
    prompt_cache_breakpoint: CacheBreakpoint | None = None


Part = TextPart | RefusalPart | ImagePart | AudioPart | FilePart
Parts = Annotated[list[Part], Meta(min_length=1)]


class SystemMessage(_Closed, tag_field="role", tag="system"):
    """Instructions."""

    content: str | Parts
    name: str | None = None


class DeveloperMessage(_Closed, tag_field="role", tag="developer"):
    """Instructions, by their newer name."""

    content: str | Parts
    name: str | None = None


class UserMessage(_Closed, tag_field="role", tag="user"):
    """What the user says."""

    content: str | Parts
    name: str | None = None


class AssistantMessage(_Closed, tag_field="role", tag="assistant"):
    """An earlier answer, as the client got it back from us or from another server."""

    content: str | Parts | None = None
    refusal: str | None = None
    name: str | None = None
    audio: dict[str, Any] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: list[Any] | None = None


class ToolMessage(_Closed, tag_field="role", tag="tool"):
    """The result of a tool call."""

    content: str | Parts
    tool_call_id: str
    name: str | None = None


class FunctionMessage(_Closed, tag_field="role", tag="function"):
    """The result of a function call (the format before tools)."""

    content: str | None
    name: str


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


class FunctionDefinition(_Closed):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(_Closed, tag_field="type", tag="function"):
    """A tool with JSON arguments."""

    function: FunctionDefinition


class CustomDefinition(_Closed):
    """A tool with free-form input."""

    name: Name
    description: str | None = None
    format: dict[str, Any] | None = None


class CustomTool(_Closed, tag_field="type", tag="custom"):
    """A tool with text input."""

    custom: CustomDefinition


class TextFormat(_Closed, tag_field="type", tag="text"):
    """Plain text."""


class JsonObjectFormat(_Closed, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(_Closed):
    """A named JSON schema."""

    name: Name
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Closed, tag_field="type", tag="json_schema"):
    """JSON that follows a schema."""

    json_schema: JsonSchema


class Prediction(_Closed):
    """Predicted output."""

    type: Literal["content"]
    content: str | list[TextPart]


class AudioOutput(_Closed):
    """How spoken output would sound."""

    voice: str | dict[str, Any]
    format: Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"]


class WebSearch(_Closed):
    """Options of web search."""

    search_context_size: Level | None = None
    user_location: dict[str, Any] | None = None


class CacheOptions(_Closed):
    """How prompts are cached."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class ChatRequest(Sampling, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[FunctionTool | CustomTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionDefinition], Meta(max_length=128)] | None = None
    function_call: Literal["none", "auto"] | dict[str, Any] | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Level | None = None
    prediction: Prediction | None = None
    modalities: list[Literal["text", "audio"]] | None = None
    audio: AudioOutput | None = None
    moderation: dict[str, Any] | None = None
    web_search_options: WebSearch | None = None
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    safety_identifier: Annotated[str, Meta(max_length=64)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    prompt_cache_options: CacheOptions | None = None
    echo: Literal[False] | None = None

    @property
    def asked_max_tokens(self) -> int | None:
        """The answer's limit under either of its names."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


_HERE = "is not available on this server"
_INERT: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("tools", lambda v: not v, "is not available: this server does not call tools yet"),
    ("tool_choice", lambda v: v in ("none", "auto"), "asks for a tool call, which this server does not make yet"),
    ("functions", lambda v: not v, "is not available: this server does not call functions yet"),
    ("function_call", lambda v: v in ("none", "auto"), "asks for a function call, which this server does not make yet"),
    ("response_format", lambda v: isinstance(v, TextFormat), "is available with type 'text' only"),
    (
        "reasoning_effort",
        lambda v: v in ("none", "medium"),
        "has no effect on this model except at 'none' and 'medium'",
    ),
    ("verbosity", lambda v: v == "medium", "is available as 'medium' only"),
    ("prediction", lambda v: False, _HERE),
    ("modalities", lambda v: v == ["text"], "is available as ['text'] only"),
    ("audio", lambda v: False, _HERE),
    ("moderation", lambda v: False, _HERE),
    ("web_search_options", lambda v: False, _HERE),
    ("store", lambda v: v is False, "is not available: completions are not stored"),
    ("service_tier", lambda v: v in ("auto", "default"), "is available as 'auto' and 'default' only"),
    ("prompt_cache_retention", lambda v: v == "in_memory", "is available as 'in_memory' only"),
    ("prompt_cache_options", lambda v: v.mode != "explicit", "is available with mode 'implicit' only"),
)
"""Field, the values that ask for nothing (None aside), and why any other is refused."""


def parse_chat(body: bytes) -> tuple[ChatRequest, tuple[str, ...]]:
    """Decode and check a chat body.

    Also returns the paths of ignored unknown fields. Raises ApiError naming the field.
    """
    request, ignored = decode(body, ChatRequest, POLICY)
    check_sampling(request)
    for name, asks_nothing, why in _INERT:
        value = getattr(request, name)
        if value is not None and not asks_nothing(value):
            raise errors.unsupported(name, why)
    first, second = request.max_tokens, request.max_completion_tokens
    if first is not None and second is not None and first != second:
        raise errors.invalid(
            "max_tokens",
            f"'max_tokens' ({first}) and 'max_completion_tokens' ({second}) are the same setting; send one of them.",
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise errors.invalid("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
    for key in request.metadata or ():
        if len(key) > 64:
            raise errors.invalid(f"metadata.{key[:64]}", "A key of 'metadata' must be at most 64 characters long.")
    return request, ignored


def template_messages(request: ChatRequest) -> list[dict[str, Any]]:
    """Messages as chat templates read them: role, text content, and name or reasoning where given. Raises ApiError.

    Templates of the served families know no developer role: it is rendered as system, its older name. Text parts are
    joined with newlines.
    """
    rendered: list[dict[str, Any]] = []
    for index, message in enumerate(request.messages):
        where = f"messages[{index}]"
        if isinstance(message, ToolMessage | FunctionMessage):
            raise errors.unsupported(f"{where}.role", "names a tool result; this server does not call tools yet")
        role = str(message.__struct_config__.tag)
        plain: dict[str, Any] = {
            "role": "system" if role == "developer" else role,
            "content": _text(message.content, where),
        }
        if isinstance(message, AssistantMessage):
            _check_assistant(message, where)
            if message.content is None:
                plain["content"] = message.refusal
            reasoning = message.reasoning_content or message.reasoning
            if reasoning:
                plain["reasoning_content"] = reasoning
        if message.name is not None:
            plain["name"] = message.name
        rendered.append(plain)
    return rendered


def _check_assistant(message: AssistantMessage, where: str) -> None:
    for name, value in (
        ("tool_calls", message.tool_calls),
        ("function_call", message.function_call),
        ("audio", message.audio),
    ):
        if value:
            raise errors.unsupported(f"{where}.{name}", _HERE)
    if message.content is None and message.refusal is None:
        raise errors.missing(f"{where}.content")


def _text(content: str | list[Part] | None, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        spot = f"{where}.content[{index}]"
        if isinstance(part, RefusalPart):
            texts.append(part.refusal)
            continue
        if not isinstance(part, TextPart):
            raise errors.unsupported(f"{spot}.type", "names a kind of input that this model does not read")
        if part.prompt_cache_breakpoint is not None:
            raise errors.unsupported(f"{spot}.prompt_cache_breakpoint", _HERE)
        texts.append(part.text)
    return "\n".join(texts)
