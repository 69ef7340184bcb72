"""The gateway put together: what starts in which order, what answers where, what stops in which order."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import orjson
from sqlalchemy.exc import SQLAlchemyError
from starlette.routing import Route, Router

from engine.sizing import MIB
from gateway.admission.keymap import KeyMap
from gateway.admission.spendings import Spendings
from gateway.bootstrap import Prepared
from gateway.chores import Chores, mail_of, marketplace_chores
from gateway.fleet.catalogue import Catalogue
from gateway.fleet.deploy import MakeReplica, deploy, supervisors
from gateway.fleet.fleet import Fleet
from gateway.fleet.leases import LocalLeaseKeeper, Terms
from gateway.fleet.offers import Served, check
from gateway.fleet.pool import Pool
from gateway.fleet.recall import Recall
from gateway.fleet.replicas import State
from gateway.http.burst import Burst
from gateway.inference import adapters, moves, pipeline
from gateway.inference import models as model_lists
from gateway.inference.chat import ChatAsk
from gateway.inference.completions import CompletionAsk
from gateway.inference.embeddings import EmbeddingAsk
from gateway.inference.endpoint import Endpoint, Handler, not_found
from gateway.inference.http import Exchange, Receive, Scope, Send
from gateway.inference.pipeline import Limits, Services
from gateway.inference.reports import Reports
from gateway.live_settings import LiveSettings
from gateway.metering.clerk import Clerk, ProcessClerk
from gateway.metering.metering import Metering
from gateway.settings import Paths, Settings
from gateway.telemetry import CONTENT_TYPE, Telemetry
from marketplace.agent.lease_door import LeaseClient
from marketplace.auth.oauth_issuer import known
from marketplace.http import app as management
from marketplace.http.limits import Buckets
from marketplace.http.operation import Context
from marketplace.mcp import McpEndpoint
from marketplace.nodes.agent_api import AgentDoor
from marketplace.operations import TABLE
from marketplace.payments.manual import ManualProvider
from marketplace.payments.port import PaymentProvider
from marketplace.store.db import Database
from marketplace.store.ids import new_id
from marketplace.store.vault import Vault

log = logging.getLogger(__name__)

Move = Callable[[Services, Fleet, Database, Exchange], Awaitable[None]]

PRICE_POLL_S = 5.0
LEAVE_S = 5.0
"""What an engine that has to leave its GPU needs beside the time for its requests."""
SETTLE_S = 5.0
"""At shutdown, how long answers that were cut off may take to be settled."""


def wall_us() -> int:
    """Microseconds since 1970, UTC."""
    return time.time_ns() // 1000


def monotonic_us() -> int:
    """Microseconds that never jump."""
    return time.monotonic_ns() // 1000


class Gateway:
    """One running gateway: `start`, serve `app`, `stop`. Belongs to one event loop."""

    def __init__(
        self,
        settings: Settings,
        served: Sequence[Served],
        *,
        replica: MakeReplica | None = None,
        payments: PaymentProvider | None = None,
        clerk: Callable[[str, str], Clerk] | None = ProcessClerk,
    ) -> None:
        """`served` are the models on offer, the first of which is in examples. `replica` makes other supervisors of
        engines than the settings describe; without `payments`, they are made by hand. `clerk` makes who writes the
        ledger, from the database's address and the journal's name: a thread without one. Raises WeightsError when a
        tokenizer cannot be read, SettingError for what cannot be deployed.
        """
        check(served)
        self.settings = settings
        self.telemetry = Telemetry()
        self._terms = _terms(settings, served[0].name)
        made = deploy(settings, served, replica or supervisors(settings, served, self._terms))
        self.fleet = Fleet(
            [deployment for deployment, _ in made],
            budget=settings.memory_mib * MIB,
            wake_s=settings.wake_s,
            drain_s=settings.drain_s,
        )
        self.catalogue = Catalogue([model for _, model in made])
        self.burst = Burst()
        """Writes of all streams that one step of an engine gives something to say."""
        for deployment in self.fleet:
            for member in deployment.pool.replicas:
                member.client.witness = self.burst
        for (_, model), one in zip(made, served, strict=True):
            adapters.offer(self.catalogue, model, one.offer.engine.lora)
        self.keys: KeyMap
        self.metering: Metering
        self.services: Services
        self._clerk = clerk
        self._paths = Paths(settings.data)
        self._payments = payments or ManualProvider()
        self._database: Database | None = None
        self._management: Context
        self._chores: Chores
        self._mcp: McpEndpoint
        self._nodes: AgentDoor
        self._model = served[0].name
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenise")
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="reports")
        self._reports: Reports
        self._tasks: list[asyncio.Task[None]] = []
        self._started = False
        self._stopping = False

    def launch(self) -> None:
        """Start the engine processes; what follows can be done while they load. NeverFitsError."""
        for deployment in self.fleet:
            deployment.pool.on_state(partial(self._engine_changed, deployment.name))
        self.fleet.launch()

    async def start(self, prepared: Prepared) -> None:
        """Open the books, wait for the launched engine, recover; returns when requests can be served. An engine that
        leases its GPU is not waited for: the node that has it may be one that asks us.

        Raises StartError (engine), JournalInUseError, JournalDamagedError, JournalUnavailableError, ClerkError,
        SQLAlchemyError, OSError.
        """
        database = self._database = prepared.database
        self.keys = KeyMap(database, prepared.pepper, wall_us)
        self._management = Context(
            database=database,
            pepper=prepared.pepper,
            vault=Vault(prepared.pepper),
            clock=wall_us,
            random=os.urandom,
            limits=Buckets(),
            public_url=self.settings.public_url or f"http://{self.settings.host}:{self.settings.port}",
            oauth=known(self.settings.issuers),
            payments=self._payments,
        )
        self._mcp = McpEndpoint(TABLE, self._management, self._observe)
        self._nodes = AgentDoor(self._management, self._observe, deprecated=self._deprecated_login)
        self.metering = await Metering.start(
            self._paths.journal, database, clock=wall_us, monotonic=monotonic_us, clerk=self._clerk
        )
        self._started = True
        await asyncio.to_thread(self.keys.load)
        self.keys.start()
        self.catalogue.take_prices(await asyncio.to_thread(self.catalogue.read_prices, database))
        settings = self.settings
        self.services = Services(
            keys=self.keys,
            catalogue=self.catalogue,
            meter=self.metering.meter,
            telemetry=self.telemetry,
            limits=Limits(
                flush_s=settings.flush_ms / 1000,
                slow_client_s=settings.slow_client_s,
                request_timeout_s=settings.request_timeout_s,
                quota_status=settings.quota_status,
            ),
            threads=self._threads,
            new_id=RequestIds(),
            spendings=Spendings(database, self.metering.meter.open_charges, self._ledger_caught_up, wall_us),
        )
        self._reports = Reports(database, self.services.spendings, self._readers, wall_us, monotonic_us)
        if not settings.lease_socket:
            await self.fleet.ready()
        await self.metering.recover(Recall(self.fleet, self.catalogue))
        self._tasks.append(asyncio.create_task(self._poll_prices(database), name="prices"))
        live = LiveSettings(database, self.services, wall_us)
        await live.look()
        self._tasks.append(asyncio.create_task(live.follow(), name="settings"))
        self._tasks.append(asyncio.create_task(self.fleet.follow(), name="idle models"))
        self._chores = Chores()
        self._chores.start(marketplace_chores(self._management, mail_of(settings), self._chores))

    async def stop(self, drain_s: float = 0.0) -> None:
        """End what runs (responses were drained before), settle, flush, stop the engine. Safe after a failed start."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        if self._started:
            if hasattr(self, "services"):
                for answer in list(self.services.answers):
                    answer.abandon("server_fault")
            if not await self.metering.close(SETTLE_S):
                log.warning("the ledger does not have everything yet; the journal keeps it for the next start")
            self.keys.stop()
        if hasattr(self, "_mcp"):
            await self._mcp.stop()
        if hasattr(self, "_chores"):
            await asyncio.to_thread(self._chores.stop)
        await self.fleet.stop(drain_s)
        await self._terms.keeper.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._readers.shutdown, wait=True, cancel_futures=True)
        if self._database is not None:
            await asyncio.to_thread(self._database.close)

    def part(self) -> None:
        """Answer nodes that wait for something new: requests are about to be drained."""
        self._nodes.close()

    def troubles(self) -> dict[str, str]:
        """Why requests cannot be served now, by part; empty when they can."""
        found: dict[str, str] = {}
        if self._stopping:
            found["gateway"] = "shutting down"
        for deployment in self.fleet:
            pool = deployment.pool
            if deployment.awake and pool.state is not State.READY:
                reason = f": {pool.last_error}" if pool.last_error else ""
                part = "engine" if deployment.name == self._model else f"engine of {deployment.name}"
                found[part] = f"{pool.state}{reason}"
        trouble = self.metering.trouble
        if trouble is not None:
            found["metering"] = trouble
        if not self.keys.fresh:
            found["keys"] = "not compared with the database lately"
        return found

    def app(self) -> Doors:
        """Every route. Inference endpoints are plain ASGI, without middleware around them."""
        services = self.services

        def endpoint(path: str, **methods: Handler) -> Route:
            return Route(path, Endpoint(path, methods, self.telemetry, services.new_id))

        async def chat(exchange: Exchange) -> None:
            await pipeline.answer(services, exchange, ChatAsk)

        async def completions(exchange: Exchange) -> None:
            await pipeline.answer(services, exchange, CompletionAsk)

        async def embeddings(exchange: Exchange) -> None:
            await pipeline.answer(services, exchange, EmbeddingAsk)

        async def models(exchange: Exchange) -> None:
            key = await pipeline.authenticate(services, exchange)
            await exchange.json(200, model_lists.list_models(services.catalogue, key))

        async def model(exchange: Exchange) -> None:
            key = await pipeline.authenticate(services, exchange)
            name = exchange.scope["path_params"]["name"]
            await exchange.json(200, model_lists.one_model(services.catalogue, key, name))

        reports = self._reports

        async def load_adapter(exchange: Exchange) -> None:
            await adapters.load(services, self.fleet, self._management.database, exchange)

        async def unload_adapter(exchange: Exchange) -> None:
            await adapters.unload(services, self.fleet, self._management.database, exchange)

        async def usage(exchange: Exchange) -> None:
            await reports.usage(exchange, await pipeline.authenticate(services, exchange))

        async def key(exchange: Exchange) -> None:
            await reports.key(exchange, await pipeline.authenticate(services, exchange))

        async def credit(exchange: Exchange) -> None:
            await reports.credits(exchange, await pipeline.authenticate(services, exchange))

        def move(handler: Move) -> Handler:
            async def handle(exchange: Exchange) -> None:
                await handler(services, self.fleet, self._management.database, exchange)

            return handle

        async def health(exchange: Exchange) -> None:
            await exchange.json(200, b'{"status":"alive"}')

        async def ready(exchange: Exchange) -> None:
            troubles = self.troubles()
            status = "unavailable" if troubles else "ready"
            body = orjson.dumps({"status": status, "model": self._model, "reasons": troubles})
            await exchange.json(503 if troubles else 200, body)

        async def metrics(exchange: Exchange) -> None:
            await self._read()
            await exchange.text(200, self.telemetry.render(), CONTENT_TYPE)

        routes = [
            # Stored completions do not exist here: reading them is 404, as at a server that stores none.
            endpoint("/v1/chat/completions", POST=chat, GET=not_found),
            endpoint("/v1/completions", POST=completions),
            endpoint("/v1/embeddings", POST=embeddings),
            endpoint("/v1/models", GET=models),
            endpoint("/v1/models/{name:path}", GET=model),
            endpoint("/v1/load_lora_adapter", POST=load_adapter),
            endpoint("/v1/unload_lora_adapter", POST=unload_adapter),
            endpoint("/v1/usage", GET=usage),
            endpoint("/v1/key", GET=key),
            endpoint("/v1/credits", GET=credit),
            endpoint("/v1/model_states", GET=move(moves.states)),
            endpoint("/v1/load_model", POST=move(moves.load)),
            endpoint("/v1/sleep_model", POST=move(moves.sleep)),
            endpoint("/v1/unload_model", POST=move(moves.unload)),
            endpoint("/healthz", GET=health),
            endpoint("/readyz", GET=ready),
            endpoint("/metrics", GET=metrics),
            *management.routes(TABLE, self._management, self._observe),
            *self._nodes.routes(),
            self._mcp.route(),
        ]
        methods = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")
        unknown = Endpoint("unknown", dict.fromkeys(methods, not_found), self.telemetry, services.new_id)
        return Doors(Router(routes, redirect_slashes=False, default=unknown), routes[:2])

    def _observe(self, path: str, status: int) -> None:
        """Count an answer of the management API."""
        self.telemetry.requests[path, status] += 1

    def _deprecated_login(self, method: str) -> None:
        self.telemetry.deprecated_logins[method] += 1

    def _engine_changed(self, model: str, pool: Pool) -> None:
        if self._started and pool.epoch:
            self.metering.note_engine(model, pool.epoch)

    async def _ledger_caught_up(self) -> None:
        """Return when the ledger has everything that is in the journal now."""
        await self.metering.settler.reached(self.metering.journal.next_seq - 1)

    async def _poll_prices(self, database: Database) -> None:
        """A price set elsewhere is offered within seconds."""
        while True:
            await asyncio.sleep(PRICE_POLL_S)
            try:
                self.catalogue.take_prices(await asyncio.to_thread(self.catalogue.read_prices, database))
            except (SQLAlchemyError, OSError) as error:
                log.warning("prices cannot be read: %s", error)

    async def _read(self) -> None:
        """Ask the others for what a scrape shows."""
        reading, meter = self.telemetry.reading, self.metering.meter
        reading.ready = not self.troubles()
        reading.open_holds = len(meter.open_charges)
        reading.voided = meter.stats.voided
        reading.recovered = self.metering.report.settled + self.metering.report.voided
        reading.free_tokens = meter.stats.free_tokens
        reading.journal_backlog = self.metering.journal.next_seq - 1 - self.metering.settler.applied_seq
        for deployment in self.fleet:
            name, pool = deployment.name, deployment.pool
            reading.restarts[name] = pool.restarts
            reading.ready_replicas[name] = pool.ready_replicas
            reading.awake[name] = deployment.awake
            reading.snapshots[name] = await pool.snapshot()


