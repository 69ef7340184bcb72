"""Waits between attempts, addresses, subjects, templates: pure."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.notify import rendering
from marketplace.notify.low_balance import rearm_at, step
from marketplace.notify.rendering import RenderingError, render
from marketplace.notify.rules import (
    FIRST_WAIT_US,
    LEASE_US,
    LONGEST_WAIT_US,
    MAX_ATTEMPTS,
    MAX_SUBJECT,
    SEND_US,
    AddressError,
    mail_address,
    subject_line,
    wait_us,
)
from marketplace.users.rules import email_key

ALWAYS = {"platform": "Headrace", "base_url": "https://headrace.example", "currency": "EUR"}


def test_waits_grow_to_a_bound_and_add_up_to_hours() -> None:
    waits = [wait_us(attempts) for attempts in range(1, MAX_ATTEMPTS)]
    assert waits[0] == FIRST_WAIT_US and waits == sorted(waits) and max(waits) == LONGEST_WAIT_US == wait_us(10**6)
    assert 7 * 3600 <= sum(waits) // 1_000_000 <= 9 * 3600
    assert SEND_US < LEASE_US


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("Ada.L+news@Example.com", "Ada.L+news@Example.com"),
        ("admin@localhost", "admin@localhost"),
        ("a@bücher.example", "a@xn--bcher-kva.example"),
        ("o'neil@x-y.example", "o'neil@x-y.example"),
    ],
)
def test_addresses(text: str, address: str) -> None:
    assert mail_address(text) == address
    assert email_key(text)


@given(st.text(max_size=40), st.text(max_size=40))
def test_an_address_that_gets_through_is_harmless(local: str, domain: str) -> None:
    try:
        address = mail_address(f"{local}@{domain}")
    except AddressError:
        return
    assert address.isascii() and address.isprintable() and address.count("@") == 1
    assert not set(address) & set(' ,;:<>()[]"\\\r\n\t\0')


@given(st.text(max_size=300))
def test_a_subject_is_one_line(text: str) -> None:
    line = subject_line(text)
    assert line.isprintable() and len(line) <= MAX_SUBJECT and line == line.strip()
    assert subject_line(line) == line


def values_of(template: str) -> dict[str, str]:
    """A value for everything that a template asks for."""
    from jinja2 import meta

    environment = rendering._environment()
    names: set[str] = set()
    for suffix in (".txt", ".html"):
        source = (rendering.FOLDER / (template + suffix)).read_text()
        names |= meta.find_undeclared_variables(environment.parse(source))
    return {name: f"<{name}>{{{{ 7 * 7 }}}}" for name in names - ALWAYS.keys()}


@pytest.mark.parametrize("template", sorted(path.stem for path in rendering.FOLDER.glob("*.txt")))
def test_every_template_renders_with_hostile_values(template: str) -> None:
    assert Path(rendering.FOLDER / f"{template}.html").exists()
    values = values_of(template)
    made = render(template, {**values, **ALWAYS})
    assert made.subject and made.subject.isprintable() and "{" not in made.subject.replace("{{ 7 * 7 }}", "")
    assert "Headrace" in made.text and "https://headrace.example" in made.html
    for name, value in values.items():
        assert value not in made.html, f"{name} is not escaped"
        assert "49" not in made.text
    assert "</html>" in made.html


def test_mails_speak_of_money_in_the_server_currency() -> None:
    low = {"owner": "", "available": "1.5", "threshold": "5", "rearm": "7.5"}
    made = render("low-balance", {**low, **ALWAYS})
    assert "1.5 EUR can still be spent" in made.text and "5&nbsp;EUR" in made.html
    assert "USD" in render("low-balance", {**low, **ALWAYS, "currency": "USD"}).text


@pytest.mark.parametrize("template", ["nothing", "../verify-email", "layout", "", "a/b", "verify-email\0"])
def test_templates_that_are_none(template: str) -> None:
    with pytest.raises(RenderingError):
        render(template, ALWAYS)


def test_a_value_that_is_missing_is_an_error_and_not_a_hole() -> None:
    with pytest.raises(RenderingError, match="link"):
        render("verify-email", ALWAYS)


@given(
    st.integers(1, 1000),
    st.lists(st.integers(-100, 3000), max_size=60),
)
def test_a_fall_is_told_once_until_the_balance_was_well_above(threshold: int, balances: list[int]) -> None:
    armed: bool | None = None
    told_at: int | None = None
    seen: list[int] = []
    for balance in balances:
        due = step(armed, balance, threshold)
        if due == "tell":
            assert balance < threshold and any(item >= threshold for item in seen)
            if told_at is not None:
                assert any(item >= rearm_at(threshold) for item in seen[told_at:])
            told_at = len(seen)
        elif armed and balance < threshold:
            raise AssertionError("a fall was not told")
        armed = armed if due is None else due == "arm"
        seen.append(balance)
    assert step(armed, 10**18, threshold) in (None, "arm") and step(armed, -1, 0) is None
