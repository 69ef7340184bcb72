"""What one request asks of the sampler: validated once, carried unchanged to the engine process."""

from __future__ import annotations

import msgspec

MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings of one sequence.

    The wire edge (gateway) checks ranges and names the field that is wrong; `verify` repeats the checks for library
    users.
    """

    max_tokens: int = 16
    """Most tokens to generate, at least 1."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are impossible before this many generated tokens."""
    temperature: float = 1.0
    """0 is greedy. Range [0, 2]."""
    top_p: float = 1.0
    """Nucleus mass, (0, 1]."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens whose probability is below min_p times the largest. Range [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL, arXiv 1909.05858). >
    0.
    """
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output. Range [-2, 2]."""
    presence_penalty: float = 0.0
    """Subtracted once when the token occurs in the output. Range [-2, 2]."""
    logit_bias: dict[int, float] = {}
    """Token id → value added to its logit. Values in [-100, 100]."""
    seed: int | None = None
    """Same seed, same tokens, whatever the batch. None draws one when the request enters the engine."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the sequence, besides the model's own end-of-sequence ids. They are not part of the text."""
    stop: tuple[str, ...] = ()
    """Strings that end the sequence; found by the client side's detokeniser, never seen by the engine process."""
    include_stop: bool = False
    """Keep the matched stop string in the text."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids (stop_token_ids still act)."""
    logprobs: int | None = None
    """None: no log-probabilities. k ≥ 0: the chosen token's, and those of the k most probable tokens (k ≤ 20)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def verify(self, vocab_size: int | None = None) -> None:
        """Raise ValueError, whose message starts with the field's name, when a value is out of range."""
        checks: tuple[tuple[str, bool, str], ...] = (
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must be between 0 and max_tokens"),
            ("temperature", 0.0 <= self.temperature <= 2.0, "must be between 0 and 2"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be greater than 0 and at most 1"),
            ("top_k", self.top_k >= 0, "must be 0 (off) or more"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "must be between 0 and 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "must be greater than 0 and at most 100"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must be between -2 and 2"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must be between -2 and 2"),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"must be between 0 and {MAX_LOGPROBS}",
            ),
            (
                "logit_bias",
                all(-100.0 <= b <= 100.0 for b in self.logit_bias.values()),
                "values must be in [-100, 100]",
            ),
            ("stop", all(self.stop), "must not contain an empty string"),
        )
        for name, ok, message in checks:
            if not ok:
                raise ValueError(f"{name} {message}")
        if vocab_size is not None:
            for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
                for token in ids:
                    if not 0 <= token < vocab_size:
                        raise ValueError(f"{name} token id {token} is outside the vocabulary of {vocab_size}")

    @property
    def greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature == 0.0
