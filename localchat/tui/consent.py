"""Asks on the screen whether a tool call may run."""

import asyncio
from typing import TYPE_CHECKING

# Without tools, the screen never loads them.
if TYPE_CHECKING:
    from textual.app import App

    from localchat.tools.consent import Decision
    from localchat.tools.tool import Plan, Tool


class ScreenConsent:
    """Asks about one call after the other."""

    def __init__(self, app: "App[int]") -> None:
        self._app = app
        self._turn = asyncio.Lock()

    async def ask(self, tool: "Tool", plan: "Plan") -> "Decision":
        """Show a call, and return the decision. A cancellation takes the question away."""
        from localchat.tui.screens.consent import ConsentScreen

        async with self._turn:
            screen = ConsentScreen(tool, plan)
            decided: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()

            def closed(decision: "Decision | None") -> None:
                if not decided.done():
                    decided.set_result(decision or "no")

            await self._app.push_screen(screen, closed)
            try:
                return await decided
            except asyncio.CancelledError:
                if screen.is_current:
                    screen.dismiss("no")
                raise
