"""Which payment provider a gateway has: from the environment, without a trace of the secrets anywhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gateway.cli import main, make_parser
from gateway.payments import API_BASE, SECRET_KEY, WEBHOOK_SECRET, payments_of
from gateway.settings import SettingError
from marketplace.payments.manual import ManualProvider
from marketplace.payments.port import ProviderUnavailableError
from marketplace.payments.stripe_provider import StripeProvider

SECRETS = {SECRET_KEY: "sk_live_hush", WEBHOOK_SECRET: "whsec_quiet"}


def test_without_secrets_payments_are_made_by_hand() -> None:
    assert isinstance(payments_of({}), ManualProvider)
    assert isinstance(payments_of({SECRET_KEY: "", WEBHOOK_SECRET: "", API_BASE: "https://x"}), ManualProvider)


def test_with_both_secrets_they_are_made_through_stripe_and_nothing_inherits_or_shows_them() -> None:
    environment = {**SECRETS, "PATH": "/bin"}
    provider = payments_of(environment)
    assert isinstance(provider, StripeProvider) and not provider.by_hand
    assert environment == {"PATH": "/bin"}
    assert not any(secret in repr(provider) for secret in SECRETS.values())


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({SECRET_KEY: "sk_live_hush"}, WEBHOOK_SECRET),
        ({WEBHOOK_SECRET: "whsec_quiet"}, SECRET_KEY),
        ({**SECRETS, API_BASE: "http://stripe.example.com"}, API_BASE),
        ({**SECRETS, API_BASE: "https://stripe.example.com/v1"}, API_BASE),
        ({**SECRETS, API_BASE: "http://127.0.0.1@example.com"}, API_BASE),
    ],
)
def test_what_cannot_be_is_named_without_its_secrets(environment: dict[str, str], word: str) -> None:
    with pytest.raises(SettingError, match=word) as caught:
        payments_of(dict(environment))
    assert not any(secret in str(caught.value) for secret in SECRETS.values())


def test_a_server_that_stands_in_for_stripe_is_asked_instead() -> None:
    provider = payments_of({**SECRETS, API_BASE: "http://127.0.0.1:9"})  # nobody listens there
    with pytest.raises(ProviderUnavailableError, match="APIConnectionError"):
        provider.find_intent("pi_1")


def test_a_missing_library_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "marketplace.payments.stripe_provider")
    monkeypatch.setitem(sys.modules, "stripe", None)
    with pytest.raises(SettingError, match=r"pip install 'headrace\[payments\]'"):
        payments_of(dict(SECRETS))


def test_the_help_text_names_the_variables_and_shows_none_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "--help"])
    shown = capsys.readouterr().out
    assert SECRET_KEY in shown and not any(secret in shown for secret in SECRETS.values())


def test_half_a_setup_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (WEBHOOK_SECRET, API_BASE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(SECRET_KEY, "sk_live_hush")
    assert main(["serve", "--data", str(tmp_path / "data")]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("headrace: ") and WEBHOOK_SECRET in said.err
    assert "hush" not in said.out + said.err
    assert not (tmp_path / "data").exists()
