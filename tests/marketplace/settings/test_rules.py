"""Settings: defaults, bounds, what was stored by another version."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.settings import rules
from marketplace.settings.rules import DEFAULTS, AppSettings, SettingError, check, read

NAMES = [field.name for field in msgspec.structs.fields(AppSettings)]


def test_the_defaults_are_the_promised_ones() -> None:
    assert DEFAULTS.erase_grace_period == 0
    assert DEFAULTS.erase_stray_grace_period == 72 * 3600
    assert DEFAULTS.vm_readiness_timeout == 600
    assert DEFAULTS.allow_custom_instances is False
    assert DEFAULTS.signup_bonus == 10**9
    assert (DEFAULTS.balance_grace_period, DEFAULTS.volume_grace_period) == (3600, 7 * 86_400)
    assert check(DEFAULTS) == read({}) == DEFAULTS


def test_every_setting_is_described() -> None:
    assert sorted(rules.descriptions()) == sorted(NAMES)
    assert all(text.endswith(".") for text in rules.descriptions().values())


@given(st.dictionaries(st.sampled_from([*NAMES, "of_another_version"]), st.text(max_size=12) | st.integers().map(str)))
def test_what_is_stored_wrongly_counts_as_not_stored(stored: dict[str, str]) -> None:
    settings = read(stored)
    for field in msgspec.structs.fields(AppSettings):
        value = getattr(settings, field.name)
        assert msgspec.convert(value, type=field.type) == value
        if field.name not in stored:
            assert value == getattr(DEFAULTS, field.name)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("payment_minimum", {"payment_minimum": 2, "payment_maximum": 1}),
        ("server_currency", {"server_currency": "JPY"}),
        ("server_currency", {"server_currency": "KWD"}),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(name: str, values: dict[str, object]) -> None:
    with pytest.raises(SettingError) as refused:
        check(msgspec.structs.replace(DEFAULTS, **values))
    assert refused.value.name == name
