"""The options of `headrace node`. Importing them costs nothing: the agent itself is imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `headrace node`."""

    server: str
    """address of the server"""
    data: Path
    """folder of machines, images and retained disks"""
    driver: Literal["qemu", "podman", "both"] = "both"
    """what this node runs"""
    credentials: Path | None = None
    """credentials file; DATA/credentials.json by default"""
    address: str = ""
    """address at which renters reach published ports; found out by default"""
    accelerator: Literal["auto", "kvm", "tcg"] = "auto"
    """how virtual machines run; auto boots something to find out"""
    run_as: str | None = None
    """user that virtual machines run as"""
    container_socket: Path | None = None
    """socket of a podman or dockerd that runs already; by default the agent starts podman's service"""
    insecure_registries: list[str] = []
    """registries that are reached without TLS"""
    image_folders: list[Path] = []
    """folders whose files may be named as images"""
    private_images: bool = False
    """fetch images from addresses of private networks too"""
    log_level: str = "info"
    """how much is logged"""


def add_node_options(parser: argparse.ArgumentParser, default: Callable[[str, Any], Any]) -> None:
    """Declare the options; `default` looks into the environment first."""
    add = parser.add_argument
    parser.epilog = "The node's key is read from HEADRACE_NODE_KEY, or from the credentials file."
    add("--server", required=not default("server", ""), default=default("server", ""), help="address of the server")
    data = Path(default("node_data", "node"))
    add("--data", type=Path, default=data, help="folder of machines, images and retained disks (default: %(default)s)")
    add("--driver", choices=["qemu", "podman", "both"], default="both", help="what it runs (default: %(default)s)")
    add("--credentials", type=Path, default=None, help="credentials file (default: DATA/credentials.json)")
    add("--address", default=default("node_address", ""), help="address of published ports; found out by default")
    add(
        "--accelerator",
        choices=["auto", "kvm", "tcg"],
        default=default("accelerator", "auto"),
        help="how virtual machines run; auto boots something to find out (default: %(default)s)",
    )
    add("--run-as", default=None, metavar="USER", help="user that virtual machines run as; the agent's own by default")
    add("--container-socket", type=Path, default=None, help="socket of a podman or dockerd that runs already")
    add("--insecure-registry", action="append", default=[], metavar="HOST:PORT", help="a registry without TLS")
    add("--image-folder", type=Path, action="append", default=[], help="a folder whose files may be named as images")
    add("--private-images", action="store_true", help="fetch images from private addresses too")
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info", help="how much is logged")


def read_node_settings(options: argparse.Namespace) -> NodeSettings:
    """Settings from the parsed options."""
    return NodeSettings(
        server=options.server,
        data=options.data,
        driver=options.driver,
        credentials=options.credentials,
        address=options.address,
        accelerator=options.accelerator,
        run_as=options.run_as,
        container_socket=options.container_socket,
        insecure_registries=options.insecure_registry,
        image_folders=options.image_folder,
        private_images=options.private_images,
        log_level=options.log_level,
    )
