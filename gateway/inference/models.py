"""`GET /v1/models` and `GET /v1/models/{id}`: what a key may use, with context lengths and prices."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.admission.keymap import KeyState
from gateway.fleet.catalogue import Catalogue, Model, per_token
from gateway.inference import errors

OWNER = "headrace"


def list_models(catalogue: Catalogue, key: KeyState) -> bytes:
    """The list object with the models that the key may use."""
    shown = [_render(model) for model in catalogue if model.price is not None and key.may_use(model.name)]
    return orjson.dumps({"object": "list", "data": shown})


def one_model(catalogue: Catalogue, key: KeyState, name: str) -> bytes:
    """One model object. Raises ApiError (404) for an unknown model and for one outside the key's scope alike."""
    model = catalogue.find(name)
    if model is None or model.price is None or not key.may_use(name):
        raise errors.model_not_found(name)
    return orjson.dumps(_render(model))


def _render(model: Model) -> dict[str, Any]:
    assert model.price is not None
    price = model.price.price
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": OWNER,
        "context_length": model.max_context,
        "max_output_tokens": model.max_context,
        "pricing": {
            "prompt": per_token(price.prompt),
            "completion": per_token(price.completion),
            "input_cache_read": per_token(price.cached),
        },
        "default_parameters": dict(model.recommended),
        "price_version": model.price.id,
    }
