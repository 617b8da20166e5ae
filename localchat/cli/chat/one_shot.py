"""Answer one prompt and print the answer.

This module does not import the history (sqlite): answer_record.py opens it while the model loads.
"""

import re
import time
from collections.abc import Sequence
from typing import Any, Final

from localchat import gc_control
from localchat.chat.answer_end import NO_TEXT, end_advice, end_sentence, ended_early
from localchat.chat.conversation import Conversation, Question
from localchat.chat.overflow import leave_out_again, unsent_sentence
from localchat.chat.prompt_messages import MEDIA_LEFT_OUT, sent_messages, unread_kind
from localchat.cli.chat.answer_record import AnswerRecord
from localchat.cli.chat.ask_options import AskOptions
from localchat.cli.chat.json_report import context_line, report
from localchat.cli.chat.memory_advice import add_load_steps, with_prompt_steps
from localchat.cli.chat.received_answer import ReceivedAnswer
from localchat.cli.output import json_line
from localchat.cli.resolve import Setup, opened_engine, owned, remember, request_for
from localchat.cli.signals import deferred, immediate, terminate_gracefully
from localchat.engine.events import (
    Accepted,
    Event,
    Finished,
    Loading,
    Prefill,
    Queued,
    Reasoning,
    Text,
    ToolCall,
)
from localchat.engine.interface import Engine
from localchat.engine.request import Messages, Prompt, TextPrompt
from localchat.engine.stats_line import stats_line
from localchat.errors import (
    AnswerCut,
    ContextExceeded,
    DoesNotFit,
    ExitCode,
    LocalchatError,
    UsageError,
)
from localchat.session.answer_builder import AnswerBuilder
from localchat.session.progress import progress_words
from localchat.session.view import HiddenView

_MIN_CHARACTERS_PER_TOKEN = 2
"""English has four, program text three."""
_ANSWER_TOKENS = 4096


def answer(
    setup: Setup,
    options: AskOptions,
    conversation: Conversation,
    mentioned: Sequence[str],
    words: str,
    prompt: Question,
) -> int:
    """Answer once, and return the exit code. Raises LocalchatError, with steps that make room.

    `mentioned`: names of documents, for which `words` select the passages.
    """
    texts = [prompt.text, *(message.content for message in sent_messages(conversation))]
    tokens = sum(map(len, texts)) // _MIN_CHARACTERS_PER_TOKEN + _ANSWER_TOKENS
    try:
        opened = opened_engine(setup, single_request_tokens=tokens)
        with terminate_gracefully(), opened as engine:
            gc_control.resume_gc()
            with deferred():
                question = with_documents(setup, conversation, mentioned, words, prompt, engine)
                return OneShot(setup, engine, options, conversation).run(question)
    except DoesNotFit as problem:
        add_load_steps(problem, setup)
        raise


def with_documents(
    setup: Setup,
    conversation: Conversation,
    names: Sequence[str],
    question: str,
    prompt: Question,
    engine: Engine,
) -> Question:
    """Put passages of the named documents before the prompt, and list them on stderr.

    `question` selects the passages. Raises LocalchatError.
    """
    if not names:
        return prompt
    from localchat.cli.document_options import open_library
    from localchat.session import documents

    sent_texts = [message.content for message in sent_messages(conversation)]
    documented = documents.with_documents(
        open_library(setup.app),
        names,
        prompt,
        question.strip() or prompt.text,
        sent_texts,
        engine,
    )
    for label in documented.labels:
        setup.terminal.note(label)
    return documented.question


