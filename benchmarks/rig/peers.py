"""Peer servers from a folder of prepared environments: vLLM's CPU build and llama.cpp in the xllamacpp wheel.

The folder holds `vllm/` and `llama/`, a virtual environment each, and under `models/` the default model as
`SmolLM2-135M-Instruct.Q4_1.gguf` and as a float32 checkpoint `smollm2-135m-hf-fp32/`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.rig.http import Endpoint
from benchmarks.rig.listener import free_port
from benchmarks.rig.processes import ServerProcess

GGUF = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
FLOAT32 = "models/smollm2-135m-hf-fp32"
LLAMA_PEER = Path(__file__).with_name("llama_peer.py")
LLAMA_SLOTS = 32
LLAMA_CONTEXT = 32_768

Started = tuple[ServerProcess, Endpoint]


def start_vllm(folder: Path, logs: Path) -> Started:
    """Start vLLM in float32 (its fastest type on CPUs without bf16 arithmetic) on all cores with 2 GiB of KV cache."""
    port = free_port()
    cache = folder / "vllm-cache"
    argv = [str(folder / "vllm/bin/vllm"), "serve", str(folder / FLOAT32), "--served-model-name", "smollm2"]
    argv += ["--dtype", "float32", "--max-model-len", "4096", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--no-enable-log-requests"]
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "PATH": f"{folder / 'vllm/bin'}:{os.environ.get('PATH', '')}",
    }
    server = ServerProcess(argv, logs / "vllm.log", env)
    endpoint = Endpoint("vllm-cpu f32", "127.0.0.1", port, "smollm2", pid=server.pid)
    return _ready(server, endpoint, "/health", 900)


def start_llama(folder: Path, logs: Path) -> Started:
    """Start llama.cpp's own HTTP server on the Q4_1 file with all cores and enough slots for every case."""
    port = free_port()
    argv = [str(folder / "llama/bin/python"), str(LLAMA_PEER), "serve", str(folder / GGUF), str(port)]
    argv += [str(os.cpu_count()), str(LLAMA_SLOTS), str(LLAMA_CONTEXT)]
    server = ServerProcess(argv, logs / "llama.log")
    endpoint = Endpoint("llama.cpp q4_1", "127.0.0.1", port, "smollm2", pid=server.pid)
    return _ready(server, endpoint, "/health", 120)


PEERS: dict[str, Callable[[Path, Path], Started]] = {"vllm": start_vllm, "llama": start_llama}


def _ready(server: ServerProcess, endpoint: Endpoint, path: str, limit_s: float) -> Started:
    try:
        server.wait_ready(endpoint, path, limit_s)
    except BaseException:
        server.stop()
        raise
    return server, endpoint
