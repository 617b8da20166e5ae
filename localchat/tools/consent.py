"""Consent: the user allows or refuses each call, and the decisions that last for the session.

A front end implements `Consent`. Without one, only the effects that the command allowed in advance run.
"""

from typing import Final, Literal, Protocol, TypeAlias

from localchat.tools.tool import Effect, Plan, Tool, ToolError

Decision: TypeAlias = Literal["once", "session", "no", "never"]
"""`session` allows and `never` refuses every call of the same scope from now on."""
EFFECTS: Final[dict[Effect, str]] = {
    "read": "read",
    "write": "change a file; /undo takes it back",
    "run": "run a program; its changes cannot be undone",
    "network": "reach the internet",
}


class Consent(Protocol):
    """Asks the user. The front ends implement it."""

    async def ask(self, tool: Tool, plan: Plan) -> Decision:
        """Show a call and return the decision. Cancellation means that nothing runs."""
        ...


class Approvals:
    """Decides about calls, and remembers the decisions for the session."""

    def __init__(self, consent: Consent | None, allowed: frozenset[Effect] = frozenset()) -> None:
        """`consent`: None without a user to ask. `allowed`: effects that run without a question."""
        self._consent = consent
        self._allowed = allowed
        self._decisions: dict[tuple[str, str], Decision] = {}

    async def require(self, tool: Tool, plan: Plan) -> None:
        """Return if the call may run. Raises Refused."""
        if tool.effect in self._allowed:
            return
        key = (tool.effect, plan.scope)
        decision = self._decisions.get(key)
        if decision is None:
            if self._consent is None:
                way = "only a user at a terminal can allow it"
                if tool.effect == "read":
                    way = "--yes allows it"
                raise Refused(
                    f"{tool.name} was not run: it may {EFFECTS[tool.effect].partition(';')[0]}, and the user "
                    f"cannot be asked here; {way}"
                )
            decision = await self._consent.ask(tool, plan)
            if decision in ("session", "never"):
                self._decisions[key] = decision
        if decision in ("no", "never"):
            raise Refused("the user refused this call; do not try it again")


class Refused(ToolError):
    """The user, or a rule of the session, did not allow a call."""