class OneShot:
    """One prompt, and its answer on one engine."""

    def __init__(
        self, setup: Setup, engine: Engine, options: AskOptions, conversation: Conversation
    ) -> None:
        self._setup = setup
        self._settings = setup.settings
        self._terminal = setup.terminal
        self._engine = engine
        self._options = options
        self._conversation = conversation
        self.answer = ReceivedAnswer()

    def run(self, documented: Question) -> int:
        """Ask, print the answer and return the exit code. Raises LocalchatError."""
        question = self._conversation.add(
            documented.message,
            parent=self._conversation.head,
            inclusions=documented.inclusions,
        )
        answer = self.answer
        answer.choices = tuple(
            AnswerBuilder(self._conversation, HiddenView(), question.id, choice=number)
            for number in range(self._settings.n)
        )
        error: LocalchatError | None = None
        record: AnswerRecord | None = None
        # A raw prompt is not part of a conversation.
        if not self._options.raw_prompt:
            record = AnswerRecord(self._setup, self._conversation, question, answer)
        try:
            if self._options.raw_prompt:
                self._receive(TextPrompt(documented.text, special=True))
            else:
                self._receive_fitting()
            # Several choices share the machine, so their speed is not that of the model.
            done = None
            if self._settings.n == 1:
                done = answer.status.done
            remember(self._setup, self._engine.info, done)
            return self.print_rest()
        except ContextExceeded as problem:
            error = problem
            self._terminal.end_answer(empty=False)
            raise self._with_advice(problem) from problem
        except LocalchatError as problem:
            error = problem
            self._terminal.end_answer(empty=False)
            raise
        finally:
            if record is not None:
                record.finish(self._engine, error)

    def _receive(self, prompt: Prompt) -> None:
        """Send a prompt, and print the answer while it arrives. Raises LocalchatError.

        Ctrl+C cancels the request between two events and keeps the text so far.
        """
        request = request_for(self._settings, prompt, self._options.grammar)
        request = owned(request, self._settings, self._conversation.id)
        stream = self._engine.generate(request)
        begun = False
        status = self.answer.status
        status.begin()
        try:
            with stream:
                events = iter(stream)
                while True:
                    # Ctrl+C takes effect only while waiting, so that no event is lost halfway.
                    with immediate():
                        event = next(events, None)
                    if event is None:
                        break
                    has_progress = status.update(event)
                    match event:
                        case Text() | Reasoning() | ToolCall() if not begun:
                            begun = True
                            self._terminal.progress("")
                            self._print_notes()
                        case Queued() | Loading() | Prefill() if has_progress:
                            self._terminal.progress(progress_words(status, time.monotonic()))
                    self._take(event)
                    if isinstance(event, Text) and self._has_enough():
                        break
        except KeyboardInterrupt:
            self.answer.interrupted = True
        finally:
            self._terminal.progress("")

    def _print_notes(self) -> None:
        """Print what the loaded engine says about itself, before the first text."""
        info = self._engine.info()
        self._terminal.note(context_line(info))
        if not self._options.raw_prompt:
            self._terminal.warn(info.warning)
        self._terminal.warn(info.loss)

    def _take(self, event: Event) -> None:
        """Add an event to the answer, and print its text."""
        settings = self._settings
        for choice in self.answer.choices:
            choice.take(event)
        match event:
            case Text(choice=0, text=text) if not self._prints_whole:
                self._terminal.answer(text)
            case Reasoning(choice=0, text=text):
                if not (settings.hide_reasoning or settings.quiet or self._options.as_json):
                    self._terminal.reasoning(text)
            case Accepted():
                self.answer.accepted = event
            case _:
                pass  # the choices and the status have the rest

    def _has_enough(self) -> bool:
        """Return True if the answer has the code block that `--extract` prints."""
        # With --stats and --json the answer must end by itself, because its metrics come last.
        metrics_follow = self._options.as_json or self._settings.stats
        if not self._options.extract or metrics_follow or self._settings.n > 1:
            return False
        return first_code_block(self.answer.choices[0].text, finished=False) is not None

    def _receive_fitting(self) -> None:
        """Send the conversation and receive the answer. Raises LocalchatError.

        If the conversation is too long and its policy allows it, leave out the oldest messages with a notice.
        """
        try:
            self._receive(self._messages())
            return
        except UsageError as refusal:
            if not (kind := unread_kind(self._conversation, refusal)):
                raise
            self._terminal.notify(MEDIA_LEFT_OUT)
            self._receive(self._messages((kind,)))
            return
        except ContextExceeded as refusal:
            cut = leave_out_again(
                self._conversation,
                self._engine,
                refusal,
                max_tokens=self._settings.max_tokens,
                thinking=self._settings.think,
            )
            if cut is None:
                raise
        sentence = unsent_sentence(cut.messages, cut.tokens)
        self._terminal.print_line(f"localchat: {sentence}", dim=True)
        self._receive(self._messages())

    def _messages(self, unread: Sequence[str] = ()) -> Messages:
        return Messages(
            sent_messages(self._conversation, unread),
            thinking=self._settings.think,
            think_budget=self._settings.think_budget,
        )

    @property
    def _prints_whole(self) -> bool:
        """True if the answer is printed only when it is complete."""
        options = self._options
        has_choices = self._settings.n > 1
        # A value with a format is data. A part of it must not reach a program that reads it.
        return has_choices or options.as_json or options.extract or options.grammar is not None

    def print_rest(self, tool_calls: list[dict[str, Any]] | None = None) -> ExitCode:
        """Print everything that was not printed while the answer arrived. Raises LocalchatError.

        `tool_calls` become part of the JSON object.
        """
        unfinished = self._unfinished()
        if unfinished and not self._options.as_json:
            self._print_partial()
            raise self._unfinished_error(unfinished)
        texts = self._texts()
        if self._options.as_json:
            self._print_json(texts, tool_calls)
        else:
            self._print_texts(texts)
        # The error below says how a single answer ended.
        if not self._options.extract and not (unfinished and self._settings.n == 1):
            self._report_ends()
        self._print_stats()
        if unfinished:
            raise self._unfinished_error(unfinished)
        if self._options.require_complete and any(
            ended_early(choice.finished) for choice in self.answer.choices
        ):
            raise AnswerCut(
                "the answer is not complete", hint="without --require-complete this is not an error"
            )
        if self.answer.interrupted:
            return ExitCode.INTERRUPTED
        return ExitCode.OK

    def _print_json(self, texts: dict[int, str], tool_calls: list[dict[str, Any]] | None) -> None:
        fields = report(self.answer, self._engine.info(), texts)
        if tool_calls is not None:
            fields["tool_calls"] = tool_calls
        self._terminal.answer(json_line(fields))
        self._terminal.end_answer()

    def _print_texts(self, texts: dict[int, str]) -> None:
        interrupted = self.answer.interrupted
        parts = [text.rstrip("\n") for _, text in sorted(texts.items())]
        if self._prints_whole and (texts or not interrupted):
            self._terminal.answer("\n---\n".join(parts))
        self._terminal.end_answer(empty=not interrupted and not any(parts))

    def _print_stats(self) -> None:
        terminal = self._terminal
        wants_stats = self._settings.stats
        done = self.answer.status.done
        if wants_stats and done:
            terminal.print_line(stats_line(done))
            terminal.print_line(self._engine.info().why)

    def _texts(self) -> dict[int, str]:
        """Return the texts to print, by choice. Raises LocalchatError if `-x` finds no code block."""
        texts = {
            number: choice.text for number, choice in enumerate(self.answer.choices) if choice.text
        }
        if not self._options.extract:
            return texts
        blocks = {choice: first_code_block(text) for choice, text in texts.items()}
        code = {choice: block for choice, block in blocks.items() if block is not None}
        if not code and not self.answer.interrupted:
            text = self.answer.choices[0].text
            raise LocalchatError(
                "the answer contains no fenced code block",
                hint=f"the answer was:\n{text}" if text else "the answer was empty",
            )
        return code

    def _with_advice(self, problem: ContextExceeded) -> ContextExceeded:
        advised = with_prompt_steps(problem, self._engine)
        if len(self._conversation.nodes) > 1:
            command = f"localchat -i --conversation {self._conversation.id}"
            advised.hint += f"\nor shorten the conversation: {command} shows how"
        return advised

    def _unfinished(self) -> Finished | None:
        """Return the end of the first answer that is too incomplete to be data."""
        for choice in self.answer.choices:
            end = choice.finished
            if end is None or not ended_early(end):
                continue
            if self._options.grammar is not None:
                return end
            if self._options.extract and first_code_block(choice.text, finished=False) is None:
                return end
        return None

    def _unfinished_error(self, end: Finished) -> LocalchatError:
        grammar = self._options.grammar
        trouble = "was not complete"
        if grammar is None:
            kind = "code block"
            if not any(_OPENING_FENCE.search(choice.text) for choice in self.answer.choices):
                trouble = "did not begin"
        elif grammar.kind in ("json_schema", "json_object"):
            kind = "JSON"
        else:
            kind = "text"
        max_tokens, context = self._limits()
        advice = end_advice(end, max_tokens, context)
        if end.reason == "repetition":
            return LocalchatError(f"{end_sentence(end, max_tokens, context, what=kind)} {advice}")
        limit = f"after {max_tokens:,} tokens"
        if end.limit == "context":
            limit = "when the context was full"
        return LocalchatError(f"The {kind} {trouble} {limit}. {advice}")

    def _limits(self) -> tuple[int, int]:
        """Return the token limit of the answer, and the context in tokens."""
        max_tokens = 0
        if self.answer.accepted is not None:
            max_tokens = self.answer.accepted.max_tokens
        elif self._settings.max_tokens is not None:  # a session with tools received the answer
            max_tokens = self._settings.max_tokens
        elif self.answer.status.done is not None:
            max_tokens = self.answer.status.done.usage.completion_tokens
        return max_tokens, self._engine.info().context_tokens

    def _print_partial(self) -> None:
        """Print incomplete data to stderr, so that no program reads it from stdout."""
        for choice in self.answer.choices:
            if text := choice.text.rstrip():
                self._terminal.print_line(text, dim=True)

    def _report_ends(self) -> None:
        """Report incomplete and empty answers on stderr, with advice."""
        for number, choice in enumerate(self.answer.choices):
            end = choice.finished
            if end is not None and end.reason == "stop" and not choice.text.strip():
                self._terminal.print_line(f"localchat: {NO_TEXT}")
            if end is None or not ended_early(end):
                continue
            # An engine that still reads its model answers late.
            max_tokens, context = self._limits()
            name = "answer"
            if self._settings.n > 1:
                name = f"answer {number + 1}"
            sentence = end_sentence(end, max_tokens, context, what=name)
            advice = end_advice(end, max_tokens, context)
            self._terminal.print_line(f"localchat: {sentence} {advice}")


_OPENING_FENCE: Final = re.compile(r"^( {0,3})(`{3,}(?=[^`\n]*$)|~{3,})[^\n]*$", re.MULTILINE)


def first_code_block(text: str, *, finished: bool = True) -> str | None:
    """Return the code of the first fenced block of a Markdown text, or None.

    Fences follow CommonMark. The indentation of the opening fence is removed from each line. A block without a
    closing fence reaches to the end of a finished text; in an unfinished text it does not count yet.
    """
    opening = _OPENING_FENCE.search(text)
    if opening is None:
        return None
    indent = opening.group(1)
    fence = opening.group(2)
    code: list[str] = []
    for line in text[opening.end() + 1 :].splitlines(keepends=True):
        bare = line.strip()
        closes = bare and not bare.strip(fence[0]) and len(bare) >= len(fence)
        if closes and len(line) - len(line.lstrip(" ")) <= 3 and (finished or line.endswith("\n")):
            return "".join(code)
        code.append(_without(indent, line))
    return "".join(code) if finished else None


def _without(indent: str, line: str) -> str:
    spaces = len(line) - len(line.lstrip(" "))
    return line[min(len(indent), spaces) :]
