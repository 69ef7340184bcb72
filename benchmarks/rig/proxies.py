"""Gateways of others from a folder of prepared environments, each before the same server.

The folder holds what is wanted of `sglang/` and `litellm/`, virtual environments with sglang-router and with
litellm[proxy]; nginx is the system's own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from benchmarks.rig.http import Endpoint
from benchmarks.rig.listener import free_port
from benchmarks.rig.processes import ServerProcess

LIMIT_S = 120


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running gateway."""

    server: ServerProcess
    endpoint: Endpoint


Start = Callable[[Path, Path, Endpoint], Proxy]
NGINX = """daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx-error.log; worker_processes 1;
events {{ worker_connections 512; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    keepalive_requests 1000000;
    upstream behind {{ server {host}:{port}; keepalive 16; keepalive_requests 1000000; }}
    server {{
        listen 127.0.0.1:{own};
        location / {{
            proxy_pass http://behind; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
        }}
    }}
}}
"""


def start_nginx(folder: Path, logs: Path, behind: Endpoint) -> Proxy:
    """Start nginx, which passes bytes on and knows nothing of what they are."""
    own, settings = free_port(), logs / "nginx.conf"
    settings.write_text(NGINX.format(folder=logs, host=behind.host, port=behind.port, own=own))
    server = ServerProcess([str(shutil.which("nginx")), "-c", str(settings)], logs / "nginx.log")
    return _ready(server, replace(behind, label="nginx", port=own, pid=server.pid), "/")


def start_sglang(folder: Path, logs: Path, behind: Endpoint) -> Proxy:
    """Start SGLang's router, which reads the request to choose where it goes."""
    own = free_port()
    argv = [str(folder / "sglang/bin/python"), "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    argv += ["--port", str(own), "--worker-urls", f"http://{behind.host}:{behind.port}", "--policy", "round_robin"]
    argv += ["--prometheus-port", str(free_port()), "--health-check-endpoint", "/", "--log-level", "error"]
    server = ServerProcess(argv, logs / "sglang.log")
    return _ready(server, replace(behind, label="sglang-router", port=own, pid=server.pid), "/health")


def start_litellm(folder: Path, logs: Path, behind: Endpoint) -> Proxy:
    """Start LiteLLM's proxy with a master key and no database: keys and budgets would be more work."""
    own, settings, key = free_port(), logs / "litellm.yaml", "sk-benchmark"
    to = {"model": f"openai/{behind.model}", "api_base": f"http://{behind.host}:{behind.port}/v1", "api_key": "none"}
    models = [{"model_name": behind.model, "litellm_params": to}]
    settings.write_bytes(orjson.dumps({"model_list": models, "general_settings": {"master_key": key}}))
    argv = [str(folder / "litellm/bin/litellm"), "--config", str(settings), "--host", "127.0.0.1", "--port", str(own)]
    server = ServerProcess(argv, logs / "litellm.log", {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"})
    endpoint = replace(behind, label="litellm", port=own, key=key, pid=server.pid)
    return _ready(server, endpoint, "/health/liveliness")


PROXIES: dict[str, Start] = {
    "nginx": start_nginx,
    "sglang": start_sglang,
    "litellm": start_litellm,
}


def _ready(server: ServerProcess, endpoint: Endpoint, path: str) -> Proxy:
    try:
        server.wait_ready(endpoint, path, LIMIT_S)
    except BaseException:
        server.stop()
        raise
    return Proxy(server, endpoint)