class Doors:
    """The way in: a router, with paths that are found without trying its patterns one after the other."""

    def __init__(self, router: Router, hot: Sequence[Route]) -> None:
        """`hot` are routes whose paths have no parameters."""
        self._router = router
        self._hot = {route.path: route.endpoint for route in hot}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._hot.get(scope["path"], self._router)(scope, receive, send)


def _terms(settings: Settings, model: str) -> Terms:
    """Under which terms the engine gets its GPU; without an agent it takes what there is."""
    if not settings.lease_socket:
        return Terms(keeper=LocalLeaseKeeper())
    return Terms(
        keeper=LeaseClient(Path(settings.lease_socket)),
        gpus=settings.engine.tensor_parallel,
        holder=model,
        preemptible=settings.lease_preemptible,
        notice_s=math.ceil(settings.drain_s + LEAVE_S),
    )


class RequestIds:
    """Mints UUIDv7s: the request's id on the wire, in the journal and in the ledger.

    Random bytes are fetched in bulk: every system call lets other threads take the interpreter, for milliseconds.
    """

    BULK = 8192

    def __init__(self) -> None:
        self._bytes = b""
        self._at = 0

    def __call__(self) -> str:
        """A new id."""
        return new_id(wall_us(), self._take)

    def _take(self, count: int) -> bytes:
        if self._at + count > len(self._bytes):
            self._bytes, self._at = os.urandom(self.BULK), 0
        taken = self._bytes[self._at : self._at + count]
        self._at += count
        return taken
