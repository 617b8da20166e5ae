"""How often a request is tried, and how one answer is made of that."""

from dataclasses import dataclass

import msgspec

from localchat.engine.request import GenerateRequest, Grammar
from localchat.errors import UsageError
from localchat.tries.collection import Method, Tries
from localchat.tries.extractor import Extractor, extractor, folded_text, json_text, last_number

MOST_TRIES = 16


@dataclass(frozen=True, slots=True)
class TriesSpec:
    """More tries at one answer. With neither a method nor `critique`, there is one."""

    count: int = 1
    method: Method | None = None
    extractor: Extractor = last_number
    judge: bool = False
    """The model itself picks the best."""
    critique: bool = False

    @property
    def needs_judge(self) -> bool:
        """Return True if the model has to judge answers."""
        return self.judge or self.critique

    def begin(self) -> Tries:
        """The tries of a request that is sent now."""
        return Tries(self.count, self.method or "best_of", self.extractor)

    def widened(self, request: GenerateRequest) -> GenerateRequest:
        """The request with as many choices as there are tries. Raises UsageError."""
        if self.method is None:
            return request
        if request.sampling.temperature == 0:
            raise UsageError(
                "with temperature 0 every try gives the same answer", hint="temperature 0.7"
            )
        logprobs = request.logprobs
        if self.method == "best_of" and not self.judge and logprobs is None:
            logprobs = 0
        return msgspec.structs.replace(request, n=self.count, logprobs=logprobs)


def counted(kind: str | None, grammar: Grammar | None) -> Extractor:
    """What a vote counts. Without a kind a whole answer that a grammar shapes, else the last number.

    Raises UsageError.
    """
    if kind is not None:
        return extractor(kind)
    if grammar is None:
        return last_number
    if grammar.kind == "json_schema":
        return json_text
    return folded_text
