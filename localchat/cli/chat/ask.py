"""Answer a prompt once, or open a conversation if there is no prompt.

The one-shot answer, the line mode and the screen are imported when they are used, so that each starts fast.
"""

import sys
from pathlib import Path

import click
import msgspec

from localchat import gc_control
from localchat.chat.conversation import Conversation, Question
from localchat.cli.chat.ask_options import AskOptions, ask_options
from localchat.cli.chat.choose_model import fetched_if_wanted
from localchat.cli.chat.conversation_options import resumed
from localchat.cli.chat.prompt import (
    decoded_words,
    prompt_of,
    read_files,
    read_stdin,
    with_named_files,
)
from localchat.cli.context import app_context
from localchat.cli.options import AFTER_DASHES, given_flags
from localchat.cli.resolve import Inputs, Setup, resolve_setup
from localchat.cli.streams import Terminal
from localchat.errors import ModelMissing, UsageError
from localchat.session.file_mentions import mentioned_files


def ask(ctx: click.Context, words: str, model_word: str | None = None) -> int:
    """Answer and return the exit code. Raises LocalchatError."""
    options = ask_options(ctx)
    mentioned: tuple[str, ...] = ()
    if not options.interactive:
        mentioned, words = _mentioned(ctx, words)
    prompt = _prompt(ctx, words)
    if prompt.attachments and options.raw_prompt:
        raise UsageError("--raw-prompt sends text only; pictures need the chat template")
    if mentioned and not prompt:
        raise UsageError(
            f"@{mentioned[0]} needs a question",
            hint=f'localchat "@{mentioned[0]} what is it about?"',
        )
    # On a terminal, no prompt starts a conversation.
    has_nothing = not prompt and not options.interactive and not _is_interactive()
    if has_nothing and model_word is None:
        raise _nothing_to_ask()
    before = resumed(ctx)
    setup = _resolved(ctx, model_word, before)
    # With a model, an unknown model is the more helpful error, so resolve it first.
    if has_nothing:
        raise _nothing_to_ask()
    conversation = before or Conversation()
    conversation.model = setup.model.word
    if before is None or "system" in given_flags(ctx):
        conversation.system = setup.settings.system or ""
    # These flags apply to one answer, so a conversation would ignore them.
    if not prompt and options.grammar is not None:
        raise UsageError(
            "--schema, --grammar and --regex are for one answer, and there is no prompt"
        )
    has_tools = setup.settings.tools not in ("", "off")
    if options.yes and not has_tools:
        raise UsageError("--yes allows tool calls, and tools are off", hint="--tools read")
    if prompt and not options.interactive and has_tools:
        from localchat.cli.chat.tool_answer import answer_with_tools

        return answer_with_tools(setup, options, conversation, mentioned, words, prompt)
    if prompt and not options.interactive:
        from localchat.cli.chat.one_shot import answer

        return answer(setup, options, conversation, mentioned, words, prompt)
    return _converse(ctx, setup, conversation, prompt, options)


def _mentioned(ctx: click.Context, words: str) -> tuple[tuple[str, ...], str]:
    """Return the documents that the words mention, and the words without `@`."""
    if "@" not in words or ctx.meta.get(AFTER_DASHES):
        return (), words
    from localchat.cli.document_options import open_library

    library = open_library(app_context(ctx))
    begun = words.lstrip()
    if begun.startswith("@") and not mentioned_files(begun.split()[0], Path()):
        library.check_first_mention(begun, strict=True)
    return library.mentions(words)


def _nothing_to_ask() -> UsageError:
    reason = "no prompt"
    if sys.stdin is None or not sys.stdin.isatty():
        reason += ", and stdin is empty"
    return UsageError(
        f"there is nothing to ask: {reason}",
        hint='localchat "prompt", or text | localchat "question"; on a terminal, localchat alone chats',
    )


def _converse(
    ctx: click.Context,
    setup: Setup,
    conversation: Conversation,
    first: Question,
    options: AskOptions,
) -> int:
    """Open the screen. Use the line mode with `-i`, or if the terminal cannot show the screen."""
    from localchat.tui.launch import can_show, launch

    screen = not setup.settings.screen_reader and can_show(setup.app.environ)
    if not first and not options.interactive and screen:
        from localchat.cli.chat.session_context import session_context

        setup.terminal.silence()
        return launch(*session_context(setup), conversation, options.allowed)
    gc_control.resume_gc()
    from localchat.cli.chat.line_input import open_keyboard
    from localchat.cli.chat.repl import chat

    keyboard = open_keyboard(setup.terminal)
    return chat(setup, keyboard.read, conversation, first, allowed=options.allowed)


def _prompt(ctx: click.Context, words: str) -> Question:
    """Return the prompt. Files and stdin come before the words."""
    app = app_context(ctx)
    # The settings are not resolved yet, so that an unreadable prompt fails before a model is located.
    terminal = Terminal(app.environ, quiet=bool(ctx.params["quiet"]))
    names: tuple[str, ...] = ctx.params["files"]
    files = read_files(names, terminal.notify)
    piped = read_stdin(terminal.notify)
    words = decoded_words(words, terminal.notify)
    if ctx.meta.get(AFTER_DASHES) or ctx.params["raw_prompt"]:
        return prompt_of((files, piped), Question(words))
    if words == "-" and piped.text:
        words = ""  # other programs need it to read stdin
    typed = ctx.params.get("words") or ()
    prompt = with_named_files(words, terminal.notify, parts=(files, piped), names=typed)
    # Pictures come first, so that a second question about them hits the prefix cache.
    attachments = (msgspec.structs.replace(item, position=0) for item in prompt.attachments)
    return prompt._replace(attachments=tuple(attachments))


def _is_interactive() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _resolved(ctx: click.Context, model_word: str | None, before: Conversation | None) -> Setup:
    """Resolve the setup, and offer to download a model that is missing. Raises LocalchatError.

    A conversation keeps its model unless a flag names another one.
    """
    name = model_word
    if name is None and before is not None and "model" not in given_flags(ctx):
        name = before.model or None
    try:
        return resolve_setup(ctx, name)
    except ModelMissing as problem:
        if fetched_if_wanted(problem, Inputs.of(ctx, name)):
            return resolve_setup(ctx, name)
        if name == model_word:
            raise
        raise ModelMissing(
            f"this conversation used {name}, which is not on this machine: {problem.message}",
            hint="continue with another one: -m MODEL",
        ) from problem
