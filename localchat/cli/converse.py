"""One answer for a prompt, or a conversation: what `localchat …` and `localchat run …` both do."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import click
import msgspec

from localchat import gc_control
from localchat.chat.conversation import Conversation, Node
from localchat.cli.ask import first_code_block
from localchat.cli.context import AppContext
from localchat.cli.context_advice import with_advice
from localchat.cli.conversation_options import add_answers, opened_for_writing, resumed
from localchat.cli.json_report import context_line, report
from localchat.cli.options import given_flags, refuse_unfinished, wanted_form
from localchat.cli.outgrown import take_fitting
from localchat.cli.prompt import decoded_words, join_parts, read_files, read_stdin
from localchat.cli.render_answer import Answer, Display, take
from localchat.cli.resolve import Setup, opened_engine, prepare, remember, request_for
from localchat.cli.signals import deferred, terminate_gracefully
from localchat.cli.streams import Terminal
from localchat.engine.interface import Engine
from localchat.engine.request import Grammar, Message, TextPrompt
from localchat.engine.stats_line import stats_line
from localchat.errors import (
    ContextExceeded,
    ExitCode,
    HistoryUnusable,
    LocalchatError,
    ModelMissing,
    UsageError,
)


class Wish(NamedTuple):
    """The flags of one call."""

    interactive: bool
    as_json: bool
    extract: bool
    raw_prompt: bool
    form: Grammar | None


def converse(ctx: click.Context, words: str, model_word: str | None = None) -> int:
    """Answer and return the exit code. Raises LocalchatError."""
    given = {name: bool(ctx.params[name]) for name in Wish._fields if name != "form"}
    wish = Wish(**given, form=wanted_form(ctx))
    _refuse_nonsense(ctx, wish)
    text = _prompt_text(ctx, words)
    if not text and not wish.interactive and not _person_sits_there():
        raise UsageError(
            "there is nothing to ask: no prompt, and stdin is empty",
            hint='localchat "prompt", or text | localchat "question"; on a terminal, localchat alone chats',
        )
    before = resumed(ctx)
    setup = _prepared(ctx, model_word, before)
    conversation = before or Conversation()
    conversation.model = setup.model.word
    if before is None or "system" in given_flags(ctx):
        conversation.system = setup.settings.system or ""
    if not text and wish.form is not None:
        raise UsageError(
            "--schema, --grammar and --regex are for one answer, and there is no prompt"
        )
    if text and not wish.interactive:
        with terminate_gracefully(), opened_engine(setup) as engine:
            gc_control.resume_gc()
            with deferred():
                return _answer_once(setup, engine, wish, conversation, text)
    from localchat.tui.launch import can_show

    if not text and not wish.interactive and can_show(setup.door.environ):
        from localchat.cli.launch_tui import open_screen

        return open_screen(ctx, setup, conversation)
    gc_control.resume_gc()
    from localchat.cli.line import chat
    from localchat.cli.line_input import open_keyboard

    keyboard = open_keyboard(setup.terminal)
    return chat(setup, keyboard, conversation, text)


def _prepared(ctx: click.Context, model_word: str | None, before: Conversation | None) -> Setup:
    """A conversation goes on with its model, unless another is named. Raises UsageError, ModelMissing."""
    word = model_word
    if word is None and before is not None and "model" not in given_flags(ctx):
        word = before.model or None
    try:
        return prepare(ctx, word)
    except ModelMissing as problem:
        if word == model_word:
            raise
        raise ModelMissing(
            f"this conversation was held with {word}, which is not here: {problem.message}",
            hint="-m MODEL goes on with another",
        ) from problem


def _answer_once(
    setup: Setup, engine: Engine, wish: Wish, conversation: Conversation, text: str
) -> int:
    terminal, settings = setup.terminal, setup.settings
    question = conversation.add(Message("user", text), parent=conversation.head)
    whole = wish.as_json or wish.extract or settings.n > 1
    figures = wish.as_json or settings.stats
    display = Display(
        terminal,
        live=not whole,
        reasoning=not (settings.hide_reasoning or settings.quiet or wish.as_json),
        begun=lambda: tell_engine(terminal, engine),
        enough=_closed_block
        if wish.extract and not figures and settings.n == 1
        else lambda text: False,
    )
    answer = Answer()
    error: LocalchatError | None = None
    try:
        if wish.raw_prompt:
            take(
                engine.generate(request_for(settings, TextPrompt(text, special=True), wish.form)),
                display,
                answer,
            )
        else:
            take_fitting(engine, conversation, settings, display, answer, wish.form)
        remember(setup, engine, answer.done if settings.n == 1 else None)
        _print(setup, engine, wish, answer)
    except ContextExceeded as problem:
        raise _advised(problem, engine, conversation) from problem
    except LocalchatError as problem:
        error = problem
        terminal.end_answer(empty=False)
        raise
    finally:
        if not wish.raw_prompt and (answer.texts or answer.reasoning):
            nodes = add_answers(conversation, question, answer, engine, error)
            _keep(setup, conversation, (question, *nodes))
    return ExitCode.INTERRUPTED if answer.interrupted else ExitCode.OK


def _print(setup: Setup, engine: Engine, wish: Wish, answer: Answer) -> None:
    """What was not shown while it came."""
    terminal, settings = setup.terminal, setup.settings
    whole = wish.as_json or wish.extract or settings.n > 1
    texts = _texts(answer, settings.n, wish)
    if wish.as_json:
        line = msgspec.json.encode(report(answer, engine.info(), settings.n, texts)).decode()
        terminal.answer(line)
        terminal.end_answer()
    else:
        if whole and (texts or not answer.interrupted):
            terminal.answer("\n---\n".join(text.rstrip("\n") for _, text in sorted(texts.items())))
        terminal.end_answer(empty=not answer.interrupted)
    if settings.stats and answer.done:
        terminal.insist(stats_line(answer.done))
        terminal.insist(engine.info().why)
    if wish.form is not None:
        refuse_unfinished(answer, settings.n)


def _keep(setup: Setup, conversation: Conversation, nodes: Sequence[Node]) -> None:
    """Write what was said, after it was shown: no answer waits for it or fails by it."""
    history = opened_for_writing(setup.paths, setup.terminal, wanted=setup.settings.history)
    if history is None:
        return
    with history:
        try:
            history.append(conversation, nodes)
        except HistoryUnusable as problem:
            setup.terminal.say(f"this conversation is not kept: {problem.message}")


def _advised(
    problem: ContextExceeded, engine: Engine, conversation: Conversation
) -> ContextExceeded:
    """A conversation that goes on can be shortened, which takes another word than a long input."""
    advised = with_advice(problem, engine)
    if len(conversation.nodes) > 1:
        there = f"localchat -i --conversation {conversation.id}"
        advised.hint += f"\nor shorten the conversation: {there} offers how"
    return advised


def _texts(answer: Answer, choices: int, wish: Wish) -> dict[int, str]:
    """What to print, by choice. Raises LocalchatError where code was wanted and none came."""
    texts = {choice: answer.texts[choice] for choice in range(choices) if choice in answer.texts}
    if not wish.extract:
        return texts
    code = {choice: first_code_block(text) for choice, text in texts.items()}
    found = {choice: block for choice, block in code.items() if block is not None}
    if not found and not answer.interrupted:
        raise LocalchatError(
            "the answer holds no fenced code block",
            hint=f"it was:\n{answer.texts[0]}" if answer.texts[0] else "it was empty",
        )
    return found


def _closed_block(text: str) -> bool:
    return first_code_block(text, finished=False) is not None


def tell_engine(terminal: Terminal, engine: Engine) -> None:
    """Say what answers and with which context. What else a user should know, the engine says itself."""
    terminal.say(context_line(engine.info()))


def _prompt_text(ctx: click.Context, words: str) -> str:
    door = ctx.find_object(AppContext)
    assert door is not None
    early = Terminal(door.environ, quiet=bool(ctx.params["quiet"]))
    files = read_files(ctx.params["files"], early.say)
    return join_parts([files, read_stdin(early.say), decoded_words(words, early.say)])


def _person_sits_there() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _refuse_nonsense(ctx: click.Context, wish: Wish) -> None:
    if wish.interactive and (wish.as_json or wish.extract or wish.raw_prompt):
        raise UsageError("-i is a conversation; --json, -x and --raw-prompt are for one answer")
    if wish.interactive and wish.form is not None:
        raise UsageError("-i is a conversation; --schema, --grammar and --regex are for one answer")
    if wish.raw_prompt and ctx.params["system"]:
        raise UsageError(
            "--raw-prompt sends the prompt as it is, and -s would be lost",
            hint="write the instructions into the prompt",
        )
