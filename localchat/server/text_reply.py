"""An answer to a plain completion, as chunks of a stream or in one piece."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from localchat.engine.events import Done, Text, TokenLogprob, Usage
from localchat.server.answering import Echoed, End, Told
from localchat.server.presenter import ChunkStream, Frame
from localchat.server.replies import TextChoice, TextLogprobs, text_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStream(ChunkStream):
    """`echoes`: the prompt of each choice, where prompts are to be said again; with log probabilities each
    waits for its own. `offsets`: characters that a choice has said so far."""

    echoes: Sequence[str] = ()
    offsets: dict[int, int] = field(default_factory=dict)

    def opening(self, choices: int, prompt_tokens: int) -> bytes:
        if self.with_logprobs:
            return b""
        return b"".join(
            self._text(choice, text, None) for choice, text in enumerate(self.echoes) if text
        )

    def told(self, told: Told) -> bytes:
        match told:
            case Text(choice, text, logprobs):
                if not text and not (self.with_logprobs and logprobs):
                    return b""
                offset = self.offsets.get(choice, 0)
                tokens = text_logprobs(logprobs, offset) if self.with_logprobs else None
                return self._text(choice, text, tokens)
            case Echoed(choice, prompt) if self.echoes:
                echo = self.echoes[choice]
                return self._text(choice, echo, text_logprobs(prompt, 0, _first(echo, prompt)))
            case End(choice, reason, why):
                return self.frame.event(TextChoice("", choice, None, reason, why))
        return b""

    def _text(self, choice: int, text: str, logprobs: TextLogprobs | None) -> bytes:
        self.offsets[choice] = self.offsets.get(choice, 0) + len(text)
        return self.frame.event(TextChoice(text, choice, logprobs, None))


@dataclass(slots=True)
class _Answer:
    text: list[str] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    end: End | None = None


class TextWhole:
    """The whole completion as one object."""

    def __init__(
        self,
        frame: Frame,
        choices: int,
        *,
        echoes: Sequence[str] = (),
        with_timings: bool = False,
        with_logprobs: bool = False,
    ) -> None:
        self._frame = frame
        self._echoes = echoes
        self._answers = [_Answer() for _ in range(choices)]
        self._prompts: dict[int, tuple[TokenLogprob, ...]] = {}
        self._with_timings = with_timings
        self._with_logprobs = with_logprobs

    def take(self, told: Told) -> None:
        match told:
            case Text(choice, text, logprobs):
                self._answers[choice].text.append(text)
                self._answers[choice].tokens += logprobs
            case End(choice):
                self._answers[choice].end = told
            case Echoed(choice, tokens):
                self._prompts[choice] = tokens

    def result(self, usage: Usage, done: Done | None) -> bytes:
        choices = [self._choice(index, answer) for index, answer in enumerate(self._answers)]
        return self._frame.chunk(choices, usage, done if self._with_timings else None)

    def _choice(self, index: int, answer: _Answer) -> TextChoice:
        assert answer.end is not None
        echo = self._echoes[index] if self._echoes else ""
        logprobs = (
            self._logprobs(index, echo, tuple(answer.tokens)) if self._with_logprobs else None
        )
        text = echo + "".join(answer.text)
        return TextChoice(text, index, logprobs, answer.end.reason, answer.end.why)

    def _logprobs(self, index: int, echo: str, answer: tuple[TokenLogprob, ...]) -> TextLogprobs:
        prompt = self._prompts.get(index)
        if prompt is None:
            return text_logprobs(answer, len(echo))
        return text_logprobs((*prompt, *answer), 0, _first(echo, prompt))


def _first(prompt: str, rest: tuple[TokenLogprob, ...]) -> str:
    """The text of the prompt's first token, which nothing predicted: what the others do not hold."""
    held = b"".join(one.text for one in rest).decode("utf-8", "replace")
    return prompt[: max(0, len(prompt) - len(held))]
