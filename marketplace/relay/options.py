"""The options of `headrace relay`. Importing them costs nothing: the relay itself is imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

SECRET = "HEADRACE_RELAY_SECRET"
"""Where the secret is read from."""
PORT = 7000


class RelaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `headrace relay`."""

    listen: str
    """address that nodes connect to"""
    port: int
    """port that nodes connect to"""
    publish: str
    """address of the published ports"""
    ports: range
    """ports that may be published"""
    secret_file: Path | None = None
    """file of the secret, where the environment has none"""
    log_level: str = "info"
    """how much is logged"""


def add_relay_options(parser: argparse.ArgumentParser, default: Callable[[str, Any], Any]) -> None:
    """Declare the options; `default` looks into the environment first."""
    add = parser.add_argument
    parser.epilog = f"The secret that datacenters/add showed is read from {SECRET}, or from --secret-file."
    add("--listen", default=default("relay_listen", "0.0.0.0"), help="address for nodes (default: %(default)s)")
    add("--port", type=int, default=default("relay_port", PORT), help="port for nodes (default: %(default)s)")
    add(
        "--publish", default=None, metavar="ADDRESS", help="address of the published ports; that of --listen by default"
    )
    add("--ports", type=read_ports, required=True, metavar="FIRST-LAST", help="ports of the datacenter")
    add("--secret-file", type=Path, default=None, help=f"file of the secret, if {SECRET} is not set")
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info", help="how much is logged")


def read_ports(text: str) -> range:
    """Read `20000-39999`. ArgumentTypeError."""
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit()):
        raise argparse.ArgumentTypeError(f"{text} is not like 20000-39999")
    found = range(int(first), int(last) + 1)
    if not found or found[0] < 1 or found[-1] > 65535:
        raise argparse.ArgumentTypeError(f"{text} are no ports")
    return found


def read_relay_settings(options: argparse.Namespace) -> RelaySettings:
    """Settings from the parsed options."""
    return RelaySettings(
        listen=options.listen,
        port=options.port,
        publish=options.publish or options.listen,
        ports=options.ports,
        secret_file=options.secret_file,
        log_level=options.log_level,
    )
