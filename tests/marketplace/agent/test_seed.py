"""Seeds of virtual machines, read back from the disc."""

from __future__ import annotations

import io
import json
from typing import Any

import pycdlib
import pytest

from marketplace.agent.seed import TRIES, host_name, iso, mac, make_seed, vendor_data
from marketplace.agent.wire import Network, VmSpec

KEY = "ssh-ed25519 AAAAC3Nza me@home"


def spec(**fields: Any) -> VmSpec:
    return VmSpec(**{"name": "Box", "vcpu": 1, "dram_bytes": 1, "disk_bytes": 1, "ssh_keys": [KEY], **fields})


def on_disc(image: bytes) -> dict[str, str]:
    disc = pycdlib.PyCdlib()
    disc.open_fp(io.BytesIO(image))
    assert disc.pvd.volume_identifier.decode("ascii").strip() == "CIDATA"
    found = {}
    for child in disc.list_children(joliet_path="/"):
        name = child.file_identifier().decode("utf-16-be")
        if not child.is_dir():
            text = io.BytesIO()
            disc.get_file_from_iso_fp(text, joliet_path=f"/{name}")
            found[name] = text.getvalue().decode()
    disc.close()
    return found


def test_the_renters_text_is_on_the_disc_as_it_was_given() -> None:
    text = "#cloud-config\npackages: [ünïcode]\r\n# the end without a newline"
    files = on_disc(iso(make_seed("i-1", spec(user_data=text), phone_home=None)))
    assert files["user-data"] == text
    assert json.loads(files["meta-data"]) == {"instance-id": "i-1", "local-hostname": "box"}
    assert set(files) == {"meta-data", "user-data", "vendor-data", "network-config"}


def test_what_the_node_adds_is_the_vendors() -> None:
    seed = make_seed("i-1", spec(username="ubuntu"), phone_home="http://10.0.2.2:1/phone_home/i-1/t")
    assert seed.vendor_data.startswith("#cloud-config\n")
    data = json.loads(seed.vendor_data.removeprefix("#cloud-config\n"))
    (user,) = data["users"]
    assert (user["name"], user["ssh_authorized_keys"], user["lock_passwd"]) == ("ubuntu", [KEY], True)
    assert data["phone_home"]["tries"] == TRIES
    assert data["phone_home"]["url"].endswith("/i-1/t")
    assert data["ssh_pwauth"] is False


def test_a_password_opens_only_the_renters_user() -> None:
    data = vendor_data(spec(username="root", password="s3cret", ssh_keys=[]), phone_home=None)
    assert data["chpasswd"]["users"] == [{"name": "root", "password": "s3cret", "type": "text"}]
    assert (data["ssh_pwauth"], data["disable_root"]) == (True, False)


def test_the_networks_proxy_reaches_apt_the_container_daemon_its_client_and_curl() -> None:
    network = Network(http_proxy="http://p:3128", https_proxy="http://p:3129", no_proxy=["10.0.0.0/8", ".lan"])
    data = vendor_data(spec(username="root", network=network), phone_home=None)
    assert data["apt"] == {"http_proxy": "http://p:3128", "https_proxy": "http://p:3129"}
    files = {one["path"]: one["content"] for one in data["write_files"]}
    assert '"NO_PROXY=10.0.0.0/8,.lan"' in files["/etc/systemd/system/docker.service.d/headrace-proxy.conf"]
    assert json.loads(files["/root/.docker/config.json"])["proxies"]["default"]["httpsProxy"] == "http://p:3129"
    assert 'noproxy = "10.0.0.0/8,.lan"' in files["/root/.curlrc"]
    assert "write_files" not in vendor_data(spec(), phone_home=None)


def test_a_card_in_the_providers_network_has_its_address() -> None:
    network = Network(ip="10.7.0.9", netmask="255.255.252.0", interface="br7")
    cards = json.loads(make_seed("i-1", spec(network=network), phone_home=None).network_config)["ethernets"]
    assert cards["second"] == {"match": {"macaddress": mac("i-1", 1)}, "addresses": ["10.7.0.9/22"]}
    assert cards["first"]["dhcp4"] is True
    assert mac("i-1", 0) != mac("i-1", 1) != mac("i-2", 1)


@pytest.mark.parametrize(
    ("name", "host"),
    [("My.Box_1", "my-box-1"), ("--", "instance"), ("ä" * 5, "instance"), ("a" * 80, "a" * 63)],
)
def test_names_become_names_of_hosts(name: str, host: str) -> None:
    assert host_name(name) == host
