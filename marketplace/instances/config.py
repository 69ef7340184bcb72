"""What goes into an instance, from a request: image, keys, ports, volumes, and what is secret about it."""

from __future__ import annotations

from typing import Literal

import msgspec

from marketplace.http.acting import Party
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call
from marketplace.instances.secrets import Secret
from marketplace.instances.wire import (
    DockerConfig,
    KeysById,
    KeysByName,
    Mounts,
    PublicKeys,
    RentRequest,
    SshKeys,
    VirtualMachine,
    VmConfig,
    Volumes,
)
from marketplace.recipes import book
from marketplace.recipes import service as recipes
from marketplace.recipes.service import Start
from marketplace.ssh_keys import service as ssh_keys
from marketplace.ssh_keys.rules import check_public_key
from marketplace.ssh_keys.service import UnknownSshKeyError
from marketplace.store.db import ReadUnit
from marketplace.users.permissions import Permission
from marketplace.users.rules import new_password

_FILE = "file://"
MAX_PORT = 65_535
Port = tuple[int, str, int | None]
"""A port inside, its protocol, and the number wished for outside."""


class Inside(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into an instance."""

    kind: Literal["VirtualMachine", "Container"]
    image: str
    image_path: str | None = None
    image_tags: frozenset[str] = frozenset()
    """driver tags of a catalog image"""
    ssh_keys: list[str] = []
    ports: list[Port] = []
    mounts: list[tuple[str, str]] = []
    secret: Secret = Secret()


def inside(call: Call, unit: ReadUnit, request: RentRequest, mine: Party) -> Inside:
    """Read what goes into it. Refusal: ValidationFailed, SshKeyNotFound, PermissionDenied."""
    if isinstance(request.config, VirtualMachine):
        return _vm(call, unit, request.config.vm, mine, request)
    return _container(request.config.docker, request)


def _vm(call: Call, unit: ReadUnit, asked: VmConfig, mine: Party, request: RentRequest) -> Inside:
    start = _start(call, unit, asked, request)
    image = start.image_url or ""
    if not image and request.reuse_environment_id is None:
        raise Refusal(Code.VALIDATION_FAILED, "config: an image_url is missing", param="config")
    path = None
    if image.startswith(_FILE):
        if asked.image_url and Permission.INSTANCES_WRITE_ALL not in call.caller.permissions:
            raise Refusal(Code.PERMISSION_DENIED, "Files of nodes are for admins.", param="config")
        image, path = "", image.removeprefix(_FILE)
    keys = _keys(call, unit, asked.ssh_key, mine)
    return Inside(
        kind="VirtualMachine",
        image=image,
        image_path=path,
        image_tags=recipes.tags_of_image(unit, image) if image else frozenset(),
        ssh_keys=keys,
        ports=_ports([*asked.ports, *(request.ports or [])]),
        mounts=_mounts(asked.volumes),
        secret=Secret(password=None if keys else new_password(call.context.random), user_data=_user_data(asked, start)),
    )


def _start(call: Call, unit: ReadUnit, asked: VmConfig, request: RentRequest) -> Start:
    """What it begins from: the image that was asked for, or that of the recipe. Refusal: RecipeNotFound."""
    if asked.image_url or request.recipe is None or request.reuse_environment_id is not None:
        return Start(asked.image_url, "")
    caller = call.caller
    person = caller.user is not None
    mine = book.usable(user_id=caller.id if person else None, team_id=None if person else caller.id)
    found = recipes.start_of(unit, request.recipe, mine)
    if found is None:
        raise Refusal(Code.RECIPE_NOT_FOUND, "There is no such recipe of a virtual machine.", param="recipe")
    return found


def _container(asked: DockerConfig, request: RentRequest) -> Inside:
    env = {one[0]: one[1] for one in asked.env}
    if any(not name or "=" in name for name in env):
        raise Refusal(Code.VALIDATION_FAILED, "config: a variable's name is not empty and has no '='", param="config")
    login = None if asked.registry_auth is None else asked.registry_auth.login
    return Inside(
        kind="Container",
        image=asked.image,
        ports=_ports([*asked.ports, *(request.ports or [])]),
        mounts=_mounts(asked.volumes),
        secret=Secret(
            env=env,
            command=asked.command,
            registry_username=None if login is None else login.username,
            registry_password=None if login is None else login.password,
        ),
    )


def _user_data(asked: VmConfig, start: Start) -> str | None:
    """The renter's own text for cloud-init, else the recipe's; commands without a first line that names their kind are
    a shell script."""
    text, url = asked.cloudinit_commands, asked.cloudinit_url
    if text and url:
        raise Refusal(Code.VALIDATION_FAILED, "config: either cloudinit_url or cloudinit_commands", param="config")
    url = url or (None if text else start.cloudinit_url)
    if url:
        return f"#include\n{url}\n"
    if not text:
        return None
    return text if text.startswith("#") else f"#!/bin/sh\n{text}\n"


def _keys(call: Call, unit: ReadUnit, asked: SshKeys | None, mine: Party) -> list[str]:
    if asked is None:
        return []
    if isinstance(asked, PublicKeys):
        try:
            return [check_public_key(key) for key in asked.keys]
        except ValueError as error:
            raise Refusal(Code.VALIDATION_FAILED, f"config: an SSH key: {error}", param="config") from error
    owners = list(dict.fromkeys([(mine.kind, mine.id), (call.caller.kind, call.caller.id)]))
    names = asked.names if isinstance(asked, KeysByName) else None
    ids = asked.ids if isinstance(asked, KeysById) else None
    try:
        return ssh_keys.resolve(unit, owners, names=names, ids=ids)
    except UnknownSshKeyError as error:
        raise Refusal(Code.SSH_KEY_NOT_FOUND, "There is no such SSH key.", param="config") from error


def _ports(asked: list[str]) -> list[Port]:
    """Read ports like 22, 53/udp and 8080:80/tcp; each inside port once."""
    found: dict[tuple[int, str], Port] = {}
    for text in asked:
        numbers, _, proto = text.partition("/")
        outside, _, guest = numbers.rpartition(":")
        port = (int(guest), proto or "tcp", int(outside) if outside else None)
        if max(port[0], port[2] or 0) > MAX_PORT:
            raise Refusal(Code.VALIDATION_FAILED, f"ports: {text} is beyond {MAX_PORT}", param="config")
        found.setdefault(port[:2], port)
    return list(found.values())


def _mounts(asked: Volumes) -> list[tuple[str, str]]:
    if not isinstance(asked, Mounts):
        return []
    mounts = [(one.volume.ids[0], one.mount_path) for one in asked.mounts]
    if len({name for name, _ in mounts}) != len(mounts) or len({path for _, path in mounts}) != len(mounts):
        raise Refusal(Code.VALIDATION_FAILED, "config: a volume, and a path, is named twice", param="config")
    return mounts
