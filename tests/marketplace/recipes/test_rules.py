"""Which images are of use on which node."""

from __future__ import annotations

import pytest

from marketplace.nodes.rules import OPEN_TAG, PROPRIETARY_TAG
from marketplace.recipes.rules import suits

BOTH = frozenset({OPEN_TAG, PROPRIETARY_TAG})


@pytest.mark.parametrize(
    ("modules", "tags", "useful"),
    [
        ([], frozenset(), True),
        ([], frozenset({"VM"}), True),
        ([], frozenset({OPEN_TAG}), False),
        (["ProprietaryOnly"], frozenset({OPEN_TAG}), False),
        (["ProprietaryOnly"], frozenset({PROPRIETARY_TAG}), True),
        (["OpenOnly"], frozenset({PROPRIETARY_TAG}), False),
        (["OpenOnly"], frozenset({OPEN_TAG, "VM"}), True),
        (["OpenOrProprietary"], frozenset({PROPRIETARY_TAG}), True),
        (["ProprietaryOnly"], BOTH, True),
        (["OpenOnly"], BOTH, True),
        (["Unknown"], frozenset({OPEN_TAG}), True),
        (["ProprietaryOnly", "OpenOnly"], frozenset({OPEN_TAG}), True),
    ],
)
def test_an_image_suits_a_node_one_of_whose_gpus_loads_its_driver(
    modules: list[str], tags: frozenset[str], useful: bool
) -> None:
    assert suits(modules, tags) == useful
