"""llama.cpp through the xllamacpp wheel: run by the peer's own Python, hence nothing of this project is imported.

`llama_peer.py serve MODEL PORT THREADS SLOTS CONTEXT` is llama.cpp's HTTP server on 127.0.0.1 until it is ended.
`llama_peer.py measure MODEL THREADS` reads lines of JSON {"prompt": ids, "n_predict": n} and answers each with the
library's own timings, measured in this process with no HTTP between.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from typing import Any

import xllamacpp  # type: ignore[import-not-found, unused-ignore]


def start(model: str, threads: int, slots: int, context: int, port: int) -> Any:
    """Load the model into a server. `context` is the number of KV tokens that all slots share."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_parallel = slots
    params.kv_unified = True
    params.n_ctx = context
    params.verbosity = 0
    return xllamacpp.Server(params)


def measure(model: str, threads: int) -> None:
    """Answer requests from standard input, a line each."""
    server = start(model, threads, slots=1, context=4096, port=0)
    print(json.dumps({"ready": True, "system": xllamacpp.get_system_info()}), flush=True)
    for line in sys.stdin:
        request = {"temperature": 0, "ignore_eos": True, "cache_prompt": False, **json.loads(line)}
        print(json.dumps(server.handle_completions(request)["timings"]), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        measure(sys.argv[2], int(sys.argv[3]))
    else:
        path, number, thread_count, slot_count, tokens = sys.argv[2], *map(int, sys.argv[3:7])
        running = start(path, thread_count, slot_count, tokens, number)
        print(running.listening_address, flush=True)
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        ended.wait()
