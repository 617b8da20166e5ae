"""Answers a prompt once, or opens a conversation if there is no prompt.

The answer to a prompt, the line mode and the screen are imported when they are used: none of them waits for
the others.
"""

import sys
from functools import partial

import click

from localchat import gc_control
from localchat.chat.conversation import Conversation, Inclusion
from localchat.cli.chat.ask_options import AskOptions, ask_options
from localchat.cli.chat.choose_model import fetched_if_wanted
from localchat.cli.chat.conversation_options import resumed
from localchat.cli.chat.prompt import decoded_words, join_parts, read_files, read_stdin
from localchat.cli.chat.tries import with_slots
from localchat.cli.context import AppContext
from localchat.cli.options import AFTER_DASHES
from localchat.cli.preset_options import chosen_settings, question, without_preset
from localchat.cli.resolve import Inputs, Setup, resolve_setup
from localchat.cli.streams import Terminal
from localchat.errors import ModelMissing, UsageError


def ask(ctx: click.Context, words: str, model_word: str | None = None) -> int:
    """Answer and return the exit code. Raises LocalchatError."""
    options = ask_options(ctx)
    words = without_preset(ctx, words)
    mentioned, asked = _mentioned(ctx, words) if not options.interactive else ((), words)
    text, included = _prompt_text(ctx, asked)
    if mentioned and not text:
        raise UsageError(
            f"@{mentioned[0]} needs a question",
            hint=f'localchat "@{mentioned[0]} what is it about?"',
        )
    nothing = not text and not options.interactive and not _is_interactive()
    if nothing and model_word is None:
        raise _nothing_to_ask()
    before = resumed(ctx)
    setup = with_slots(_resolved(ctx, model_word, before), options.tries)
    if nothing:
        raise _nothing_to_ask()
    conversation = before or Conversation()
    conversation.model = setup.model.word
    if before is None or "system" in chosen_settings(ctx):
        conversation.system = setup.settings.system or ""
    if not text and options.grammar is not None:
        raise UsageError(
            "--schema, --grammar and --regex are for one answer, and there is no prompt"
        )
    if not text and options.tries is not None:
        raise UsageError(
            "--best-of, --vote and --critique are for one answer, and there is no prompt"
        )
    if text and not options.interactive:
        from localchat.cli.chat.one_shot import answer, with_documents

        documented = partial(with_documents, conversation, mentioned, asked, (text, included))
        return answer(ctx, setup, options, conversation, documented, model_word)
    return _converse(ctx, setup, conversation, (text, included), options)


def _mentioned(ctx: click.Context, words: str) -> tuple[tuple[str, ...], str]:
    """The documents that the words mention, and the words without `@`."""
    if "@" not in words or ctx.meta.get(AFTER_DASHES):
        return (), words
    from localchat.cli.document_options import open_library

    app = ctx.find_object(AppContext)
    assert app is not None
    return open_library(app).mentions(words)


def _nothing_to_ask() -> UsageError:
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    missing = "no prompt" if at_terminal else "no prompt, and stdin is empty"
    return UsageError(
        f"there is nothing to ask: {missing}",
        hint='localchat "prompt", or text | localchat "question"; on a terminal, localchat alone chats',
    )


def _converse(
    ctx: click.Context,
    setup: Setup,
    conversation: Conversation,
    first: tuple[str, tuple[Inclusion, ...]],
    options: AskOptions,
) -> int:
    """Open the screen; with `-i`, or on a terminal without one, the line mode."""
    from localchat.tui.launch import can_show, launch

    if not first[0] and not options.interactive and can_show(setup.app.environ):
        from localchat.cli.chat.session_context import session_context

        return launch(*session_context(setup, chosen_settings(ctx)), conversation)
    gc_control.resume_gc()
    from localchat.cli.chat.line_input import open_keyboard
    from localchat.cli.chat.repl import chat

    return chat(setup, open_keyboard(setup.terminal).read, conversation, first)


def _prompt_text(ctx: click.Context, words: str) -> tuple[str, tuple[Inclusion, ...]]:
    """The prompt, and where in it the files and stdin are, which come before the words."""
    app = ctx.find_object(AppContext)
    assert app is not None
    # The settings are not resolved yet, so that a prompt that cannot be read fails before a model is located.
    early = Terminal(app.environ, quiet=bool(ctx.params["quiet"]))
    names: tuple[str, ...] = ctx.params["files"]
    files = read_files(names, early.notify)
    piped = read_stdin(early.notify)
    words = decoded_words(words, early.notify)
    text = join_parts([files, piped, words])
    asked = question(ctx, text)
    before = text.removesuffix(words)
    if asked != text or not words.strip() or not before:
        return asked, ()  # a template may have put the text anywhere
    label = ", ".join((*names, *(("stdin",) if piped.strip() else ())))
    return text, (Inclusion(label, 0, len(before.rstrip("\n"))),)


def _is_interactive() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _resolved(ctx: click.Context, model_word: str | None, before: Conversation | None) -> Setup:
    """Resolve the setup; a conversation keeps its model unless another one is named. A model that is not here
    is offered for download. Raises LocalchatError."""
    word = model_word
    if word is None and before is not None and "model" not in chosen_settings(ctx):
        word = before.model or None
    try:
        return resolve_setup(ctx, word)
    except ModelMissing as problem:
        if fetched_if_wanted(problem, Inputs.of(ctx, word)):
            return resolve_setup(ctx, word)
        if word == model_word:
            raise
        raise ModelMissing(
            f"this conversation used {word}, which is not here: {problem.message}",
            hint="continue with another one: -m MODEL",
        ) from problem
