"""Judge: a model reviews its own answer, or picks the best of several."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from localchat.engine.events import Done, Event, Finished, Reasoning, Text, Usage
from localchat.engine.request import GenerateRequest, Grammar, Message, Messages
from localchat.engine.stream import Stream
from localchat.errors import ContextExceeded
from localchat.tries.vote import json_field
from localchat.units import counted

_Verdict = TypeVar("_Verdict")

Generate: TypeAlias = Callable[[GenerateRequest], Stream]
"""Sends a request to the model that judges."""

MAX_VERDICT_TOKENS: Final = 512

FAULTS_GRAMMAR: Final = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "faults": {
                    "type": "array",
                    "items": {"type": "string", "minLength": 3, "maxLength": 240},
                    "maxItems": 4,
                }
            },
            "required": ["faults"],
            "additionalProperties": False,
        }
    ),
)

_FIND_FAULTS: Final = (
    "Check your answer: is it right, does it answer what was asked, is anything missing? Reply with JSON: "
    '{"faults": [...]}, one short sentence for each fault, and an empty list if there is none.'
)
_CORRECT: Final = (
    "Your answer has these faults:\n{faults}\n"
    "Write the whole answer again without them. Write the answer alone, with no word about the faults."
)
_PICK: Final = (
    "Here are {count} answers to my last message.\n\n{answers}\n\n"
    'Which one is the best? Reply with JSON: {{"best": NUMBER}}.'
)


class Reply(NamedTuple):
    """Complete reply to a question."""

    text: str
    events: tuple[Event, ...]
    """Text, reasoning and end of the reply."""


@dataclass(frozen=True, slots=True)
class Review:
    """Outcome of a critique."""

    first: str
    faults: tuple[str, ...] = ()
    correction: Reply | None = None
    """Complete corrected answer, or None."""
    replaced: bool = False
    """True if the correction won the comparison."""
    no_verdict: str = ""
    """Why there is no verdict on the first answer."""

    @property
    def outcome(self) -> str:
        """Outcome in a few words."""
        if self.no_verdict:
            return f"{self.no_verdict}, so the first answer was kept"
        if not self.faults:
            return "no fault found"
        count = f"{counted(len(self.faults), 'fault')} found"
        if self.replaced:
            return f"{count}, answer corrected"
        if self.correction is None:
            return f"{count}, no complete correction, so the first answer was kept"
        return f"{count}, the correction was not better, so the first answer was kept"

    def as_json(self) -> dict[str, Any]:
        """Return the fields of `--json` and of the HTTP endpoint."""
        return {
            "method": "critique",
            "judged": not self.no_verdict,
            "faults": list(self.faults),
            "mended": self.replaced,
            "first": self.first,
            "second": None if self.correction is None else self.correction.text,
        }


class Judge:
    """Asks a model about answers to one conversation. Methods block until the model has replied."""

    def __init__(
        self,
        generate: Generate,
        request: GenerateRequest,
        on_progress: Callable[[str], None] = lambda phrase: None,
    ) -> None:
        """`request`: the one whose answers are judged. Its prompt must be a conversation."""
        assert isinstance(request.prompt, Messages)
        self._generate = generate
        self._request = request
        self._prompt = request.prompt
        self._on_progress = on_progress
        self.spent: list[Usage] = []
        """Usage of each question so far."""
        self.no_verdict = ""
        """Why the last question has no verdict."""

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return sum(usage.completion_tokens for usage in self.spent)

    def pick(self, texts: Sequence[str]) -> int | None:
        """Return the index of the best text, or None without a verdict."""
        self._on_progress("picking the best")
        return self._pick(texts)

    def faults(self, text: str) -> list[str] | None:
        """Return the faults of an answer, or None without a verdict."""
        reply = self._ask(fault_messages(self._prompt.messages, text), FAULTS_GRAMMAR)
        return self._verdict(reply, parse_faults)

    def review(self, text: str) -> Review:
        """Review an answer. It stays unless a corrected one wins a comparison."""
        self._on_progress("judging the answer")
        faults = self.faults(text)
        if faults is None:
            return Review(text, no_verdict=self.no_verdict)
        if not faults:
            return Review(text)
        self._on_progress("correcting the answer")
        correction = self._correct(text, faults)
        if correction is None:
            return Review(text, tuple(faults))
        self._on_progress("comparing both answers")
        is_better = self._is_better(correction.text, text)
        return Review(text, tuple(faults), correction, replaced=is_better)

    def _correct(self, text: str, faults: Sequence[str]) -> Reply | None:
        # Unlike a verdict, a correction keeps the sampling, the grammar and the limit of the request.
        messages = correction_messages(self._prompt.messages, text, faults)
        request = self._request
        return self._send(
            msgspec.structs.replace(request, prompt=self._question(messages), n=1, logprobs=None)
        )

    def _is_better(self, correction: str, text: str) -> bool:
        if correction.strip() == text.strip():
            return False
        # Small models prefer one position in the list. The correction must win in both.
        return self._pick([text, correction]) == 1 and self._pick([correction, text]) == 0

    def _pick(self, texts: Sequence[str]) -> int | None:
        messages = pick_messages(self._prompt.messages, texts)
        reply = self._ask(messages, pick_grammar(len(texts)))
        return self._verdict(reply, lambda verdict: parse_pick(verdict, len(texts)))

    def _verdict(
        self, reply: Reply | None, parse: Callable[[str], _Verdict | None]
    ) -> _Verdict | None:
        verdict = None
        if reply is not None:
            verdict = parse(reply.text)
        if verdict is None and not self.no_verdict:
            self.no_verdict = "the judge gave no verdict"
        return verdict

    def _ask(self, messages: tuple[Message, ...], grammar: Grammar) -> Reply | None:
        """Ask for a verdict at temperature 0."""
        return self._send(
            msgspec.structs.replace(
                self._request,
                prompt=self._question(messages),
                grammar=grammar,
                max_tokens=MAX_VERDICT_TOKENS,
                sampling=msgspec.structs.replace(self._request.sampling, temperature=0.0),
                stop=(),
                n=1,
                logprobs=None,
            )
        )

    def _question(self, messages: tuple[Message, ...]) -> Messages:
        return msgspec.structs.replace(
            self._prompt, messages=messages, tools=(), tool_choice="none", continue_last=False
        )

    def _send(self, request: GenerateRequest) -> Reply | None:
        """Return the reply to a request, or None if it is incomplete.

        A verdict that reaches its token limit must not count: its text may end anywhere.
        """
        self.no_verdict = ""
        # Nothing continues a question to the judge, so its KV is not stored with the conversation.
        request = msgspec.structs.replace(request, owner="")
        events: list[Event] = []
        is_complete = False
        try:
            with self._generate(request) as stream:
                for event in stream:
                    match event:
                        case Text() | Reasoning():
                            events.append(event)
                        case Finished(reason=reason):
                            events.append(event)
                            is_complete = reason == "stop"
                        case Done(usage=usage):
                            self.spent.append(usage)
        except ContextExceeded:
            self.no_verdict = "the judge gave no verdict (its question does not fit in the context)"
            return None
        text = "".join(event.text for event in events if isinstance(event, Text))
        if not is_complete or not text.strip():
            return None
        return Reply(text, tuple(events))


def fault_messages(conversation: Sequence[Message], answer: str) -> tuple[Message, ...]:
    """Return the messages that ask for the faults of an answer.

    They begin with the answered conversation, whose KV is already cached.
    """
    return (*conversation, Message("assistant", answer), Message("user", _FIND_FAULTS))


def correction_messages(
    conversation: Sequence[Message], answer: str, faults: Sequence[str]
) -> tuple[Message, ...]:
    """Return the messages that ask for an answer without these faults."""
    text = _CORRECT.format(faults="\n".join(f"- {fault}" for fault in faults))
    return (*conversation, Message("assistant", answer), Message("user", text))


def pick_messages(conversation: Sequence[Message], answers: Sequence[str]) -> tuple[Message, ...]:
    """Return the messages that ask for the best of these answers."""
    numbered = "\n\n".join(
        f"Answer {number}:\n{text.strip()}" for number, text in enumerate(answers, 1)
    )
    return (*conversation, Message("user", _PICK.format(count=len(answers), answers=numbered)))


def pick_grammar(count: int) -> Grammar:
    """Return the grammar that allows only the numbers of the answers."""
    schema = {
        "type": "object",
        "properties": {"best": {"enum": list(range(1, count + 1))}},
        "required": ["best"],
        "additionalProperties": False,
    }
    return Grammar("json_schema", json.dumps(schema))


def parse_faults(verdict: str) -> list[str] | None:
    """Return the faults in a verdict, or None if the text contains no verdict."""
    field = json_field(verdict, "faults")
    if field is None:
        return None
    faults = json.loads(field)
    if not isinstance(faults, list):
        return None
    return [fault.strip() for fault in faults if isinstance(fault, str) and fault.strip()]


def parse_pick(verdict: str, count: int) -> int | None:
    """Return the index of the picked answer, or None if the text contains no verdict."""
    field = json_field(verdict, "best")
    if field is None or not field.isdecimal() or not 1 <= int(field) <= count:
        return None
    return int(field) - 1


def sum_usage(first: Usage, others: Sequence[Usage]) -> Usage:
    """Return the usage of several requests together."""
    requests = (first, *others)
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in requests),
        cached_tokens=sum(usage.cached_tokens for usage in requests),
        completion_tokens=sum(usage.completion_tokens for usage in requests),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in requests),
    )
