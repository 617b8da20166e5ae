"""Answer one prompt with tools. The session of the line mode runs their calls."""

from typing import TYPE_CHECKING, Any, Final

import msgspec

from localchat import gc_control
from localchat.chat.answer_end import ended_early
from localchat.chat.conversation import Conversation, Node, Question
from localchat.cli.chat.ask_options import AskOptions
from localchat.cli.chat.conversation_options import open_to_record
from localchat.cli.chat.json_report import report
from localchat.cli.chat.one_shot import first_code_block, with_documents
from localchat.cli.chat.render_answer import ReceivedAnswer
from localchat.cli.chat.repl import Repl
from localchat.cli.chat.terminal_consent import open_consent
from localchat.cli.resolve import Setup, opened_engine
from localchat.cli.signals import deferred, terminate_gracefully
from localchat.config.settings_file import read_settings
from localchat.engine.interface import EngineInfo
from localchat.errors import AnswerCut, ExitCode, LocalchatError, UsageError
from localchat.history.store import History
from localchat.tools.toolset import parse_groups

if TYPE_CHECKING:
    from localchat.tools.tool import Effect

READ_ONLY: "Final[frozenset[Effect]]" = frozenset({"read"})
"""Effects that `--yes` allows."""


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
    history = open_to_record(setup.paths, setup.terminal, enabled=setup.settings.history)
    if history is None:
        history = History.open(None)
    prints_whole = options.as_json or options.extract
    with history, terminate_gracefully(), opened_engine(setup) as engine:
        gc_control.resume_gc()
        with deferred():
            question = with_documents(setup, conversation, mentioned, words, prompt, engine)
            repl = Repl(
                setup,
                engine,
                history,
                conversation,
                print_text=not prints_whole,
                consent=consent,
                allowed=READ_ONLY if options.yes else frozenset(),
            )
            try:
                outcome = repl.ask_once(question)
                # Before the end of the block, because an attached engine knows nothing once it is closed.
                info = engine.info()
            finally:
                repl.close()
    if outcome.error is not None:
        raise outcome.error
    if outcome.node is not None and prints_whole:
        _print(setup, options, conversation, outcome.node, info)
    if outcome.end == "stopped":
        return ExitCode.INTERRUPTED
    if options.require_complete and outcome.node and ended_early(outcome.node.end):
        raise AnswerCut(
            "the answer is not complete", hint="without --require-complete this is not an error"
        )
    return ExitCode.OK


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


def _print(
    setup: Setup, options: AskOptions, conversation: Conversation, node: Node, info: EngineInfo
) -> None:
    text = node.message.content
    if options.extract:
        code = first_code_block(text)
        if code is None:
            raise LocalchatError(
                "the answer contains no fenced code block", hint=f"the answer was:\n{text}"
            )
        text = code
    if options.as_json:
        answer = ReceivedAnswer()
        answer.reasoning[0] = node.message.reasoning
        answer.reasons[0] = "stop"
        if node.end is not None:
            answer.reasons[0] = node.end.reason
            answer.ends[0] = node.end
        if node.metrics is not None:
            answer.status.done = node.metrics.done
        fields = report(answer, info, 1, {0: text})
        fields["tool_calls"] = _calls(conversation)
        text = msgspec.json.encode(fields).decode()
    setup.terminal.answer(text)
    setup.terminal.end_answer()


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
