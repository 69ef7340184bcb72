"""Chat templates: a conversation to the text that the model was trained on, in a sandbox.

A template comes with the model's files, so it is untrusted code: jinja2's immutable sandbox keeps it from Python's
internals, and everything that it sees is plain data. The environment is that of transformers' apply_chat_template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.utils
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LOOP = frozenset({"first", "index", "index0", "last", "length", "revindex", "revindex0"})


class TemplateError(Exception):
    """The conversation cannot be rendered: the template refuses it, or is itself broken. The message is for the
    caller."""


class ChatTemplate:
    """One template and the special tokens that it may write by name."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """variables: bos_token, eos_token and the like. The template is compiled when it is first used."""
        self.source = source
        self._variables = dict(variables)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: object
    ) -> str:
        """Return the conversation as text. Raises TemplateError.

        add_generation_prompt: end with the opening of the assistant's answer. variables: more names for the template,
        such as tools or enable_thinking.
        """
        known = {"tools": None, "documents": None, **self._variables, **variables}
        try:
            template = _compile(self.source)
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **known)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the model's chat template is broken: line {error.lineno}: {error.message}") from error
        except jinja2.TemplateError as error:
            raise TemplateError(str(error.message or error)) from error
        except Exception as error:  # foreign code: adding None to text, a missing key, a division by zero may happen
            raise TemplateError(f"the chat template cannot render these messages: {error}") from error


class _Generation(Extension):
    """{% generation %} … {% endgeneration %} marks the assistant's text for training; here its content is just text."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> Node:
        """Replace the block by a call that returns what is in it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return str(caller())


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace() without names that begin with an underscore, a known way around the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Like jinja2's own: `self` must stay usable as a name in the template
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r} on a namespace")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which need not be asked about what `loop` says of itself: that is numbers and truths."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute as a template may see it."""
        if type(obj) is LoopContext and attribute in _LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = _Namespace
    environment.globals["strftime_now"] = _strftime_now
    template = environment.from_string(source)
    template.globals = dict(template.globals)  # jinja2's chain of dictionaries is walked key by key at each rendering
    return template


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which models were not trained on
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
