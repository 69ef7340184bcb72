"""The gateway and what computes: its own process touches no device, and it outlives an engine that hangs on one."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.weights.sources import ModelSource

LIMIT_S = 60.0
GATEWAY = """
import atexit, json, sys
from pathlib import Path

def tell():
    "What this process has loaded in its life: of libraries that could touch a device, there may be none."
    devices = ("torch", "triton", "cuda", "pynvml", "kernels")
    modules = sorted(name for name in sys.modules if name.split(".")[0] in devices)
    maps = Path("/proc/self/maps").read_text()
    libraries = [name for name in ("libtorch", "libcuda", "libcudart", "libnvidia") if name in maps]
    Path(sys.argv[0]).write_text(json.dumps({"modules": modules, "libraries": libraries}))

sys.argv.pop(0)
atexit.register(tell)
from gateway.cli import main
raise SystemExit(main(sys.argv[1:]))
"""
ENGINE = """
import pathlib, sys
from engine.script import Script, ScriptedCore
from engine.worker import main

mark = pathlib.Path(sys.argv.pop(1))
hangs = 0 if mark.exists() else 3
script = Script(model="tiny", vocab_size=258, tokens=8, eos=257, reply=(72, 105), hang_after_tokens=hangs)
mark.touch()
raise SystemExit(main(load=lambda config: ScriptedCore(script)))
"""


class Gateway:
    """`headrace serve` whose engine hangs in its first life."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.loaded = folder / "loaded.json"
        data = folder / "data"
        command = shlex.join([sys.executable, "-c", ENGINE, str(folder / "mark")])
        options = ["--port", "0", "--data", str(data), "--model", str(model), "--engine-command", command]
        self.process = subprocess.Popen(
            [sys.executable, "-c", GATEWAY, str(self.loaded), "serve", *options, "--step-timeout-s", "0.4"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HEADRACE_LOG_LEVEL": "error"},
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if " serves " in line:
                self.address = line.split()[-1]
                break
        self.key = json.loads((data / "first-run.json").read_text())["api_key"]

    def ask(self) -> Any:
        """One question, not repeated."""
        with openai.OpenAI(base_url=self.address + "/v1", api_key=self.key, max_retries=0, timeout=20) as client:
            return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])

    def ready(self) -> tuple[int, dict[str, str]]:
        """What /readyz says: status and reasons."""
        try:
            with urllib.request.urlopen(self.address + "/readyz", timeout=10) as answer:
                return answer.status, json.load(answer)["reasons"]
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)["reasons"]


def test_it_loads_no_library_of_a_device_and_has_an_engine_back_that_hung(
    tmp_path: Path, tiny_model: ModelSource
) -> None:
    gateway = Gateway(tmp_path, tiny_model.path)
    try:
        assert gateway.ready() == (200, {})
        with pytest.raises(openai.InternalServerError, match="not charged") as caught:
            gateway.ask()
        assert caught.value.status_code == 500
        told: set[tuple[int, str]] = set()
        until, pause = time.monotonic() + LIMIT_S, threading.Event()
        while (seen := gateway.ready())[0] != 200 or not told:
            told.add((seen[0], seen[1].get("engine", "")))
            assert time.monotonic() < until, told
            pause.wait(0.05)
        reasons = {reason for status, reason in told if status == 503}
        assert "down: a step has not ended for 0.4 s" in reasons
        answer = gateway.ask()
        assert answer.usage.completion_tokens == 8
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(LIMIT_S) == 0
    finally:
        gateway.process.kill()
        gateway.process.communicate()
    assert json.loads(gateway.loaded.read_text()) == {"modules": [], "libraries": []}
    log = (tmp_path / "data" / "engine.log").read_text()
    assert log.count("error: a step has not ended for 0.4 s") == 1
