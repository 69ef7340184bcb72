"""From a template and its values to what a person reads: a subject, a text and the same in HTML.

A mail's two templates lie beside each other: NAME.txt, whose first line is the subject, and NAME.html. Values are data:
they are never read as templates, in HTML they are escaped, and a subject is always one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec
from jinja2 import FileSystemLoader, StrictUndefined, Template, TemplateError, TemplateNotFound
from jinja2.sandbox import ImmutableSandboxedEnvironment

from marketplace.notify.rules import subject_line

FOLDER = Path(__file__).parent / "templates"


class RenderingError(Exception):
    """There is no such template, or it wants a value that is not there."""


class Rendered(msgspec.Struct, frozen=True):
    """What a mail says."""

    subject: str
    text: str
    html: str


def render(template: str, values: Mapping[str, str]) -> Rendered:
    """Fill in a template. RenderingError."""
    try:
        subject, text, html = _load(template)
        return Rendered(subject_line(subject.render(values)), text.render(values).strip() + "\n", html.render(values))
    except TemplateError as error:
        raise RenderingError(f"template {template}: {type(error).__name__}: {error}") from error


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        autoescape=lambda name: name is not None and name.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _load(name: str) -> tuple[Template, Template, Template]:
    environment = _environment()
    if not name.replace("-", "").replace("_", "").isalnum():
        raise TemplateNotFound(name)
    assert environment.loader is not None
    source, _, _ = environment.loader.get_source(environment, f"{name}.txt")
    subject, _, text = source.partition("\n")
    return environment.from_string(subject), environment.from_string(text), environment.get_template(f"{name}.html")
