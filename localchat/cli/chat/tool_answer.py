"""Answer one prompt with tools. The session of the line mode runs their calls."""

from typing import Any

import msgspec

from localchat import gc_control
from localchat.chat.conversation import Conversation, Question
from localchat.cli.chat.ask_options import AskOptions
from localchat.cli.chat.conversation_options import open_for_session
from localchat.cli.chat.one_shot import OneShot, with_documents
from localchat.cli.chat.received_answer import ReceivedAnswer
from localchat.cli.chat.repl import Repl
from localchat.cli.chat.terminal_consent import open_consent
from localchat.cli.resolve import Setup, opened_engine
from localchat.cli.signals import deferred, terminate_gracefully
from localchat.config.settings_file import read_settings
from localchat.engine.events import Finished
from localchat.errors import UsageError
from localchat.session.answer_builder import AnswerBuilder
from localchat.session.outcome import Outcome
from localchat.session.view import HiddenView
from localchat.tools.toolset import parse_groups


def answer_with_tools(
    setup: Setup,
    options: AskOptions,
    conversation: Conversation,
    mentioned: tuple[str, ...],
    words: str,
    prompt: Question,
) -> int:
    """Answer once, print the answer and return the exit code. Raises LocalchatError."""
    _check(setup, options)
    consent = open_consent(setup.terminal)
    if consent is None and not options.yes:
        raise UsageError(
            "tools need your consent, and there is no terminal to ask on",
            hint="--yes allows the calls that only read; --tools off turns tools off",
        )
    with open_for_session(setup) as history, terminate_gracefully(), opened_engine(setup) as engine:
        gc_control.resume_gc()
        with deferred():
            question = with_documents(setup, conversation, mentioned, words, prompt, engine)
            repl = Repl(
                setup,
                engine,
                history,
                conversation,
                print_text=not (options.as_json or options.extract),
                consent=consent,
                allowed=options.allowed,
            )
            try:
                outcome = repl.ask_once(question)
                if outcome.error is not None:
                    raise outcome.error
                one_shot = OneShot(setup, engine, options, conversation)
                _receive(one_shot.answer, outcome, conversation)
                calls = []
                if outcome.node is not None:
                    calls = _calls(conversation)
                # Before the end of the block, because an attached engine knows nothing once it is closed.
                return one_shot.print_rest(calls)
            finally:
                repl.close()


def _receive(answer: ReceivedAnswer, outcome: Outcome, conversation: Conversation) -> None:
    """Store the last answer of the session, to print it like an answer without tools."""
    choice = AnswerBuilder(conversation, HiddenView(), conversation.head or "", outcome.node)
    answer.choices = (choice,)
    answer.interrupted = outcome.end == "stopped"
    node = outcome.node
    if node is not None and outcome.end == "complete":
        choice.take(node.end or Finished(0, "stop"))
    if node is not None and node.metrics is not None:
        answer.status.done = node.metrics.done


def _check(setup: Setup, options: AskOptions) -> None:
    """Raise UsageError for unknown tools, and for flags that cannot be combined with tools."""
    servers = read_settings(setup.paths.settings_file).mcp_servers
    parse_groups(setup.settings.tools, servers)
    flags = {
        "--raw-prompt": options.raw_prompt,
        "--schema, --grammar and --regex": options.grammar is not None,
        "--n": setup.settings.n > 1,
    }
    for flag, is_given in flags.items():
        if is_given:
            raise UsageError(f"{flag} cannot be combined with tools", hint="--tools off")


def _calls(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the calls of the last question with their results, in order."""
    path = conversation.path()
    first = max(number for number, node in enumerate(path) if node.message.role == "user")
    rows = []
    for node in path[first:]:
        results = conversation.results(node.id)
        for call in node.message.tool_calls:
            result = results.get(call.id)
            row: dict[str, Any] = {"name": call.name, "arguments": call.arguments}
            if result is not None and result.run is not None:
                row |= msgspec.to_builtins(result.run) | {"result": result.message.content}
            rows.append(row)
    return rows
