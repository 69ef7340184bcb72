"""Settings of one gateway process: from the command line, from HEADRACE_* variables, from defaults, in this order."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal

import msgspec

from engine.config import EngineConfig
from marketplace.auth.oauth_config import IssuerConfig, is_safe
from marketplace.notify.mail import read_sender, read_smtp_url
from marketplace.notify.rules import AddressError

_PUBLIC_URL = re.compile(r"https?://[A-Za-z0-9.\[\]:_-]+(/[A-Za-z0-9._~-]+)*")


MOST_REPLICAS = 64
"""Engine processes of one model on one machine."""


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Nano-units of the server currency per 1,000,000 tokens."""

    prompt: int = 20_000_000
    cached: int = 10_000_000
    completion: int = 60_000_000


class SettingError(ValueError):
    """A setting that cannot be; the message names its option."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `headrace serve` can be told. A field's docstring is its help text."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    data: Path = Path("data")
    """Folder for everything that must survive: database, journal, secret key, logs."""
    database_url: str = ""
    """SQLAlchemy address of the ledger; empty is SQLite in the data folder, PostgreSQL is postgresql+psycopg://…"""
    price_prompt: str = ""
    """Price of 1,000,000 prompt tokens as a decimal number; sets a new price version when it differs. Default 0.02."""
    price_cached: str = ""
    """Price of 1,000,000 prompt tokens found in the prefix cache. Default 0.01."""
    price_completion: str = ""
    """Price of 1,000,000 generated tokens. Default 0.06."""
    first_balance: str = "10"
    """Balance given to the first account, in units of the currency."""
    admin_email: str = "admin@headrace.local"
    """E-mail address of the first admin, who is created at the first start."""
    public_url: str = ""
    """Address at which people reach this server, for links in mails; empty is the one that it listens on."""
    trusted_proxies: str = ""
    """Addresses or networks, with commas between them, of proxies in front of this server: whom they name in
    X-Forwarded-For is the caller. Empty believes nobody."""
    smtp_url: str = ""
    """Mail server: smtp://user:password@host:587 (STARTTLS) or smtps://…:465; empty writes mails into the data folder.
    Give it as HEADRACE_SMTP_URL: other users of the machine can read command lines."""
    mail_from: str = "Headrace <no-reply@headrace.local>"
    """Whom mails come from."""
    quota_status: Literal[429, 402] = 429
    """HTTP status of an answer that the balance does not cover."""
    sampling_defaults: Literal["model", "format"] = "model"
    """How to sample where a request does not say: as the model's publisher recommends, or at the format's defaults."""
    oauth_issuer: str = ""
    """Address of an OpenID Connect issuer at which people may sign in, as it writes it in its tokens; empty is none."""
    oauth_name: str = "SSO"
    """What people know that issuer by."""
    oauth_client_id: str = ""
    """How this server is registered there; it must know {public address}/oauth/callback as a place to come back to."""
    oauth_client_secret: str = ""
    """The registration's secret; other users of this machine do not see it in HEADRACE_OAUTH_CLIENT_SECRET."""
    drain_s: float = 30.0
    """On SIGTERM, seconds for running requests to finish."""
    slow_client_s: float = 60.0
    """Seconds after which a client that does not read its stream is cut off."""
    request_timeout_s: float = 600.0
    """Seconds after which a request is ended at our cost."""
    flush_ms: float = 50.0
    """Least time between two writes to one stream; the first is written at once."""
    backlog: int = 2048
    """Connections that may wait to be accepted."""
    lease_socket: str = ""
    """Where this machine is a node: its agent's socket (leases.sock in the folder of `headrace node`), from which the
    engine leases its GPU. Everything else is served while it has none."""
    lease_preemptible: bool = True
    """Whether a rental may take the leased GPU; running requests have drain-s to finish."""
    replicas: int = 1
    """Engine processes that serve the model, each with weights and a KV cache of its own: on a CPU they share the
    cores, on GPUs each takes one of its own."""
    ray: str = ""
    """Ray cluster whose machines run the replicas: its address (host:6379), auto for the one that this machine is part
    of, or local for one on this machine alone. Each machine has headrace installed and finds the model under the same
    name or path. Empty runs them here, without Ray."""
    routing: Literal["prefix", "least-work", "round-robin"] = "prefix"
    """Which of several replicas gets a request: where the most of its prefix is cached and the least work waits, where
    the least work waits, or each in turn."""
    more_models: tuple[str, ...] = ()
    """Models beside the engine's own: --model given more than once."""
    models_file: str = ""
    """Several models, in place of --model: a TOML file with a table [[model]] for each, which has the model, its name,
    prices (price_prompt, …), replicas, idle_sleep_s, idle_unload_s, pinned, memory_mib, any setting of the engine."""
    memory_mib: int = 0
    """Memory that all models together may take, in MiB: who is not in use sleeps or is unloaded where another needs
    room. 0 has no limit."""
    idle_sleep_s: float = 0.0
    """Seconds after which a model that nobody uses sleeps: it keeps its weights, gives back its KV cache, and wakes in
    a moment when a request comes; 0 never."""
    idle_unload_s: float = 0.0
    """Seconds after which a model that nobody uses is unloaded: its process ends, and a request loads it again; 0
    never."""
    wake_s: float = 30.0
    """Seconds that a request waits for a model that sleeps or is not loaded, before it is refused with 503."""
    engine_command: str = ""
    """Command that runs the engine process instead of the built-in one."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Least severity that is logged."""
    engine: EngineConfig = EngineConfig()
    """Settings of the engine process."""

    def check(self) -> None:
        """Raise SettingError, naming the option, for a value that cannot be."""
        checks: tuple[tuple[str, bool, str], ...] = (
            ("port", 0 <= self.port <= 65535, "must be between 0 and 65535"),
            ("drain-s", self.drain_s >= 0, "must not be negative"),
            ("slow-client-s", self.slow_client_s > 0, "must be positive"),
            ("request-timeout-s", self.request_timeout_s > 0, "must be positive"),
            ("flush-ms", self.flush_ms >= 0, "must not be negative"),
            ("backlog", self.backlog >= 1, "must be at least 1"),
            (
                "lease-socket",
                not self.lease_socket or self.engine.device != "cpu",
                "leases a GPU, and --device cpu needs none",
            ),
            ("oauth-issuer", not self.oauth_issuer or is_safe(self.oauth_issuer), "must be an https address"),
            ("oauth-client-id", bool(self.oauth_client_id) or not self.oauth_issuer, "must be given with an issuer"),
            ("oauth-name", bool(self.oauth_name), "must not be empty"),
            ("replicas", 1 <= self.replicas <= MOST_REPLICAS, f"must be between 1 and {MOST_REPLICAS}"),
            ("ray", not (self.ray and self.lease_socket), "places engines on machines that --lease-socket is not for"),
            ("ray", not self.ray.startswith("ray://"), "takes the address of a cluster, not of a Ray client's server"),
            ("tensor-parallel", self.engine.tensor_parallel >= 1, "must be at least 1"),
            ("memory-mib", self.memory_mib >= 0, "must not be negative"),
            ("idle-sleep-s", self.idle_sleep_s >= 0, "must not be negative"),
            ("idle-unload-s", self.idle_unload_s >= 0, "must not be negative"),
            ("wake-s", self.wake_s > 0, "must be positive"),
            ("models-file", not (self.models_file and self.more_models), "takes the place of --model"),
            (
                "lease-socket",
                not self.lease_socket or not (self.models_file or self.more_models),
                "leases the GPU of one model, not of several",
            ),
            ("max-running", self.engine.max_running >= 1, "must be at least 1"),
            ("max-step-ms", self.engine.max_step_ms >= 0, "must not be negative"),
            ("fast-share", 0 <= self.engine.fast_share < 1, "must be at least 0 and below 1"),
            ("target-ttft-ms", self.engine.target_ttft_ms >= 0, "must not be negative"),
            ("step-timeout-s", self.engine.step_timeout_s >= 0, "must not be negative"),
            ("max-queued", self.engine.max_queued >= 0, "must not be negative"),
        )
        for option, ok, message in checks:
            if not ok:
                raise SettingError(f"--{option} {message}")
        self._check_mail()
        try:
            self.proxies  # noqa: B018 - it is read for its error
        except ValueError as error:
            raise SettingError("--trusted-proxies is not like 10.0.0.1,192.168.0.0/16") from error

    def _check_mail(self) -> None:
        try:
            if self.smtp_url:
                read_smtp_url(self.smtp_url)
        except ValueError as error:  # its message does not repeat the address, which may hold a password
            raise SettingError(f"--smtp-url is not usable: {error}") from None
        try:
            read_sender(self.mail_from)
        except AddressError as error:
            raise SettingError(f"--mail-from is {error}") from error
        if self.public_url and not _PUBLIC_URL.fullmatch(self.public_url):
            raise SettingError("--public-url is not like https://headrace.example.com, without a slash at its end")

    @property
    def proxies(self) -> list[str]:
        """Proxies in front of this server, as networks. ValueError."""
        named = [name.strip() for name in self.trusted_proxies.split(",")] if self.trusted_proxies else []
        return [str(ipaddress.ip_network(name)) for name in named]

    @property
    def issuers(self) -> list[IssuerConfig]:
        """Issuers at which people may sign in."""
        if not self.oauth_issuer:
            return []
        registered = IssuerConfig(
            name=self.oauth_name,
            issuer=self.oauth_issuer,
            client_id=self.oauth_client_id,
            client_secret=self.oauth_client_secret,
        )
        return [registered]

    @property
    def database(self) -> str:
        """SQLAlchemy address of the ledger."""
        return self.database_url or default_database(self.data)


def default_database(data: Path) -> str:
    """The ledger's address when none is given: a SQLite file in the data folder."""
    return f"sqlite:///{(data / 'headrace.db').absolute()}"


class Paths:
    """Files in the data folder."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.lock = data / "lock"
        self.secret = data / "secret.key"
        self.first_run = data / "first-run.json"
        self.journal = data / "journal.sqlite"
        self.mail = data / "mail"

    def engine_log(self, replica: int = 0, model: int = 0) -> Path:
        """What the engine process of a replica of a model says."""
        return self.data / f"{_engine(model, replica)}.log"

    def engine_socket(self, replica: int = 0, model: int = 0) -> Path:
        """Where the engine process of a replica of a model listens."""
        return self.data / f"{_engine(model, replica)}.sock"


def _engine(model: int, replica: int) -> str:
    """engine, engine-1 … for the replicas of the first model; engine-m2, engine-m2-1 … for the second's."""
    return "engine" + (f"-m{model + 1}" if model else "") + (f"-{replica}" if replica else "")
