"""What `headrace node` says where it cannot begin, and what it leaves out where something is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from marketplace.agent import main
from marketplace.agent.credentials import ENVIRONMENT, CredentialError, load
from marketplace.agent.main import NodeError, run
from marketplace.agent.options import NodeSettings
from marketplace.agent.records import Record, Records
from marketplace.agent.wire import ContainerSpec

SERVER = "http://127.0.0.1:9"
QEMU, PODMAN = ("qemu-system-x86_64", "qemu-img"), ("podman",)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says which programs are installed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def install(*names: str) -> None:
        for name in names:
            (folder / name).write_text("#!/bin/sh\n")
            (folder / name).chmod(0o755)

    return install


@pytest.mark.parametrize(
    ("change", "key", "said"),
    [
        ({}, "", "there is no key: set HEADRACE_NODE_KEY, or write it to "),
        ({}, "hr_u_mine", "HEADRACE_NODE_KEY is no key of a node: those begin with hr_n_"),
        ({"server": "localhost:8000"}, "hr_n_x", "--server is not like https://headrace.example.com: localhost:8000"),
        ({"server": "http://"}, "hr_n_x", "--server is not like https://headrace.example.com: http://"),
        ({"server": "http://here:port"}, "hr_n_x", "--server is not like https://headrace.example.com: http://here"),
        ({}, "hr_n_\N{LATIN SMALL LETTER E WITH ACUTE}", "HEADRACE_NODE_KEY is no key of a node: it has more in it"),
        ({"credentials": Path("/")}, "", "/ cannot be read"),
        ({"data": Path("/dev/null/node")}, "hr_n_x", "the folder /dev/null/node cannot be used"),
        ({}, "hr_n_x", "qemu-system-x86_64 and qemu-img not found, podman not found; install QEMU or podman"),
        ({"driver": "podman"}, "hr_n_x", "nothing can be run here: podman not found"),
        ({"driver": "qemu"}, "hr_n_x", "nothing can be run here: qemu-system-x86_64 and qemu-img not found"),
    ],
)
def test_what_keeps_a_node_from_beginning_is_named_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tools: Any,
    change: dict[str, Any],
    key: str,
    said: str,
) -> None:
    monkeypatch.setenv(ENVIRONMENT, key)
    settings = {"server": SERVER, "data": tmp_path / "node", **change}
    assert run(NodeSettings(**settings)) == 1
    told = capsys.readouterr().err.strip()
    assert told.startswith("headrace node: ") and said in told and len(told.splitlines()) == 1
    assert "hr_u_mine" not in told


def test_a_kind_whose_program_is_missing_is_left_out_unless_there_are_machines_of_it(
    tmp_path: Path, tools: Any
) -> None:
    settings = NodeSettings(server=SERVER, data=tmp_path)
    records = Records(tmp_path / "instances", durable=False)
    tools(*QEMU)
    assert main._kinds(settings, records) == ["VirtualMachine"]
    record = Record(id="a", spec=ContainerSpec(name="c", image="busybox"), stage="Created", created_at=0)
    records.put(record)
    assert main._kinds(settings, records) == ["VirtualMachine", "Container"], "nothing is concluded about it"
    tools(*PODMAN)
    assert main._kinds(NodeSettings(server=SERVER, data=tmp_path, driver="podman"), records) == ["Container"]
    socket = NodeSettings(server=SERVER, data=tmp_path, driver="podman", container_socket=tmp_path / "docker.sock")
    (tmp_path / "bin" / "podman").unlink()
    assert main._kinds(socket, Records(tmp_path / "none", durable=False)) == ["Container"]
    with pytest.raises(NodeError, match="podman not found"):
        main._kinds(NodeSettings(server=SERVER, data=tmp_path, driver="podman"), Records(tmp_path / "no"))


def test_a_file_with_a_token_and_nothing_else_loads_and_another_key_does_not(tmp_path: Path) -> None:
    file = tmp_path / "credentials.json"
    file.write_text("eyJh.eyJz-d.c2ln_\n")
    found = load({}, file)
    assert found.headers() == {"Authorization": "Bearer eyJh.eyJz-d.c2ln_"} and found.deprecated is not None
    for text in ("hr_u_mine", '{"api_key": "hr_t_ours"}'):
        file.write_text(text)
        with pytest.raises(CredentialError, match=r"credentials.json is no key of a node: those begin with hr_n_"):
            load({}, file)
