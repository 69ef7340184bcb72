"""From a parsed request to its answer: admission, money, the engine, the response.

authenticate → parse → model → limits → tokenise → queue bound → hold → engine (while the hold is written) → first
byte once the hold is durable → … → settlement durable → the end of the answer. Every refusal on the way is an
ordinary HTTP error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from urllib.parse import quote

import msgspec
import orjson

from engine.generation import GenerateRequest
from engine.sampling_params import SamplingParams
from gateway.admission.capacity import OverloadedError
from gateway.admission.keymap import KeyMap, KeyState
from gateway.admission.spendings import Spendings
from gateway.admission.tab import Tab
from gateway.fleet.catalogue import Catalogue, Model
from gateway.fleet.deployment import NotNowError, Visit
from gateway.inference import errors, limits
from gateway.inference.answer import AT_ONCE, Answer
from gateway.inference.errors import ApiError
from gateway.inference.http import ClientGone, Exchange
from gateway.inference.outbox import Outbox
from gateway.inference.responses import respond_body, respond_stream
from gateway.inference.run import Run
from gateway.inference.sampling import check_vocabulary
from gateway.inference.sinks import BodySink, Sink, StreamSink
from gateway.inference.sse import Pace
from gateway.inference.surface import Ask
from gateway.inference.tabs import open_tabs
from gateway.metering.charge import Charge, InsufficientQuotaError, MeteringUnavailableError
from gateway.metering.meter import Meter
from gateway.telemetry import Telemetry
from marketplace.ledger.meters import PriceVersion


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one exchange."""

    body_bytes: int = 1024 * 1024
    body_timeout_s: float = 30.0
    flush_s: float = 0.05
    """Least time between two flushes of a stream."""
    slow_client_s: float = 60.0
    """A client that reads nothing for this long is cut off."""
    keep_alive_s: float = 15.0
    """A stream that has nothing to say for this long says so."""
    request_timeout_s: float = 600.0
    """A request that takes longer is ended at our cost."""
    inline_chars: int = 2_000
    """Prompts up to this many characters are tokenised on the event loop, longer ones in a thread."""
    quota_status: int = 429
    """Status of `insufficient_quota`."""


class Services(msgspec.Struct, kw_only=True):
    """What the inference surface works with."""

    keys: KeyMap
    catalogue: Catalogue
    meter: Meter
    telemetry: Telemetry
    limits: Limits
    threads: Executor
    new_id: Callable[[], str]
    clock: Callable[[], float] = time.monotonic
    """Seconds that never jump."""
    spendings: Spendings
    """What keys with a budget spent."""
    answers: set[Answer] = msgspec.field(default_factory=set)
    """Those that have not ended."""


async def authenticate(services: Services, exchange: Exchange) -> KeyState:
    """Name the caller. Raises ApiError (401)."""
    authorization: bytes | None = None
    x_api_key: bytes | None = None
    for name, value in exchange.scope["headers"]:
        if name == b"authorization" and authorization is None:
            authorization = value
        elif name == b"x-api-key" and x_api_key is None:
            x_api_key = value
    key = services.keys.authenticate(authorization, x_api_key)
    if key is None:
        key = await services.keys.recognise(authorization, x_api_key)
    if key is None:
        raise errors.invalid_api_key(exchange.credential())
    client = exchange.scope.get("client")
    if key.allowed_networks is not None and not key.may_come_from(client[0] if client else ""):
        raise ApiError(401, "Your IP address is not allowed to use this key.", code="ip_not_authorized")
    return key


