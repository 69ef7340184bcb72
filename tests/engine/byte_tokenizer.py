"""Text without a model: a token is a byte."""

from __future__ import annotations

from engine.vocabulary import Vocabulary


class ByteTokenizer:
    """Fake: a token is a byte; 0 is special."""

    vocabulary = Vocabulary([bytes([i]) for i in range(256)], frozenset({0}), False)
