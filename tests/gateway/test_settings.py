"""Every setting is an option with a help text, a default, and a variable in the environment."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig
from gateway.cli import field_docs, make_parser, read_settings
from gateway.settings import Paths, SettingError, Settings, default_database


def parse(*argv: str) -> Settings:
    return read_settings(make_parser().parse_args(["serve", *argv]))


def test_nothing_said_is_the_defaults() -> None:
    assert parse() == Settings()


def test_every_field_has_an_option_and_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "--help"])
    shown = capsys.readouterr().out
    for kind in (Settings, EngineConfig):
        docs = field_docs(kind)
        for name in kind.__struct_fields__:
            if name not in ("engine", "more_models"):  # the latter are --model, given more than once
                assert f"--{name.replace('_', '-')}" in shown
            assert len(docs[name]) > 10
    people = shown.partition("people: ")[2].partition("engine:")[0]
    assert re.findall(r"^  --([a-z-]+)", people, re.MULTILINE) == [
        *("public-url", "trusted-proxies", "smtp-url", "mail-from"),
        *("oauth-issuer", "oauth-name", "oauth-client-id", "oauth-client-secret"),
    ]


def test_options_have_the_types_of_their_fields() -> None:
    settings = parse(
        *("--host", "0.0.0.0", "--port", "0", "--data", "/x", "--drain-s", "2.5", "--quota-status", "402"),
        *("--model", "some/model", "--device", "cpu", "--max-running", "7", "--no-prefix-cache", "--threads", "2"),
    )
    assert (settings.host, settings.port, settings.data) == ("0.0.0.0", 0, Path("/x"))
    assert (settings.drain_s, settings.quota_status) == (2.5, 402)
    engine = settings.engine
    assert (engine.model, engine.device, engine.max_running) == ("some/model", "cpu", 7)
    assert (engine.prefix_cache, engine.threads) == (False, 2)
    assert msgspec.convert(msgspec.to_builtins(engine), EngineConfig) == engine


def test_the_environment_gives_defaults_and_options_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "9001")
    monkeypatch.setenv("HEADRACE_DATA", "/var/lib/headrace")
    monkeypatch.setenv("HEADRACE_MAX_RUNNING", "5")
    monkeypatch.setenv("HEADRACE_PREFIX_CACHE", "false")
    settings = parse()
    assert (settings.port, settings.data, settings.engine.max_running) == (9001, Path("/var/lib/headrace"), 5)
    assert settings.engine.prefix_cache is False
    assert parse("--port", "9002", "--prefix-cache").port == 9002
    assert parse("--prefix-cache").engine.prefix_cache is True


@pytest.mark.parametrize(
    "argv",
    [
        ["--port", "high"],
        ["--device", "tpu"],
        ["--nonsense"],
        ["--max-running", "1.5"],
        ["--log-level", "loud"],
        ["--quota-status", "500"],
    ],
)
def test_wrong_options_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_the_ledger_is_in_the_data_folder_unless_told() -> None:
    assert Settings(data=Path("/d")).database == default_database(Path("/d")) == "sqlite:////d/headrace.db"
    assert Settings(database_url="postgresql+psycopg://h/x").database == "postgresql+psycopg://h/x"
    assert Paths(Path("/d")).first_run == Path("/d/first-run.json")


@pytest.mark.parametrize(
    "argv",
    [
        ["--port", "99999"],
        ["--port", "-1"],
        ["--drain-s", "-1"],
        ["--slow-client-s", "0"],
        ["--request-timeout-s", "0"],
        ["--flush-ms", "-1"],
        ["--backlog", "0"],
        ["--max-running", "0"],
        ["--max-queued", "-1"],
        ["--oauth-issuer", "http://accounts.example.com"],
        ["--oauth-name", ""],
    ],
)
def test_values_that_cannot_be_are_named(argv: list[str]) -> None:
    with pytest.raises(SettingError, match=argv[0]):
        parse(*argv).check()
    parse().check()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("smtp-url", "mail.example.com:587"),
        ("smtp-url", "http://mail.example.com"),
        ("smtp-url", "smtp://"),
        ("smtp-url", "smtp://mail.example.com:many"),
        ("smtp-url", "smtp://mail.example.com/inbox"),
        ("smtp-url", "smtp://bob:hush@mail.example.com?tls=none"),
        ("smtp-url", "smtp://bob@mail.example.com"),
        ("smtp-url", "smtps://mail.example.com?tls=none"),
        ("smtp-url", "smtp://mail.example.com?ca=nowhere.pem"),
        ("smtp-url", "smtp://mail.example.com?tls=maybe"),
        ("mail-from", ""),
        ("mail-from", "Headrace"),
        ("mail-from", "Headrace <no-reply@example.com"),
        ("mail-from", "Headrace\nBcc: eve@example.com <no-reply@example.com>"),
        ("mail-from", "Headrace <no reply@example.com>"),
        ("public-url", "headrace.example.com"),
        ("public-url", "https://headrace.example.com/"),
        ("public-url", "https://headrace.example.com/#x"),
        ("public-url", "https://bob@headrace.example.com"),
        ("public-url", "javascript:alert(1)"),
        ("trusted-proxies", "*"),
        ("trusted-proxies", "10.0.0.1,"),
        ("trusted-proxies", "10.0.0.1/8"),
        ("trusted-proxies", "proxy.example.com"),
    ],
)
def test_where_mail_goes_and_what_its_links_begin_with_must_be_usable(option: str, value: str) -> None:
    with pytest.raises(SettingError, match=f"^--{option} ") as caught:
        parse(f"--{option}={value}").check()
    assert "hush" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["--smtp-url", "smtp://bob:p%40ss@mail.example.com:587"],
        ["--smtp-url", "smtps://mail.example.com"],
        ["--smtp-url", "smtp://127.0.0.1:25?tls=none"],
        ["--mail-from", "no-reply@example.com"],
        ["--mail-from", "The People of Headrace <no-reply@example.com>"],
        ["--public-url", "https://headrace.example.com:8443/pool"],
        ["--public-url", "http://[::1]:8000"],
        ["--trusted-proxies", "10.0.0.1, 192.168.0.0/16,fd00::/8"],
    ],
)
def test_usable_ways_of_mail_and_addresses_are_taken(argv: list[str]) -> None:
    parse(*argv).check()


def test_an_issuer_needs_a_registration() -> None:
    issuer = "https://accounts.example.com"
    with pytest.raises(SettingError, match="--oauth-client-id"):
        parse("--oauth-issuer", issuer).check()
    settings = parse("--oauth-issuer", issuer, "--oauth-client-id", "us", "--oauth-client-secret", "hush")
    settings.check()
    assert [(known.name, known.issuer, known.client_id) for known in settings.issuers] == [("SSO", issuer, "us")]
    assert "hush" not in repr(settings.issuers)
    assert Settings().issuers == []
