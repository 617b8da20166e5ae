"""An answer to a chat, as chunks of a stream or in one piece."""

from dataclasses import dataclass, field

from localchat.engine.events import Done, Reasoning, Text, ToolCall, Usage
from localchat.server.answering import Echoed, End, Reason, Told
from localchat.server.presenter import ChunkStream, Frame
from localchat.server.replies import (
    CallFunction,
    CallPiece,
    ChatLogprobs,
    ChatToken,
    ChunkChoice,
    Delta,
    WholeCall,
    WholeChoice,
    WholeFunction,
    WholeMessage,
    chat_tokens,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatStream(ChunkStream):
    """One kind of delta per chunk, one tool call per chunk, the role first, the reason last and alone.
    as_functions: the one call is told in the words of before there were tools."""

    as_functions: bool = False

    def opening(self, choices: int, prompt_tokens: int) -> bytes:
        return b"".join(
            self._delta(choice, Delta(role="assistant", content="")) for choice in range(choices)
        )

    def told(self, told: Told) -> bytes:
        match told:
            case Text(choice, text, logprobs):
                if not text and not (self.with_logprobs and logprobs):
                    return b""
                tokens = chat_tokens(logprobs) if self.with_logprobs else []
                return self._delta(choice, Delta(content=text), tokens)
            case Reasoning(choice, text):
                return self._delta(choice, Delta(reasoning_content=text)) if text else b""
            case ToolCall():
                piece = _piece(told)
                if self.as_functions:
                    return self._delta(told.choice, Delta(function_call=piece.function))
                return self._delta(told.choice, Delta(tool_calls=[piece]))
            case End(choice, reason, why):
                word = _reason(reason, self.as_functions)
                return self.frame.event(
                    ChunkChoice(choice, Delta(), finish_reason=word, stop_reason=why)
                )
            case Echoed():
                return b""

    def _delta(self, choice: int, delta: Delta, tokens: list[ChatToken] | None = None) -> bytes:
        logprobs = ChatLogprobs(tokens) if tokens else None
        return self.frame.event(ChunkChoice(choice, delta, None, logprobs))


def _reason(reason: Reason, as_functions: bool) -> str:
    return "function_call" if as_functions and reason == "tool_calls" else reason


def _piece(call: ToolCall) -> CallPiece:
    if call.id:
        return CallPiece(call.call, CallFunction("", call.name), call.id, "function")
    return CallPiece(call.call, CallFunction(call.arguments))


@dataclass(slots=True)
class _Answer:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, tuple[str, str, list[str]]] = field(default_factory=dict)
    tokens: list[ChatToken] = field(default_factory=list)
    end: End | None = None


class ChatWhole:
    """The whole answer as one object."""

    def __init__(
        self,
        frame: Frame,
        choices: int,
        *,
        with_timings: bool = False,
        with_logprobs: bool = False,
        as_functions: bool = False,
    ) -> None:
        self._frame = frame
        self._answers = [_Answer() for _ in range(choices)]
        self._with_timings = with_timings
        self._with_logprobs = with_logprobs
        self._as_functions = as_functions

    def take(self, told: Told) -> None:
        match told:
            case Text(choice, text, logprobs):
                self._answers[choice].text.append(text)
                if self._with_logprobs:
                    self._answers[choice].tokens += chat_tokens(logprobs)
            case Reasoning(choice, text):
                self._answers[choice].reasoning.append(text)
            case ToolCall():
                calls = self._answers[told.choice].calls
                if told.id:
                    calls[told.call] = (told.id, told.name, [])
                calls[told.call][2].append(told.arguments)
            case End(choice):
                self._answers[choice].end = told

    def result(self, usage: Usage, done: Done | None) -> bytes:
        choices = [self._choice(index, answer) for index, answer in enumerate(self._answers)]
        return self._frame.chunk(choices, usage, done if self._with_timings else None)

    def _choice(self, index: int, answer: _Answer) -> WholeChoice:
        assert answer.end is not None
        text = "".join(answer.text)
        calls = [
            WholeCall(id_, "function", WholeFunction(name, "".join(arguments)))
            for id_, name, arguments in answer.calls.values()
        ]
        message = WholeMessage(
            role="assistant",
            content=text if text or not calls else None,
            reasoning_content="".join(answer.reasoning) or None,
            tool_calls=None if self._as_functions else calls or None,
            function_call=calls[0].function if self._as_functions and calls else None,
        )
        logprobs = ChatLogprobs(answer.tokens) if self._with_logprobs else None
        reason = _reason(answer.end.reason, self._as_functions)
        return WholeChoice(index, message, reason, logprobs, answer.end.why)