async def answer(services: Services, exchange: Exchange, parse: Callable[[bytes], Ask]) -> None:
    """Serve one inference request. Raises ApiError while nothing was sent, ClientGone when nobody is there any more."""
    key = await authenticate(services, exchange)
    body = await exchange.body(services.limits.body_bytes, services.limits.body_timeout_s)
    try:
        ask = parse(body)
    except ApiError as error:
        coding = exchange.header(b"content-encoding")
        if error.code == "invalid_json" and coding not in ("", "identity"):
            raise errors.encoded(coding) from error
        raise
    if ask.ignored:
        name_ignored(exchange, ask.ignored)
    model = services.catalogue.find(ask.request.model)
    price = None if model is None else model.price
    if model is None or price is None or not key.may_use(model.name):
        raise errors.model_not_found(ask.request.model)
    now = round(services.clock() * 1e6)
    refused = key.limits.admit(now)
    allowance = key.limits.allowance(now)
    if allowance is not None:
        exchange.extra += limits.headers(allowance)
    if refused is not None:
        raise limits.refusal(refused)
    try:
        if not model.server.awake and await _cannot_pay(services, price, key):
            raise errors.insufficient_quota(services.limits.quota_status)  # for who cannot pay, nobody makes room
        visit = await visit_to(model)
    except BaseException:  # a caller who hung up, too, runs no longer
        key.limits.release()
        raise
    try:
        admitted = await _admit(services, exchange, ask, model, price, key)
    except BaseException:  # … and uses the model no longer
        visit.leave()
        key.limits.release()
        raise
    admitted.on_quiet(visit.leave)
    admitted.on_end(key.limits.release)
    exchange.extra.append((b"x-price-version", price.id.encode("ascii")))
    admitted.start()
    if isinstance(admitted.sink, StreamSink):
        await respond_stream(exchange, admitted, services.limits.slow_client_s, services.limits.keep_alive_s)
    else:
        created, tokenizer = admitted.created, model.tokenizer
        await respond_body(
            exchange,
            admitted,
            lambda sink, usage: orjson.dumps(ask.body(exchange.request_id, created, sink.choices, usage, tokenizer)),
            services.threads if model.dimensions else None,  # two thousand vectors take a second
        )


async def _cannot_pay(services: Services, price: PriceVersion, key: KeyState) -> bool:
    return any(msgspec.structs.astuple(price.price)) and await services.meter.penniless(key.account_id)


def name_ignored(exchange: Exchange, ignored: Iterable[str]) -> None:
    """Say in the answer which fields of the body were not known."""
    named = ",".join(quote(name[:80], safe="[]._-") for name in ignored)
    if named:
        exchange.extra.append((b"x-ignored-parameters", named.encode("ascii")))


async def visit_to(model: Model) -> Visit:
    """Begin to use a model, which is woken where it sleeps. Raises ApiError (503)."""
    try:
        return await model.server.arrive()
    except NotNowError as error:
        raise errors.unavailable(error.message, error.retry_after_s) from error


async def _admit(
    services: Services, exchange: Exchange, ask: Ask, model: Model, price: PriceVersion, key: KeyState
) -> Answer:
    """Tokenise, take places in the queue, hold money, ask the engine. Raises ApiError; then nothing is taken."""
    client = model.client
    if not client.connected or client.welcome is None:
        raise errors.unavailable(f"The engine that serves '{model.name}' is starting. Please retry shortly.")
    dimensions = client.welcome.dimensions
    ask.check(dimensions)
    check_vocabulary(ask.request, model.tokenizer.vocab_size)
    if ask.text_size > services.limits.inline_chars:
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(services.threads, ask.encode, model.tokenizer)
    else:
        prompts = ask.encode(model.tokenizer)
    max_context = model.longest(dimensions)
    params = [ask.params(len(prompt), max_context, model.recommended) for prompt in prompts]
    n = ask.request.n or 1
    tabs: list[Tab] = []
    if key.budget is not None or key.limits.tokens is not None:
        tabs = await open_tabs(
            exchange,
            key,
            services.spendings,
            price.price,
            prompts,
            params,
            n,
            lambda: round(services.clock() * 1e6),
            services.limits.quota_status,
        )
    now = round(services.clock() * 1e6)
    at_once = _at_once(model, n)
    try:
        ticket = model.capacity.enter(now, n * min(len(prompts), at_once))
    except OverloadedError as error:
        for tab in tabs:
            tab.cancel()
        raise errors.overloaded(
            f"The queue of '{model.name}' is full: {error.waiting} requests wait. Please retry later.",
            error.retry_after_s,
        ) from error
    try:
        charges = await _hold(services, exchange, ask, model, price, key, prompts, params)
        for tab, charge in zip(tabs, charges):
            tab.follow(charge)
        runs = _dispatch(services, exchange, n, at_once, model, key, charges, prompts, params)
    except BaseException:  # a caller who hung up, too, gives back place, budget and tokens
        model.capacity.leave(ticket, now, served=False)
        for tab in tabs:
            tab.cancel()
        raise
    created = int(time.time())
    sink = _sink(services, exchange, ask, model, n * len(prompts), created)
    admitted = Answer(
        runs,
        sink,
        created,
        services.limits.request_timeout_s,
        at_once,
        together=dimensions > 0,
    )
    meters = runs[0].meters
    services.answers.add(admitted)
    meters.in_flight += 1

    def ended() -> None:
        services.answers.discard(admitted)
        meters.in_flight -= 1
        meters.duration.observe(services.clock() - exchange.began)
        model.capacity.leave(ticket, round(services.clock() * 1e6), served=admitted.error is None)

    admitted.on_end(ended)
    for tab in tabs:
        admitted.on_end(tab.close)
    return admitted


