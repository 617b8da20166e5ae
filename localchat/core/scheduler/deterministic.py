"""Deterministic (exact) mode: the logits of a row do not depend on what else its step computes.

Logits of a row depend on the number of rows in its step; a runner states the classes of counts within which
they are bit-equal (`Capabilities.equal_rows`). A request in exact mode decodes in steps of one class, padded
where a step would be too small, so that drafts, which make steps wider, change no token. No class is wide
enough for prompts: they are computed alone, in chunks that end at multiples of EXACT_CHUNK_TOKENS.

The idea is that of batch-invariant kernels, with the batch held constant instead of the kernels.
"""

from collections.abc import Sequence as Several

from localchat.backend_api.interface import Capabilities, RowClass
from localchat.core.scheduler.step_builder import StepBuilder
from localchat.core.sequence import Sequence

EXACT_CHUNK_TOKENS = 64


def decode_class(capabilities: Capabilities) -> RowClass | None:
    """The narrowest class with room for drafts, else the first; None if the runner states no difference."""
    classes = capabilities.equal_rows
    roomy = [one for one in classes if one.high > one.low]
    return roomy[0] if roomy else next(iter(classes), None)


class ExactPolicy:
    """Chooses the rows of steps in exact mode."""

    def __init__(self, capabilities: Capabilities) -> None:
        self._class = decode_class(capabilities)
        self._chunk_tokens = min(EXACT_CHUNK_TOKENS, capabilities.max_step_tokens)
        self._max_step_tokens = capabilities.max_step_tokens

    def applies_to(self, sequence: Sequence) -> bool:
        """Whether the sequence may only be computed in steps of this policy."""
        return sequence.request_state.exact and self._class is not None

    def prefill_row(
        self, step: StepBuilder, running: Several[Sequence], most_tokens: int | None
    ) -> Sequence | None:
        """Choose one prompt for a step of its own, and bound the step to its next chunk.

        The chunks are the same whenever the prompt is computed. `most_tokens` bounds them further where
        memory is short.
        """
        assert self._class is not None
        ready = [one for one in running if self.applies_to(one) and one.is_prefill]
        if not ready:
            return None
        sequence = min(ready, key=lambda one: one.last_step)
        step.tokens_left = self._chunk_tokens - sequence.launched % self._chunk_tokens
        if not sequence.in_prompt:
            # Preempted while it decoded: its next token is sampled in a step of its class, as always.
            step.tokens_left = min(step.tokens_left, sequence.needs - 1)
        if most_tokens is not None:
            step.tokens_left = min(step.tokens_left, most_tokens)
        step.pad_to = self._class.low
        return sequence

    def decode_rows(
        self, step: StepBuilder, running: Several[Sequence]
    ) -> tuple[list[Sequence], int]:
        """Sequences for a decode step, longest waiting first, and the tokens of each."""
        assert self._class is not None
        step.tokens_left = min(self._class.high, self._max_step_tokens)
        step.pad_to = self._class.low
        ready = [
            one for one in running if self.applies_to(one) and one.needs and not one.is_prefill
        ]
        ready.sort(key=lambda one: one.last_step)
        return ready, max(1, step.tokens_left // max(1, len(ready)))
