"""Requests and answers about recipes, their groups and their tags."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from marketplace.http.wire import Id, Wire
from marketplace.providers.rules import MAX_URL, check_url

MAX_LIST = 256


def _unique(values: list[str]) -> list[str]:
    if len(set(values)) != len(values):
        raise ValueError("each once")
    return values


def _printable(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise ValueError("printable characters, and no spaces around them")
    return text


Name = Annotated[str, StringConstraints(min_length=1, max_length=63), AfterValidator(_printable)]
Tag = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:+-]*$")]
Tags = Annotated[list[Tag], Field(max_length=64), AfterValidator(_unique)]
Description = Annotated[str, StringConstraints(max_length=1024, pattern=r"^[^\x00]*$")]
Url = Annotated[str, StringConstraints(max_length=MAX_URL), AfterValidator(check_url)]
ImageUrl = Annotated[str, StringConstraints(max_length=2048, pattern=r"^(https?|file)://[^\x00-\x20\x7f@]+$")]
Word = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_Arg = Annotated[str, StringConstraints(max_length=131_072, pattern=r"^[^\x00]*$")]


class VmDetails(Wire):
    """What a virtual machine begins from."""

    image_url: ImageUrl | None = None
    """missing only where whoever rents names the image"""
    image_sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    cloudinit_url: Annotated[str, StringConstraints(max_length=2048, pattern=r"^(https?://[^\x00-\x20]+)?$")] = ""
    os_family: Word | None = None
    architecture: Word | None = None


class DockerDetails(Wire):
    """What a container runs."""

    image: Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\x00\s]+$")]
    command: Annotated[list[_Arg], Field(max_length=MAX_LIST)] = Field(default_factory=list)
    env: Annotated[list[Annotated[list[_Arg], Field(min_length=2, max_length=2)]], Field(max_length=MAX_LIST)] = Field(
        default_factory=list
    )
    ports: Annotated[
        list[Annotated[str, StringConstraints(pattern=r"^([1-9][0-9]{0,4}:)?[1-9][0-9]{0,4}(/(tcp|udp))?$")]],
        Field(max_length=64),
    ] = Field(default_factory=list)


class VirtualMachine(Wire):
    """A recipe of a virtual machine."""

    details: VmDetails = Field(alias="VirtualMachine")


class Docker(Wire):
    """A recipe of a container."""

    details: DockerDetails = Field(alias="Docker")


class Owned(Wire):
    """Whose recipes it is about: the caller's own, unless a team, a provider, or everybody (`global`) is named."""

    team_id: Id | None = None
    provider: Name | None = None
    everybody: bool = Field(default=False, alias="global")


class AddRequest(Owned):
    """A new recipe."""

    name: Name
    description: Description = ""
    details: VirtualMachine | Docker
    group_name: Name | None = None
    tags: Tags = Field(default_factory=list)
    logo_url: Url | None = None
    instructions_url: Url | None = None


class RecipeAnswer(Wire):
    """A recipe."""

    id: str
    name: str
    description: str
    logo_url: str | None
    instructions_url: str | None
    tags: list[str]
    details: dict[str, Any]
    """`VirtualMachine` or `Docker`, with what it begins from"""


class AddAnswer(Wire):
    """The new recipe."""

    recipe: RecipeAnswer


class GroupAnswer(Wire):
    """A group, with those of its recipes that the caller may use."""

    name: str
    description: str
    logo_url: str | None
    metadata: dict[str, Any] | None
    """for clients: nothing here reads it"""
    tags: list[str]
    recipes: list[RecipeAnswer]


class ListAnswer(Wire):
    """Recipes by group, and those that are in none."""

    groups: list[GroupAnswer]
    other_recipes: list[RecipeAnswer]


class ByName(Wire):
    """Recipes of these names."""

    names: Annotated[list[Name], Field(min_length=1, max_length=100)] = Field(alias="Name")


class ByTag(Wire):
    """Recipes with one of these tags."""

    tags: Annotated[list[Tag], Field(min_length=1, max_length=100)] = Field(alias="Tag")


class ByGroup(Wire):
    """Recipes of these groups."""

    groups: Annotated[list[Name], Field(min_length=1, max_length=100)] = Field(alias="Group")


Selector = ByName | ByTag | ByGroup


class RemoveRequest(Owned):
    """Recipes to remove. Machines that were made by them stay."""

    selector: Selector


class RemoveAnswer(Wire):
    """The recipes that are gone."""

    removed_ids: list[str]


class UpdateImageRequest(Wire):
    """Another image for everybody's recipes of virtual machines; with `sync_nodes`, nodes fetch it now."""

    selector: Selector
    image_url: ImageUrl
    image_sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    sync_nodes: bool = False


class UpdateImageAnswer(Wire):
    """How many recipes have the image now, and how many nodes were asked to fetch it."""

    updated: int
    sync_requested_nodes: int


class AddGroupRequest(Wire):
    """A new group."""

    name: Name
    description: Description = ""
    logo_url: Url | None = None
    metadata: dict[str, Any] | None = None
    tags: Tags = Field(default_factory=list)


class ChangeGroupRequest(Wire):
    """What to change on a group. What is left out stays; null takes a logo or the metadata away."""

    name: Name
    new_name: Name | None = None
    description: Description | None = None
    logo_url: Url | None = None
    metadata: dict[str, Any] | None = None
    tags: Tags | None = None


class GroupRequest(Wire):
    """The group to remove. Its recipes stay."""

    name: Name


class TagRequest(Wire):
    """The tag to remove, also from whatever has it."""

    name: Tag


class AddTagRequest(TagRequest):
    """A new tag."""

    description: Description = ""


class ChangeTagRequest(TagRequest):
    """Another name or description for a tag. What is left out stays."""

    new_name: Tag | None = None
    description: Description | None = None


class Named(Wire):
    """The group or tag that it was done to, as it is called now."""

    name: str
