"""Spec of the tries at one answer. It imports nothing heavy, because every prompt imports it."""

from typing import TYPE_CHECKING, Literal

import msgspec

from localchat.errors import UsageError

if TYPE_CHECKING:
    from localchat.engine.request import GenerateRequest, Grammar
    from localchat.tries.vote import Extractor

Method = Literal["vote", "best_of"]


class TriesSpec(msgspec.Struct, frozen=True):
    """Method that makes one answer out of several tries, or improves a single one."""

    count: int = 1
    method: Method | None = None
    """How to choose among the tries. None if there is only one."""
    extractor: "Extractor | None" = None
    """Finds what a vote counts. None counts the last number of each try."""
    judge: bool = False
    """Let the model pick the best try."""
    critique: bool = False
    """Let the model review and correct its only try."""

    @property
    def needs_judge(self) -> bool:
        """Return True if the model has to judge answers."""
        return self.judge or self.critique

    def widen(self, request: "GenerateRequest") -> "GenerateRequest":
        """Return the request with one choice for each try. Raise UsageError if all would be equal."""
        if self.method is None:
            return request
        if request.sampling.temperature == 0:
            raise UsageError(
                "with temperature 0 every try gives the same answer", hint="temperature 0.7"
            )
        logprobs = request.logprobs
        if self.method == "best_of" and not self.judge and logprobs is None:
            logprobs = 0  # the log probability of each token, without alternatives
        return msgspec.structs.replace(request, n=self.count, logprobs=logprobs)


def vote_extractor(kind: str | None, grammar: "Grammar | None") -> "Extractor":
    """Return what a vote counts. Raise UsageError for an unknown kind.

    Without a kind, a vote counts whole answers if a grammar constrains them, and last numbers otherwise.
    """
    from localchat.tries import vote

    if kind is not None:
        return vote.extractor(kind)
    if grammar is None:
        return vote.last_number
    if grammar.kind == "json_schema":
        return vote.json_text
    return vote.folded_text


def refuse_guide(model: str, feature: str) -> None:
    """Raise UsageError if the built-in guide would have to judge answers. `model` is its name."""
    if model == "guide":
        raise UsageError(
            f"{feature}: the built-in guide cannot judge answers",
            hint="choose another model with -m MODEL; localchat list shows yours",
        )
