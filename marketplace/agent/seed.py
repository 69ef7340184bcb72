"""The NoCloud seed of a virtual machine: a small ISO that cloud-init reads at the first boot.

`user-data` is the renter's text, untouched. What the node adds is in `vendor-data`, where the renter's own settings win
over it: the user with keys and password, the proxy of the network, and the address to phone when it is up.
"""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any

import msgspec
import pycdlib

from marketplace.agent.wire import Network, VmSpec

LABEL = "CIDATA"
TRIES = 20
"""how often the guest phones home; always said, because some releases of cloud-init fail without it"""


class Seed(msgspec.Struct, frozen=True):
    """The four files of a seed."""

    meta_data: str
    user_data: str
    vendor_data: str
    network_config: str


def make_seed(id: str, spec: VmSpec, *, phone_home: str | None) -> Seed:
    """The seed of an instance. A new id makes cloud-init treat a reused disk as a machine of its own."""
    return Seed(
        meta_data=_text({"instance-id": id, "local-hostname": host_name(spec.name)}),
        user_data=spec.user_data or "#cloud-config\n{}\n",
        vendor_data="#cloud-config\n" + _text(vendor_data(spec, phone_home=phone_home)),
        network_config=_text(_network_config(id, spec.network)),
    )


def host_name(name: str) -> str:
    """A name that a host may have: letters, digits and hyphens, at most 63."""
    cleaned = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())
    return cleaned.strip("-")[:63].strip("-") or "instance"


def vendor_data(spec: VmSpec, *, phone_home: str | None) -> dict[str, Any]:
    """What the node asks of cloud-init, as the mapping of its configuration."""
    data: dict[str, Any] = {"users": [_user(spec)], "ssh_pwauth": spec.password is not None}
    if spec.username == "root":
        data["disable_root"] = False
    if spec.password is not None:
        who = {"name": spec.username, "password": spec.password, "type": "text"}
        data["chpasswd"] = {"expire": False, "users": [who]}
    files = _proxy_files(spec)
    if files:
        data["write_files"] = files
        data["apt"] = {
            key: value
            for key, value in (
                ("http_proxy", spec.network and spec.network.http_proxy),
                ("https_proxy", spec.network and spec.network.https_proxy),
            )
            if value
        }
    if phone_home is not None:
        data["phone_home"] = {"url": phone_home, "post": ["instance_id", "hostname"], "tries": TRIES}
    return data


def _user(spec: VmSpec) -> dict[str, Any]:
    user: dict[str, Any] = {"name": spec.username, "ssh_authorized_keys": list(spec.ssh_keys)}
    if spec.username != "root":
        user |= {"shell": "/bin/bash", "sudo": "ALL=(ALL) NOPASSWD:ALL", "groups": "sudo"}
    user["lock_passwd"] = spec.password is None
    return user


def _proxy_files(spec: VmSpec) -> list[dict[str, Any]]:
    """Settings of the container daemon, the container client and curl. APT has a setting of its own."""
    network = spec.network
    if network is None or not (network.http_proxy or network.https_proxy):
        return []
    http, https = network.http_proxy or "", network.https_proxy or network.http_proxy or ""
    around = ",".join(network.no_proxy)
    daemon = f'[Service]\nEnvironment="HTTP_PROXY={http}" "HTTPS_PROXY={https}" "NO_PROXY={around}"\n'
    client = {"proxies": {"default": {"httpProxy": http, "httpsProxy": https, "noProxy": around}}}
    curl = f'proxy = "{https or http}"\n' + (f'noproxy = "{around}"\n' if around else "")
    home = "/root" if spec.username == "root" else f"/home/{spec.username}"
    return [
        {"path": "/etc/systemd/system/docker.service.d/headrace-proxy.conf", "content": daemon},
        {"path": f"{home}/.docker/config.json", "content": json.dumps(client), "defer": home != "/root"},
        {"path": f"{home}/.curlrc", "content": curl, "defer": home != "/root"},
    ]


def mac(id: str, number: int) -> str:
    """The address of a machine's network card: the same for the same id, and administered locally."""
    return "52:54:00:" + hashlib.sha256(f"{id}/{number}".encode()).digest()[:3].hex(":")


def _network_config(id: str, network: Network | None) -> dict[str, Any]:
    """Version 2: the first card is offered its address; a second one is in the provider's network."""
    cards: dict[str, Any] = {"first": {"match": {"macaddress": mac(id, 0)}, "dhcp4": True}}
    if network is not None and network.interface is not None and network.ip is not None:
        bits = sum(int(part).bit_count() for part in (network.netmask or "255.255.255.0").split("."))
        cards["second"] = {"match": {"macaddress": mac(id, 1)}, "addresses": [f"{network.ip}/{bits}"]}
    return {"version": 2, "ethernets": cards}


def _text(content: object) -> str:
    """JSON, which is YAML too, with every member on a line of its own."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def iso(seed: Seed) -> bytes:
    """The seed as an ISO 9660 image with the names that cloud-init looks for."""
    disc = pycdlib.PyCdlib()
    disc.new(interchange_level=3, joliet=3, rock_ridge="1.09", vol_ident=LABEL)
    files = {
        "meta-data": seed.meta_data,
        "user-data": seed.user_data,
        "vendor-data": seed.vendor_data,
        "network-config": seed.network_config,
    }
    for number, (name, text) in enumerate(files.items()):
        data = text.encode()
        disc.add_fp(io.BytesIO(data), len(data), f"/FILE{number}.;1", rr_name=name, joliet_path=f"/{name}")
    image = io.BytesIO()
    disc.write_fp(image)
    disc.close()
    return image.getvalue()
