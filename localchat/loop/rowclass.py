"""Exact mode: which rows may share a step, so that logits do not depend on how many there are.

Logits of a row depend on the number of rows in its step; a runner states the classes of counts within which
they are bit-equal (`Capabilities.equal_rows`). A request in exact mode computes its prompt in steps of the
widest class and everything after in steps of one narrow class, padded where a step would be too small, so
that drafts, which make steps wider, change no token.
"""

from dataclasses import dataclass

from localchat.loop.backend import Capabilities, RowClass


@dataclass(frozen=True, slots=True)
class ExactClasses:
    """The two classes of a runner: for writing and for prompts."""

    writing: RowClass
    prompt: RowClass

    @staticmethod
    def of(capabilities: Capabilities) -> "ExactClasses":
        """The narrowest class with room for drafts, and the widest. Where none is stated, every count is
        taken to be equal: the runner knows of no difference."""
        most = capabilities.max_step_tokens
        classes = capabilities.equal_rows or (RowClass(1, most),)
        roomy = [one for one in classes if one.high > one.low]
        return ExactClasses(roomy[0] if roomy else classes[0], classes[-1])

    @property
    def apart(self) -> bool:
        """Whether writing and prompts cannot share a step."""
        return self.writing != self.prompt
