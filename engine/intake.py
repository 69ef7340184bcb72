"""What is looked at of a request before an engine takes it: its own numbers, against those of the model."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from engine.wire import RefusalCode, Submit


class UnfitError(Exception):
    """A request that no engine of this kind can serve. Its text is for the sender."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code: RefusalCode = code


@dataclass(frozen=True, slots=True)
class Intake:
    """What requests have to fit."""

    vocab_size: int
    max_context: int
    max_edits: int | None
    """most entries of logit_bias and tokens that end an answer together; None: any number"""
    eos_ids: tuple[int, ...]
    embeds: bool = False
    """the model gives vectors, and no token behind its prompt"""

    def read(self, submit: Submit) -> array[int]:
        """Return the prompt's tokens. Raises UnfitError for what cannot be served."""
        params = submit.params
        prompt = array("i")
        if not submit.prompt or len(submit.prompt) % prompt.itemsize:
            raise UnfitError("invalid", "prompt must be one or more int32 token ids")
        prompt.frombytes(submit.prompt)
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            bad = next(token for token in prompt if not 0 <= token < self.vocab_size)
            raise UnfitError("invalid", f"prompt token id {bad} is outside the vocabulary of {self.vocab_size}")
        try:
            params.verify(self.vocab_size)
        except ValueError as error:
            raise UnfitError("invalid", str(error)) from error
        if self.embeds and params.max_tokens != 1:
            text = f"max_tokens must be 1 for a model that embeds, which generates nothing, not {params.max_tokens}"
            raise UnfitError("invalid", text)
        if len(prompt) >= self.max_context:
            raise UnfitError(
                "too_long",
                f"prompt of {len(prompt)} tokens + max_tokens {params.max_tokens} is over the context of"
                f" {self.max_context} tokens; a prompt may have at most {self.max_context - 1}",
            )
        edits = len(params.logit_bias) + len(params.stop_token_ids) + len(self.eos_ids)
        if self.max_edits is not None and edits > self.max_edits:
            text = f"logit_bias has room for {self.max_edits} tokens, those that end an answer included"
            raise UnfitError("invalid", text)
        return prompt
