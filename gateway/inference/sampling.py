"""The sampling fields that chat and text completions share, and how they become SamplingParams."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.sampling_params import SamplingParams
from gateway.inference import errors
from gateway.inference.decode import FieldPolicy

MAX_N = 8
MAX_STOP = 4
INT64 = 2**63

Unit = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Positive = Annotated[int, Meta(ge=1, lt=2**31)]

_SERVER = "is set by the server and not accepted from clients"

POLICY = FieldPolicy(
    denied={
        "chat_template": "is not accepted: templates come with the model",
        "cache_salt": _SERVER,
        "kv_transfer_params": _SERVER,
        "mm_processor_kwargs": _SERVER,
        "media_io_kwargs": _SERVER,
        "priority": _SERVER,
        "request_id": _SERVER,
        "session_id": _SERVER,
        "stream_interval": _SERVER,
        "truncate_prompt_tokens": "is not accepted: it changes what is billed; shorten the prompt instead",
        "truncation_side": "is not accepted: it changes what is billed; shorten the prompt instead",
        "vllm_xargs": _SERVER,
    },
    inert={
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "allowed_token_ids": (),
        "bad_words": ([],),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
        "guided_choice": (),
        "guided_decoding_backend": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_whitespace_pattern": (),
        "include_reasoning": (True,),
        "length_penalty": (1, 1.0),
        "logprob_token_ids": (),
        "prompt_logprobs": (),
        "repetition_detection": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        "structured_outputs": (),
        "thinking_token_budget": (),
        "use_beam_search": (False,),
        "watermarking": (),
    },
)
"""Fields of other servers' dialects that the structs do not carry."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options` of both surfaces."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that chat and text completions have in common. None is the default of each."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    max_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Unit | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Unit | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    @property
    def include_usage(self) -> bool:
        """True when the client asked for the usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def check_sampling(request: Sampling) -> None:
    """Check what the types cannot say. Raises ApiError naming the field."""
    if request.n is not None and request.n > MAX_N:
        raise errors.invalid("n", f"Invalid value for 'n': {request.n} is over this server's limit of {MAX_N}.")
    if request.seed is not None and not -INT64 <= request.seed < INT64:
        raise errors.invalid("seed", "Invalid value for 'seed': it must fit a signed 64-bit integer.")
    options = request.stream_options
    if options is not None:
        if not request.stream:
            raise errors.invalid("stream_options", "'stream_options' is only allowed when 'stream' is true.")
        if options.include_obfuscation:
            raise errors.unsupported("stream_options.include_obfuscation", "is not available on this server")
        if options.continuous_usage_stats:
            raise errors.unsupported("stream_options.continuous_usage_stats", "is not available on this server")
    if request.logit_bias:
        logit_bias(request.logit_bias)
    if request.stop is not None:
        _check_stops(request.stop)


def _check_stops(asked: str | list[str]) -> None:
    stops = stop_strings(asked)
    if len(stops) > MAX_STOP:
        raise errors.invalid("stop", f"Invalid value for 'stop': at most {MAX_STOP} sequences, got {len(stops)}.")
    for index, stop in enumerate(stops):
        if not stop:
            where = "stop" if isinstance(asked, str) else f"stop[{index}]"
            raise errors.invalid(where, f"Invalid value for '{where}': a stop sequence must not be empty.")


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """`stop` as a tuple, whichever form it came in."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    """`logit_bias` with integer keys. Raises ApiError naming the key."""
    converted: dict[int, float] = {}
    for key, value in (bias or {}).items():
        where = f"logit_bias.{key[:20]}"
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise errors.invalid(where, f"Invalid key in 'logit_bias': {key[:20]!r} is not a token id.")
        if not -100 <= value <= 100:
            raise errors.invalid(where, f"Invalid value for '{where}': it must be between -100 and 100.")
        converted[int(key)] = value
    return converted


def check_vocabulary(request: Sampling, vocab_size: int) -> None:
    """Token ids in the request must exist in the model. Raises ApiError."""
    if request.logit_bias:
        _check_ids("logit_bias", logit_bias(request.logit_bias), vocab_size)
    if request.stop_token_ids:
        _check_ids("stop_token_ids", request.stop_token_ids, vocab_size)


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if token >= vocab_size:
            raise errors.invalid(
                field, f"Invalid value for '{field}': token id {token} is outside the vocabulary of {vocab_size}."
            )


def sampling_params(
    request: Sampling, max_tokens: int, logprobs: int | None, recommended: Mapping[str, float]
) -> SamplingParams:
    """What the engine is asked for; `recommended` holds where the request does not say. `max_tokens` is what is left
    after all limits. Raises ApiError.

    top_p 0 keeps only the most probable token, which the smallest positive mass does too; top_k -1 is another name of
    0.
    """
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise errors.invalid(
            "min_tokens", f"Invalid value for 'min_tokens': {min_tokens} is more than the {max_tokens} tokens allowed."
        )
    chosen: dict[str, Any] = dict(recommended)
    said = {
        "temperature": request.temperature,
        "top_p": request.top_p if request.top_p != 0 else 1e-9,
        "top_k": request.top_k if request.top_k != -1 else 0,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "ignore_eos": request.ignore_eos,
        "include_stop": request.include_stop_str_in_output,
        "skip_special_tokens": request.skip_special_tokens,
        "seed": request.seed,
    }
    for name, value in said.items():
        if value is not None:
            chosen[name] = value
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        logit_bias=logit_bias(request.logit_bias) if request.logit_bias else {},
        stop=stop_strings(request.stop) if request.stop else (),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=logprobs,
        **chosen,
    )
