"""The command line: `headrace serve | node | relay | keys | models | audit | bench`. Each is imported when it runs."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import sys
import typing
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from marketplace.agent.options import add_node_options
from marketplace.relay.options import add_relay_options

ENVIRONMENT = "HEADRACE_"
MAX_DAYS = 36_500
"""Longest life of a key that ends at all."""
_OF_PEOPLE = (
    "public_url",
    "trusted_proxies",
    "smtp_url",
    "mail_from",
    "oauth_issuer",
    "oauth_name",
    "oauth_client_id",
    "oauth_client_secret",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    options = make_parser().parse_args(argv)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0  # `headrace keys list | head`


def make_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(prog="headrace", description="One pool of GPUs, one ledger.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _serve_parser(commands.add_parser("serve", help="run the gateway and its engine"))

    node = commands.add_parser("node", help="lend this machine to the customers of a server")
    add_node_options(node, _default)
    node.set_defaults(run=_command("node"))

    relay = commands.add_parser("relay", help="publish ports of nodes that nobody can reach")
    add_relay_options(relay, _default)
    relay.set_defaults(run=_command("relay"))

    keys = commands.add_parser("keys", help="create, list and revoke API keys").add_subparsers(
        required=True, metavar="ACTION"
    )
    create = keys.add_parser("create", help="make a key; its secret is shown once")
    create.add_argument("--name", default="key", help="what to call it (default: %(default)s)")
    create.add_argument("name", nargs="?", default=argparse.SUPPRESS, metavar="NAME", help="the same")
    create.add_argument("--email", default="", help="whose key it is; the first admin's by default")
    create.add_argument("--models", nargs="+", default=None, help="models that it may use; all by default")
    create.add_argument("--expires-days", type=_days, default=None, help="days until it expires; never by default")
    create.set_defaults(run=_command("keys_create"))
    listing = keys.add_parser("list", help="show every key, without secrets")
    listing.set_defaults(run=_command("keys_list"))
    revoke = keys.add_parser("revoke", help="make a key unusable, within a second, for ever")
    revoke.add_argument("key", help="its id, its prefix or its name")
    revoke.set_defaults(run=_command("keys_revoke"))

    models = commands.add_parser("models", help="models on offer").add_subparsers(required=True, metavar="ACTION")
    offered = models.add_parser("list", help="show every model that has a price")
    offered.set_defaults(run=_command("models_list"))

    audit = commands.add_parser("audit", help="prove every invariant of the ledger; exit status 1 where one fails")
    audit.set_defaults(run=_command("audit"))
    for one in (create, listing, revoke, offered, audit):
        _where(one)

    bench = commands.add_parser("bench", help="list the benchmarks, or run one")
    bench.add_argument("name", nargs="?", help="which; none lists them")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to it")
    bench.set_defaults(run=_command("bench"))
    return parser


def _command(name: str) -> Any:
    """A command that is imported when it runs."""

    def run(options: argparse.Namespace) -> int:
        from gateway import commands

        return int(getattr(commands, name)(options))

    return run


def _where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=Path(_default("data", "data")), help="data folder")
    parser.add_argument(
        "--database-url",
        default=_default("database_url", ""),
        help="address of the ledger; empty is in the data folder",
    )


def _days(text: str) -> float:
    days = float(text)
    if not 0 < days <= MAX_DAYS:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 and at most {MAX_DAYS}")
    return days


def _serve_parser(parser: argparse.ArgumentParser) -> None:
    from engine.config import EngineConfig
    from gateway.settings import Settings

    parser.epilog = (
        "Every option can be given as a variable in the environment instead: HEADRACE_PORT for --port. Payments are "
        "made by hand, unless HEADRACE_STRIPE_SECRET_KEY and HEADRACE_STRIPE_WEBHOOK_SECRET are set."
    )
    gateway = parser.add_argument_group("gateway")
    people = parser.add_argument_group("people: mail and signing in elsewhere")
    for field in msgspec.structs.fields(Settings):
        if field.name not in ("engine", "more_models"):
            group = people if field.name in _OF_PEOPLE else gateway
            _add_option(group, field, field_docs(Settings)[field.name])
    engine = parser.add_argument_group("engine")
    for field in msgspec.structs.fields(EngineConfig):
        if field.name == "model":
            text = (
                f"{field_docs(EngineConfig)['model']} Given more than once, several models. (default: {field.default})"
            )
            engine.add_argument("--model", action="append", help=text, metavar="X")
        else:
            _add_option(engine, field, field_docs(EngineConfig)[field.name])
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    from gateway.serve import serve

    return serve(read_settings(options))


def read_settings(options: argparse.Namespace) -> Any:
    """Settings from the parsed options of `serve`."""
    from engine.config import EngineConfig
    from gateway.settings import Settings

    chosen = dict(vars(options))
    first, *more = chosen["model"] or [_default("model", EngineConfig().model)]
    chosen |= {"model": first, "more_models": tuple(more)}
    chosen["lora"] = tuple(chosen["lora"] or ())
    engine = EngineConfig(**{name: chosen[name] for name in EngineConfig.__struct_fields__})
    own = {name: chosen[name] for name in Settings.__struct_fields__ if name != "engine"}
    return Settings(engine=engine, **own)


def _add_option(group: argparse._ArgumentGroup, field: msgspec.structs.FieldInfo, text: str) -> None:
    """One option for a field of a struct: its flag, type, choices and default."""
    flag = "--" + field.name.replace("_", "-")
    default = _default(field.name, field.default)
    text = text.replace("%", "%%")
    if field.type is bool:
        switch = group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
        switch.type = _truth
        return
    if typing.get_origin(field.type) is tuple:
        text = f"{text} May be given more than once."
        group.add_argument(
            flag, action="append", default=default.split(",") if default else None, help=text, metavar="X"
        )
        return
    choices = typing.get_args(field.type) if typing.get_origin(field.type) is typing.Literal else None
    kind: Any = _one_of(choices) if choices else field.type
    shown = f"{text} (default: {field.default})" if str(field.default) else text
    group.add_argument(flag, type=kind, choices=choices, default=default, help=shown, metavar=None if choices else "X")


def _one_of(choices: tuple[Any, ...]) -> Callable[[str], Any]:
    """Reads a choice. argparse itself does not look whether a default, which the environment may give, is one."""

    def read(text: str) -> Any:
        found = {str(choice): choice for choice in choices}
        if text not in found:
            raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(map(repr, choices))})")
        return found[text]

    return read


def _truth(text: str) -> bool:
    """Reads a switch from the environment."""
    truths = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in truths:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return truths[text.lower()]


def _default(name: str, fallback: Any) -> Any:
    """A field's default: its environment variable where that is set. argparse converts the text as it does a flag's."""
    return os.environ.get(ENVIRONMENT + name.upper(), fallback)


@cache
def field_docs(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The docstring that follows each field in the source of a struct."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for node, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[node.target.id] = " ".join(str(following.value.value).split())
    return docs


if __name__ == "__main__":
    sys.exit(main())
