"""The conversation of a run: a new one, or one that goes on; and how its answers come to the disk."""

from contextlib import suppress
from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.config.paths import Paths, find_paths
from localchat.errors import HistoryUnusable, LocalchatError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from localchat.chat.conversation import AnswerFigures, Conversation, Node, NodeState
    from localchat.cli.render_answer import Answer
    from localchat.cli.streams import Terminal
    from localchat.engine.interface import Engine
    from localchat.history.store import History

FILE = "history.sqlite3"
_COMPLETED = 50


def open_history(paths: Paths, *, to_read: bool = False) -> "History":
    """The history of this user. `to_read`: where there is none, an empty one that leaves no file. Raises
    HistoryUnusable."""
    from localchat.history.store import History

    path = paths.data_dir / FILE
    return History.open(None if to_read and not path.exists() else path)


def resumed(ctx: click.Context) -> "Conversation | None":
    """The conversation that `--continue` or `--conversation` names; None: neither is given. Raises
    UsageError, HistoryUnusable."""
    named, last = ctx.params["conversation"], ctx.params["continue_last"]
    if not named and not last:
        return None
    if named and last:
        raise UsageError("--continue is the last conversation; --conversation names another")
    door = ctx.find_object(AppContext)
    assert door is not None
    with open_history(find_paths(door.environ), to_read=True) as history:
        if named:
            return history.load(named)
        summary = history.last()
        if summary is None:
            raise UsageError("there is no conversation to go on with", hint="leave --continue out")
        return history.load(summary.id)


def complete(ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
    """For a shell: ids that begin so, each with its title. Nothing where the history cannot be read."""
    from click.shell_completion import CompletionItem

    from localchat.sanitize import sanitize_line

    door = ctx.find_object(AppContext)
    if door is None:
        return []
    paths = find_paths(door.environ)
    with suppress(HistoryUnusable), open_history(paths, to_read=True) as history:
        return [
            CompletionItem(summary.id, help=sanitize_line(summary.title))
            for summary in history.list(_COMPLETED)
            if summary.id.startswith(incomplete)
        ]
    return []


def opened_for_writing(paths: Paths, terminal: "Terminal", *, wanted: bool) -> "History | None":
    """The history, where it is wanted and can be used; trouble with it is said and stops no answer."""
    if not wanted:
        return None
    try:
        history = open_history(paths)
    except HistoryUnusable as problem:
        terminal.say(f"this conversation is not kept: {problem.message}")
        return None
    if history.notice:
        terminal.insist(f"localchat: {history.notice}")
    return history


def state_of(answer: "Answer", choice: int = 0) -> "NodeState":
    """How an answer ended, as the history says it."""
    reason = answer.reasons.get(choice)
    if answer.interrupted or reason in (None, "cancelled"):
        return "stopped"
    return "length" if reason == "length" else "whole"


def figures_of(answer: "Answer", engine: "Engine") -> "AnswerFigures | None":
    """What was measured; None where the engine cannot say any more what it is."""
    from localchat.chat.conversation import AnswerFigures

    try:
        info = engine.info()
    except LocalchatError:
        return None
    return AnswerFigures(
        model=info.model,
        backend=info.backend,
        quantization=info.quantization,
        kv_type=info.kv_type,
        draw_seed=answer.accepted.seed if answer.accepted else 0,
        done=answer.done,
    )


def add_answers(
    conversation: "Conversation",
    question: "Node",
    answer: "Answer",
    engine: "Engine",
    error: LocalchatError | None = None,
) -> "tuple[Node, ...]":
    """Every choice that says something as a version of the answer; the first one is shown."""
    import msgspec

    from localchat.engine.request import Message

    figures = figures_of(answer, engine)
    nodes: list[Node] = []
    for choice in sorted({0, *answer.texts, *answer.reasoning}):
        message = Message("assistant", answer.texts[choice], reasoning=answer.reasoning[choice])
        state: NodeState = "failed" if error is not None else state_of(answer, choice)
        node = conversation.add(message, parent=question.id, state=state)
        node = msgspec.structs.replace(
            node, figures=figures, error=error.message if error is not None else ""
        )
        conversation.put(node)
        nodes.append(node)
    conversation.head = nodes[0].id
    return tuple(nodes)
