"""A folder with tools over it, and a consent that follows a script."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from localchat.engine.request import CalledTool
from localchat.tools.command import command_tool
from localchat.tools.consent import Approvals, Decision
from localchat.tools.files import editing_tool, reading_tools
from localchat.tools.journal import Journal
from localchat.tools.loop import CallResult, ToolTurn
from localchat.tools.root import Root
from localchat.tools.sources import page_tool
from localchat.tools.tool import Effect, Plan, Tool

_T = TypeVar("_T")


def done(coroutine: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(coroutine)


@dataclass
class ScriptedConsent:
    """Answers with these decisions, then with the last one."""

    decisions: list[Decision] = field(default_factory=lambda: ["once"])
    asked: list[tuple[Tool, Plan]] = field(default_factory=list)

    async def ask(self, tool: Tool, plan: Plan) -> Decision:
        self.asked.append((tool, plan))
        if len(self.decisions) > 1:
            return self.decisions.pop(0)
        return self.decisions[0]


class ToolScene:
    """All tools of our own on one folder."""

    def __init__(
        self,
        folder: Path,
        *decisions: Decision,
        allowed: frozenset[Effect] = frozenset(),
        nobody: bool = False,
        max_rounds: int = 25,
        journal: Path | None = None,
    ) -> None:
        self.folder = folder
        self.root = Root(folder)
        self.journal = Journal(journal)
        self.journal.begin("c1", "n1")
        tools = (
            *reading_tools(self.root),
            editing_tool(self.root, self.journal),
            command_tool(self.root, {"PATH": "/usr/bin:/bin", "API_KEY": "secret-value"}),
            page_tool(offline=False),
        )
        self.tools: dict[str, Tool] = {tool.name: tool for tool in tools}
        self.consent = ScriptedConsent(list(decisions or ("once",)))
        approvals = Approvals(None if nobody else self.consent, allowed)
        self.turn = ToolTurn(self.tools, approvals, max_rounds=max_rounds, context_tokens=8192)

    def call(self, name: str, **arguments: object) -> CallResult:
        """Run one call, and return its result."""
        (result,) = self.calls((name, msgspec.json.encode(arguments).decode()))
        return result

    def calls(self, *calls: tuple[str, str]) -> tuple[CallResult, ...]:
        """Run calls of one answer, as name and JSON."""
        called = [CalledTool(name, text, f"id{n}") for n, (name, text) in enumerate(calls)]
        return done(self.turn.run(called, lambda *_: None))

    def text(self, name: str, **arguments: object) -> str:
        return self.call(name, **arguments).message.content
