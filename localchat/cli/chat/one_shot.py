"""Answer one prompt and print the answer.

This module does not import the history (sqlite): answer_record.py opens it while the model loads.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

import click
import msgspec

from localchat import gc_control
from localchat.chat.answer_end import end_advice, end_sentence, ended_early
from localchat.chat.conversation import Conversation, Inclusion
from localchat.chat.overflow import leave_out, leave_out_by_policy, unsent_sentence
from localchat.chat.prompt_messages import sent_messages
from localchat.cli.chat.answer_record import AnswerRecord
from localchat.cli.chat.ask_options import AskOptions
from localchat.cli.chat.context_advice import steps_for, with_advice
from localchat.cli.chat.json_report import context_line, report
from localchat.cli.chat.memory_choice import RoomMaker
from localchat.cli.chat.render_answer import AnswerDisplay, ReceivedAnswer, receive
from localchat.cli.chat.tries import start_tries, with_slots
from localchat.cli.resolve import Setup, opened_engine, owned, remember, request_for
from localchat.cli.settings.rebuild import offer_once
from localchat.cli.signals import deferred, terminate_gracefully
from localchat.cli.streams import Terminal
from localchat.engine.events import Finished
from localchat.engine.interface import Engine
from localchat.engine.request import Message, Messages, Prompt, TextPrompt
from localchat.engine.stats_line import stats_line
from localchat.engine.stream import Stream
from localchat.errors import AnswerCut, ContextExceeded, DoesNotFit, ExitCode, LocalchatError

DocumentedText: TypeAlias = tuple[str, tuple[Inclusion, ...]]
"""A question after the documents that it mentions, and the positions of their texts."""


def answer(
    ctx: click.Context,
    setup: Setup,
    options: AskOptions,
    conversation: Conversation,
    documented: Callable[[Setup, Engine], DocumentedText],
    model_word: str | None,
) -> int:
    """Answer once. If memory or context is too small, answer again with the step that the user picks."""
    before = conversation.head
    room = RoomMaker(ctx, model_word)
    while True:
        try:
            with terminate_gracefully(), opened_engine(setup, one_answer=True) as engine:
                gc_control.resume_gc()
                with deferred():
                    question = documented(setup, engine)
                    return _answer_once(setup, engine, options, conversation, question, room)
        except (DoesNotFit, ContextExceeded) as problem:
            step = room.picked(problem, setup)
            if step is None:
                raise
        if conversation.head is not None and conversation.head != before:
            conversation.remove_last(conversation.head)
        setup = with_slots(room.setup(step), options.tries)


def with_documents(
    conversation: Conversation,
    names: Sequence[str],
    question: str,
    prompt: DocumentedText,
    setup: Setup,
    engine: Engine,
) -> DocumentedText:
    """Put passages of the named documents before the prompt, and list them on stderr.

    `question` selects the passages. Raises LocalchatError.
    """
    text, inclusions = prompt
    if not names:
        return prompt
    from localchat.cli.chat.learn import embedder
    from localchat.cli.document_options import open_library
    from localchat.session import documents

    sent_texts = [message.content for message in sent_messages(conversation)]
    documented = documents.with_documents(
        open_library(setup.app, embedder(setup.app)),
        names,
        text,
        question.strip() or text,
        sent_texts,
        engine,
    )
    for label in documented.labels:
        setup.terminal.note(label)
    # The passages come first and move what the prompt already included.
    shift = len(documented.text) - len(text)
    shifted = [
        Inclusion(inclusion.label, inclusion.start + shift, inclusion.end + shift)
        for inclusion in inclusions
    ]
    return documented.text, (*documented.inclusions, *shifted)


def _answer_once(
    setup: Setup,
    engine: Engine,
    options: AskOptions,
    conversation: Conversation,
    documented: DocumentedText,
    room: RoomMaker,
) -> int:
    terminal = setup.terminal
    settings = setup.settings
    text, inclusions = documented
    question = conversation.add(
        Message("user", text), parent=conversation.head, inclusions=inclusions
    )
    answer = ReceivedAnswer()
    error: LocalchatError | None = None
    record: AnswerRecord | None = None
    if not options.raw_prompt:
        record = AnswerRecord(setup, conversation, question, answer)
    try:
        display = _display(setup, engine, options)
        if options.raw_prompt:
            prompt = TextPrompt(text, special=True)
            receive(_send(setup, engine, options, conversation, prompt, answer), display, answer)
        else:
            _receive_fitting(setup, engine, conversation, display, answer, options)
        # Several choices share the machine, so their speed is not that of the model.
        generated_alone = settings.n == 1 and options.tries is None
        remember(setup, engine.info, answer.done if generated_alone else None)
        _print_rest(setup, engine, options, answer)
        _offer_rebuild(setup, engine, options, answer)
    except ContextExceeded as problem:
        error = problem
        terminal.end_answer(empty=False)
        room.steps = steps_for(problem, engine)
        raise _advised(problem, engine, conversation) from problem
    except LocalchatError as problem:
        error = problem
        terminal.end_answer(empty=False)
        raise
    finally:
        if record is not None:
            record.finish(engine, error)
    if answer.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def _send(
    setup: Setup,
    engine: Engine,
    options: AskOptions,
    conversation: Conversation,
    prompt: Prompt,
    answer: ReceivedAnswer,
) -> Stream:
    """Send a prompt, with all its tries. `answer` gets the tries."""
    settings = setup.settings
    request = owned(request_for(settings, prompt, options.grammar), settings, conversation.id)
    if options.tries is None:
        return engine.generate(request)
    answer.best = start_tries(engine, request, options.tries)
    return answer.best.stream


def _offer_rebuild(
    setup: Setup, engine: Engine, options: AskOptions, answer: ReceivedAnswer
) -> None:
    """Mention a faster build once, after a complete answer that a person reads."""
    if answer.interrupted or options.as_json or options.extract:
        return
    if sentence := offer_once(setup, engine.info()):
        setup.terminal.notify(sentence)


def _display(setup: Setup, engine: Engine, options: AskOptions) -> AnswerDisplay:
    terminal = setup.terminal
    settings = setup.settings

    def begin() -> None:
        info = engine.info()
        terminal.note(context_line(info))
        if not options.raw_prompt:
            terminal.warn(info.warning)

    # With --stats and --json the answer must end by itself, because its metrics come last.
    is_single = settings.n == 1 and options.tries is None
    stops_early = options.extract and not (options.as_json or settings.stats) and is_single
    return AnswerDisplay(
        terminal,
        print_text=not _prints_whole(setup, options),
        reasoning=not (settings.hide_reasoning or settings.quiet or options.as_json),
        on_begin=begin,
        is_enough=_closed_block if stops_early else lambda text: False,
    )


def _prints_whole(setup: Setup, options: AskOptions) -> bool:
    """Return True if the answer is printed only when it is complete."""
    has_choices = setup.settings.n > 1 or options.tries is not None
    # A value with a format is data. A part of it must not reach a program that reads it.
    return has_choices or options.as_json or options.extract or options.grammar is not None


def _receive_fitting(
    setup: Setup,
    engine: Engine,
    conversation: Conversation,
    display: AnswerDisplay,
    answer: ReceivedAnswer,
    options: AskOptions,
) -> None:
    """Send the conversation and receive the answer. Raises LocalchatError.

    If the conversation is too long and its policy allows it, leave out the oldest messages with a notice.
    """
    settings = setup.settings

    def send() -> None:
        prompt = Messages(
            sent_messages(conversation),
            thinking=settings.think,
            think_budget=settings.think_budget,
        )
        receive(_send(setup, engine, options, conversation, prompt, answer), display, answer)

    try:
        send()
        return
    except ContextExceeded as refusal:
        cut = None
        with suppress(LocalchatError):  # the engine cannot count tokens, so report its refusal
            cut = leave_out_by_policy(
                conversation,
                engine,
                refusal,
                max_tokens=settings.max_tokens,
                thinking=settings.think,
            )
        if cut is None:
            raise
    leave_out(conversation, cut)
    sentence = unsent_sentence(cut.messages, cut.tokens)
    setup.terminal.print_line(f"localchat: {sentence}", dim=True)
    send()


def _print_rest(
    setup: Setup,
    engine: Engine,
    options: AskOptions,
    answer: ReceivedAnswer,
) -> None:
    """Print everything that was not printed while the answer arrived."""
    terminal = setup.terminal
    settings = setup.settings
    tries = None
    choices = list(range(settings.n))
    if answer.best is not None:
        tries = answer.best.report
        choices = [answer.chosen]
    unfinished = _unfinished(answer, choices, options)
    if unfinished and not options.as_json:
        _print_partial(terminal, answer, choices)
        raise _unfinished_error(unfinished, answer, engine, options)
    texts = _texts(answer, settings.n, options)
    if options.as_json:
        fields = report(answer, engine.info(), settings.n, texts)
        if tries is not None:
            fields["tries"] = tries.as_json()
        terminal.answer(msgspec.json.encode(fields).decode())
        terminal.end_answer()
    else:
        if answer.best is not None:
            texts = {answer.chosen: texts.get(answer.chosen, "")}
        if _prints_whole(setup, options) and (texts or not answer.interrupted):
            terminal.answer("\n---\n".join(text.rstrip("\n") for _, text in sorted(texts.items())))
        terminal.end_answer(empty=not answer.interrupted)
    if not options.extract:
        _report_ends(setup, engine, answer, choices)
    if tries is not None:
        if settings.stats:
            terminal.print_line(tries.sentence())
        elif terminal.stdout_is_terminal:
            terminal.notify(tries.sentence())  # several tries cost several times as much
        elif tries.notice:
            terminal.notify(tries.notice)
    if settings.stats and answer.done:
        terminal.print_line(stats_line(answer.done))
    if settings.stats and (answer.done or tries is not None):
        terminal.print_line(engine.info().why)
    if unfinished:
        raise _unfinished_error(unfinished, answer, engine, options)
    if options.require_complete and any(ended_early(answer.ends.get(n)) for n in choices):
        raise AnswerCut(
            "the answer is not complete", hint="without --require-complete this is not an error"
        )


def _texts(answer: ReceivedAnswer, choices: int, options: AskOptions) -> dict[int, str]:
    """Texts to print, by choice. Raises LocalchatError if `-x` finds no code block."""
    printed = {*range(choices), answer.chosen}
    if options.extract and options.tries is not None:
        printed = {answer.chosen}
    texts = {choice: answer.texts[choice] for choice in sorted(printed) if choice in answer.texts}
    if not options.extract:
        return texts
    blocks = {choice: first_code_block(text) for choice, text in texts.items()}
    code = {choice: block for choice, block in blocks.items() if block is not None}
    if not code and not answer.interrupted:
        text = answer.texts[answer.chosen]
        raise LocalchatError(
            "the answer contains no fenced code block",
            hint=f"the answer was:\n{text}" if text else "the answer was empty",
        )
    return code


def _advised(
    problem: ContextExceeded, engine: Engine, conversation: Conversation
) -> ContextExceeded:
    advised = with_advice(problem, engine)
    if len(conversation.nodes) > 1:
        command = f"localchat -i --conversation {conversation.id}"
        advised.hint += f"\nor shorten the conversation: {command} shows how"
    return advised


def _unfinished(
    answer: ReceivedAnswer, choices: Sequence[int], options: AskOptions
) -> Finished | None:
    """Return the end of the first answer that is too incomplete to be data."""
    for choice in choices:
        end = answer.ends.get(choice)
        if end is None or not ended_early(end):
            continue
        if options.grammar is not None:
            return end
        if options.extract and first_code_block(answer.texts[choice], finished=False) is None:
            return end
    return None


def _unfinished_error(
    end: Finished, answer: ReceivedAnswer, engine: Engine, options: AskOptions
) -> LocalchatError:
    if options.grammar is None:
        kind = "code block"
    elif options.grammar.kind in ("json_schema", "json_object"):
        kind = "JSON"
    else:
        kind = "text"
    max_tokens, context = _limits(answer, engine)
    advice = end_advice(end, max_tokens, context)
    if end.reason == "repetition":
        return LocalchatError(f"{end_sentence(end, max_tokens, context, what=kind)} {advice}")
    limit = f"after {max_tokens:,} tokens"
    if end.limit == "context":
        limit = "when the context was full"
    return LocalchatError(f"The {kind} was not complete {limit}. {advice}")


def _limits(answer: ReceivedAnswer, engine: Engine) -> tuple[int, int]:
    """Return the token limit of the answer, and the context in tokens."""
    max_tokens = answer.accepted.max_tokens if answer.accepted else 0
    return max_tokens, engine.info().context_tokens


def _print_partial(terminal: Terminal, answer: ReceivedAnswer, choices: Sequence[int]) -> None:
    """Print incomplete data to stderr, so that no program reads it from stdout."""
    for choice in choices:
        if text := answer.texts[choice].rstrip():
            terminal.print_line(text, dim=True)


def _report_ends(
    setup: Setup, engine: Engine, answer: ReceivedAnswer, choices: Sequence[int]
) -> None:
    """Report on stderr which answers were cut off, and what to do."""
    max_tokens, context = _limits(answer, engine)
    for choice in choices:
        end = answer.ends.get(choice)
        if end is None or not ended_early(end):
            continue
        name = "answer" if len(choices) == 1 else f"answer {choice + 1}"
        sentence = end_sentence(end, max_tokens, context, what=name)
        setup.terminal.print_line(f"localchat: {sentence} {end_advice(end, max_tokens, context)}")


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


def _closed_block(text: str) -> bool:
    return first_code_block(text, finished=False) is not None


def _without(indent: str, line: str) -> str:
    spaces = len(line) - len(line.lstrip(" "))
    return line[min(len(indent), spaces) :]
