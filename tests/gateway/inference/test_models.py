"""Model lists: what a key may use, with exact prices."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import openai
import pytest


def test_the_list_and_one_model(shared: Any) -> None:
    client = shared.client()
    (listed,) = client.models.list().data
    one = client.models.retrieve("tiny")
    assert listed == one
    assert (one.id, one.object, one.owned_by) == ("tiny", "model", "headrace")
    assert one.created > 1_700_000_000
    extra = one.model_extra
    assert extra["context_length"] == 8192
    pricing = extra["pricing"]
    assert pricing == {"prompt": "0.00000002", "completion": "0.00000006", "input_cache_read": "0.00000001"}
    assert Decimal(pricing["prompt"]) * 1_000_000 == Decimal("0.02")


def test_an_unknown_model_is_404(shared: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        shared.client().models.retrieve("org/other-model")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "org/other-model" in caught.value.message