async def _hold(
    services: Services,
    exchange: Exchange,
    ask: Ask,
    model: Model,
    price: PriceVersion,
    key: KeyState,
    prompts: list[list[int]],
    params: list[SamplingParams],
) -> list[Charge]:
    """Hold money for every prompt, or for none. Raises ApiError."""
    charges: list[Charge] = []
    try:
        for prompt, asked in zip(prompts, params, strict=True):
            charges.append(
                await services.meter.open(
                    # The first takes the id that the client is told; the others are found through client_call_id.
                    request_id=exchange.request_id if not charges else services.new_id(),
                    account_id=key.account_id,
                    key_id=key.key_id,
                    model=price.model,  # an adapter without a price of its own is billed as its base
                    price_id=price.id,
                    price=price.price,
                    prompt_tokens=len(prompt),
                    max_completion=asked.max_tokens,
                    n=ask.request.n or 1,
                    client_call_id=exchange.request_id if len(prompts) > 1 else "",
                )
            )
    except BaseException as error:  # a caller who hung up, too, leaves no money held
        for charge in charges:
            charge.void("another prompt of the same call was refused")
        if isinstance(error, InsufficientQuotaError):
            raise errors.insufficient_quota(services.limits.quota_status) from error
        if isinstance(error, MeteringUnavailableError):
            raise errors.unavailable(
                "The service cannot account for requests at the moment.", error.retry_after_s
            ) from error
        raise
    return charges


def _at_once(model: Model, n: int) -> int:
    """Most prompts of a call, each with n answers, that the engine is asked at a time: no more than it takes."""
    return max(1, min(AT_ONCE, (model.capacity.places + model.capacity.queue_bound) // n))


def _dispatch(
    services: Services,
    exchange: Exchange,
    n: int,
    at_once: int,
    model: Model,
    key: KeyState,
    charges: list[Charge],
    prompts: list[list[int]],
    params: list[SamplingParams],
) -> list[Run]:
    """Send so many of the prompts to the engine at once, or none. Raises ApiError."""
    meters = services.telemetry.model(model.name)
    runs = [
        Run(
            model.server,
            charge,
            GenerateRequest(
                request_id=charge.request_id,
                prompt_ids=prompt,
                params=asked,
                n=n,
                salt=key.account_id,
                adapter=model.adapter,
            ),
            index * n,
            meters,
            services.clock,
            exchange.began,
        )
        for index, (charge, prompt, asked) in enumerate(zip(charges, prompts, params, strict=True))
    ]
    try:
        for run in runs[:at_once]:
            run.begin()
    except ApiError:
        for run in runs:
            run.end("server_fault")
        raise
    return runs


def _sink(services: Services, exchange: Exchange, ask: Ask, model: Model, choices: int, created: int) -> Sink:
    openings = ask.openings(model.tokenizer)
    if not ask.request.stream:
        return BodySink(choices, openings)
    tokenizer = model.tokenizer
    return StreamSink(
        Outbox(),
        ask.chunks(exchange.request_id, created),
        choices,
        openings,
        lambda index, delta: ask.logprobs(tokenizer, index, delta),
        Pace(services.limits.flush_s),
        exchange.request_id,
    )


__all__ = ["ClientGone", "Limits", "Services", "answer", "authenticate"]
