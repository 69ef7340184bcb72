"""The list of GPUs that container engines read (CDI): made anew when there are other devices than before."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

TOOL = "nvidia-ctk"
LIST = Path("/var/run/cdi/nvidia.yaml")
_LIST_S = 60.0


def list_devices() -> None:
    """Have the vendor's tool list all devices, parts of GPUs among them. OSError: it is not there, or fails."""
    if shutil.which(TOOL) is None:
        raise OSError(f"{TOOL} is not there: install the NVIDIA Container Toolkit")
    try:
        done = subprocess.run(
            [TOOL, "cdi", "generate", f"--output={LIST}"], capture_output=True, text=True, timeout=_LIST_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{TOOL} does not end") from error
    if done.returncode:
        raise OSError(f"{TOOL} failed: {done.stderr.strip()[-500:]}")
