"""Ask the model about its own answers, on an event loop: which is the best, and what is wrong with one."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import msgspec

from localchat.engine.events import Done, Finished, Text, Usage
from localchat.engine.request import GenerateRequest, Grammar, Message, Messages
from localchat.engine.stream import Stream
from localchat.errors import ContextExceeded
from localchat.tries import judge
from localchat.tries.collection import Tries
from localchat.tries.critique import Critique, critique

Generate: TypeAlias = Callable[[GenerateRequest], Awaitable[Stream]]
"""Sends a request to the engine that answered. Whoever passes it closes the stream."""


class ModelJudge:
    """Asks about the answers to one request, which must be a conversation."""

    def __init__(self, generate: Generate, request: GenerateRequest) -> None:
        assert isinstance(request.prompt, Messages)
        self._generate = generate
        self._request = request
        self._prompt = request.prompt
        self.spent: list[Usage] = []
        """Usage of the questions so far."""

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return sum(usage.completion_tokens for usage in self.spent)

    async def pick(self, tries: Tries) -> None:
        """Let the model pick one of the tries; without a verdict the first whole one stays."""
        whole = sorted(tries.whole) or sorted(tries.texts)
        place: int | None = None
        if len(whole) > 1:
            texts = [tries.texts[number] for number in whole]
            asked = judge.pick_messages(self._prompt.messages, texts)
            verdict = await self._verdict(asked, judge.pick_grammar(len(whole)))
            place = None if verdict is None else judge.picked(verdict, len(whole))
        tries.picked = whole[place or 0] if whole else 0

    async def critique(self, text: str) -> Critique:
        """Review an answer. The outcome keeps it unless a correction wins a comparison."""
        request = self._request
        steps = critique(self._prompt.messages, text, request.grammar, request.max_tokens)
        try:
            question = next(steps)
            while True:
                reply = await self._ask(
                    question.messages, question.grammar, question.max_tokens, greedy=question.greedy
                )
                question = steps.send(reply)
        except StopIteration as end:
            outcome: Critique = end.value
            return outcome

    async def _verdict(self, asked: tuple[Message, ...], grammar: Grammar) -> str | None:
        return await self._ask(asked, grammar, judge.JUDGE_TOKENS, greedy=True)

    async def _ask(
        self,
        asked: tuple[Message, ...],
        grammar: Grammar | None,
        max_tokens: int | None,
        *,
        greedy: bool = False,
    ) -> str | None:
        """The whole answer to a question; None if it is too long for the context or was cut off."""
        replace = msgspec.structs.replace
        prompt = replace(
            self._prompt, messages=asked, tools=(), tool_choice="none", continue_last=False
        )
        sampling = self._request.sampling
        stop = self._request.stop
        if greedy:
            sampling = replace(sampling, temperature=0.0)
            stop = ()
        request = replace(
            self._request,
            prompt=prompt,
            grammar=grammar,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            n=1,
            logprobs=None,
        )
        pieces: list[str] = []
        whole = False
        try:
            stream = await self._generate(request)
            async for event in stream:
                match event:
                    case Text(text=text):
                        pieces.append(text)
                    case Finished(reason=reason):
                        whole = reason == "stop"
                    case Done(usage=usage):
                        self.spent.append(usage)
        except ContextExceeded:
            return None
        text = "".join(pieces)
        return text if whole and text.strip() else None


def summed(first: Usage, more: Sequence[Usage]) -> Usage:
    """Usage of several requests together."""
    return Usage(
        first.prompt_tokens + sum(one.prompt_tokens for one in more),
        first.cached_tokens + sum(one.cached_tokens for one in more),
        first.completion_tokens + sum(one.completion_tokens for one in more),
        first.reasoning_tokens + sum(one.reasoning_tokens for one in more),
    )
