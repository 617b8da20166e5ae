"""The loop of one question: it runs the calls of each answer, and returns results for the next request.

The front end sends the requests, because it streams and shows them:

    turn = ToolTurn(toolset.tools, approvals, …)
    while True:
        answer = turn.recorded(… generate(turn.offer(messages)) …)
        if turn.exhausted or not answer.tool_calls:
            break
        results = await turn.run(answer.tool_calls, report)

Results are text. The engine never reads control tokens in the text of a message.
"""

import asyncio
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from localchat.chat.conversation import ToolRun
from localchat.engine.request import CalledTool, Message, Messages
from localchat.errors import LocalchatError
from localchat.suggestions import did_you_mean
from localchat.tools.consent import Approvals, Refused
from localchat.tools.tool import NothingToDo, Plan, Tool, ToolError, bounded, parsed_arguments

Report: TypeAlias = Callable[[CalledTool, ToolRun, str], None]
"""Shows the state of a call, and its result or error. No text is sanitized."""
_CHANGES: Final = ("write", "run")
"""Effects that may change what other calls read."""
MAX_CALLS: Final = 16
"""Calls of one answer that run."""
_REPEATED: Final = (
    "[This is the same call as before, with the same result. Answer from it, or call another tool.]"
)
_IN_WORDS: Final = r"[^\s{<\[`](.|\n)*"
"""Small models write a call as text once they cannot call any more. A call starts with one of these signs."""
_INVENTED: Final = re.compile(r'\s*(```\w*\s*)?\{\s*"name":\s*"[^"]*",\s*"(arguments|parameters)":')
"""Start of an answer that is a call as text. The parser reads it only if the tool exists."""
_ANY_TOOL: Final = "required"
_MIN_RESULT: Final = 1500
_MAX_RESULT: Final = 16_000
_INSTRUCTIONS: Final = (
    "The user cannot call the tools: you call them. To find out something about files, or to act, call a "
    "tool at once instead of describing it. Once the results contain the answer, give it in plain words."
)
"""Small models need these: otherwise they advise the user, or call again and again."""
NO_MORE_CALLS: Final = (
    "\n\n[No more calls are possible. Now answer the question of the user in plain words.]"
)
"""Appended to the last result, so that the model does not announce another call."""
STOPPED: Final = "This call was not finished: the user stopped it."


class CallResult(NamedTuple):
    """Result of a call, for the model and for the history."""

    message: Message
    run: ToolRun


class ToolTurn:
    """Runs the calls of the answers to one question. Use it on one event loop."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        approvals: Approvals,
        *,
        max_rounds: int,
        context_tokens: int,
        forces_calls: bool = False,
    ) -> None:
        """`max_rounds`: answers whose calls run. `context_tokens`: bounds the results. `forces_calls`: whether
        the engine can continue an answer with a call of a certain tool."""
        self.tools = tools
        self._approvals = approvals
        self._max_rounds = max_rounds
        self._forces_calls = forces_calls
        self._limit = max(_MIN_RESULT, min(_MAX_RESULT, context_tokens))
        self.rounds = 0
        """Number of answers whose calls have run."""
        self._question = ""
        """The user's last message."""
        self._announced = ""
        """Tool that the next answer must call, or `required` for any tool.

        The model has described a call instead of making it."""
        self._has_failed = True
        """Whether the last call has failed. True before the first one."""
        self._loops = False
        """Whether the model repeats itself, so that it has to answer now."""
        self._repeated: frozenset[str] = frozenset()
        """Tools that read whose calls the last round repeated. The next answer cannot call them."""
        self._has_repeated = False
        """Whether any round only repeated calls."""
        self._earlier: dict[str, CallResult] = {}
        """Results by name and arguments. A call that may change anything clears them."""
        self._results: dict[str, CallResult] = {}
        """Results of the answer whose calls run, by the id of the call."""
        self._report: Report = lambda call, run, text: None

    @property
    def exhausted(self) -> bool:
        """Whether no more calls run for this question."""
        return self._loops or self.rounds >= self._max_rounds

    @property
    def answer_pattern(self) -> str:
        """Regular expression of an answer in words. Empty: the answer is free."""
        if self._forces_calls and self.exhausted:
            return _IN_WORDS
        return ""

    def must_answer(self, answer: Message) -> bool:
        """Return True if an answer after results is empty, and another one is due.

        `offer` then forces a call if the last ones have failed, and otherwise offers no tools.
        """
        if answer.content or answer.tool_calls or self.exhausted or not self.rounds:
            return False
        if self._has_failed and self._forces_calls and not self._announced:
            self._announced = _ANY_TOOL
        else:
            self._loops = True
        return True

    def must_call(self, answer: Message) -> bool:
        """Return True if an answer describes a call instead of making it. `offer` then forces the call.

        Only the first answer and one after failed calls count, and only a tool that the user has not named.
        """
        if not self._forces_calls or self._announced or self.exhausted:
            return False
        if answer.tool_calls or not self._has_failed:
            return False
        described = []
        for name in self.tools.keys() - self._repeated:
            pattern = re.compile(rf"\b{re.escape(name)}\b")
            if pattern.search(answer.content) and not pattern.search(self._question):
                described.append(name)
        if len(described) == 1:
            self._announced = described[0]
        elif described or _INVENTED.match(answer.content):
            self._announced = _ANY_TOOL
        return bool(self._announced)

    def offer(self, messages: Messages) -> Messages:
        """Add the tools to those of a request. The last one after the limit of rounds cannot call any."""
        if not self.tools:
            return messages
        choice = messages.tool_choice
        if self.exhausted:
            choice = "none"
        elif self._announced:
            choice = self._announced
        questions = [message.content for message in messages.messages if message.role == "user"]
        self._question = "".join(questions[-1:])
        tools = tuple(
            tool.offered() for name, tool in self.tools.items() if name not in self._repeated
        )
        system = Message("system")
        others = messages.messages
        if others and others[0].role == "system":
            system = others[0]
            others = others[1:]
        text = f"{system.content}\n\n{_INSTRUCTIONS}".strip()
        return msgspec.structs.replace(
            messages,
            messages=(msgspec.structs.replace(system, content=text), *others),
            tools=(*messages.tools, *tools),
            tool_choice=choice,
            # A small model that is made to call would repeat the call until its answer is full.
            parallel_tool_calls=messages.parallel_tool_calls and not self._announced,
            bind_arguments=True,
        )

    def recorded(self, answer: Message) -> Message:
        """Return an answer with ids, and without advice to make its calls."""
        answer = with_ids(answer)
        if self._announced and answer.tool_calls:
            # The user would read that the call is still to be made, and the model would write it again.
            return msgspec.structs.replace(answer, content="")
        return answer

    async def run(self, calls: Sequence[CalledTool], report: Report) -> tuple[CallResult, ...]:
        """Run the calls of one answer, and return a result for each, in order.

        `recorded` must have given each an id of its own. Reading calls run together; the others run one by one.
        A cancellation stops the calls that run, and ends normally with results that say so.
        """
        self.rounds += 1
        self._announced = ""
        self._note_repeats(calls)
        self._results = {}
        self._report = report
        readers: list[asyncio.Task[None]] = []
        try:
            for number, call in enumerate(calls):
                tool = self.tools.get(call.name)
                changes = tool is None or tool.effect in _CHANGES
                if changes:
                    await asyncio.gather(*readers)
                    readers = []
                plan = await self._planned(call, tool, number)
                if plan is None or tool is None:
                    continue
                if changes:
                    await self._execute(call, tool, plan)
                else:
                    readers.append(asyncio.create_task(self._execute(call, tool, plan)))
            await asyncio.gather(*readers)
        except asyncio.CancelledError:
            for task in readers:
                task.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        for call in calls:
            if call.id not in self._results:
                self._finish(call, Refused(STOPPED))
        results = [self._results[call.id] for call in calls]
        last = results[-1]
        self._has_failed = last.run.state == "failed"
        if self.exhausted:
            content = last.message.content + NO_MORE_CALLS
            message = msgspec.structs.replace(last.message, content=content)
            results[-1] = last._replace(message=message)
        return tuple(results)

    def _note_repeats(self, calls: Sequence[CalledTool]) -> None:
        """Leave out the tools of an answer that only repeats calls, or end the calls."""
        repeats = all(_key(call) in self._earlier for call in calls)
        self._repeated = frozenset()
        if repeats:
            # A small model repeats a call that found nothing. Another tool may find it. A repeated edit needs
            # other arguments instead.
            names = {call.name for call in calls} & self.tools.keys()
            self._repeated = frozenset(
                name for name in names if self.tools[name].effect not in _CHANGES
            )
        if repeats and (self._has_repeated or self.tools.keys() <= self._repeated):
            self._loops = True
        self._has_repeated = self._has_repeated or repeats

    async def _planned(self, call: CalledTool, tool: Tool | None, number: int) -> Plan | None:
        """Check a call and ask for consent. Return None if the call does not run."""
        title = ""
        try:
            if number >= MAX_CALLS:
                raise ToolError(f"an answer may have {MAX_CALLS} calls")
            if tool is None:
                raise ToolError(
                    f"there is no tool {call.name!r}",
                    hint=did_you_mean(call.name, self.tools),
                )
            if (before := self._earlier.get(_key(call))) is not None:
                text = f"{before.message.content}\n\n{_REPEATED}"
                self._add_result(call, ToolRun(before.run.state, characters=len(text)), text)
                return None
            plan = await tool.plan(parsed_arguments(call.arguments))
            title = plan.title
            self._report(call, ToolRun("asking", title), "")
            await self._approvals.require(tool, plan)
        except Exception as problem:  # noqa: BLE001 - see _execute
            self._finish(call, problem, title)
            return None
        return plan

    async def _execute(self, call: CalledTool, tool: Tool, plan: Plan) -> None:
        """Run a planned call."""
        self._report(call, ToolRun("running", plan.title), "")
        began_s = time.monotonic()
        outcome: str | Exception
        try:
            outcome = await plan.run()
        except Exception as problem:  # noqa: BLE001 - a tool's fault must not end the conversation
            outcome = problem
        if tool.effect in _CHANGES:
            # Earlier results may be out of date.
            self._earlier.clear()
        self._finish(call, outcome, plan.title, time.monotonic() - began_s)

    def _finish(
        self, call: CalledTool, outcome: str | Exception, title: str = "", seconds: float = 0.0
    ) -> None:
        """Report the output of a call, or why it has none."""
        state: Literal["done", "failed", "refused"] = "failed"
        match outcome:
            case str():
                state = "done"
                text = outcome or "(no output)"
            case NothingToDo():
                state = "done"
                text = str(outcome)
            case Refused():
                state = "refused"
                text = f"Error: {outcome}"
            case LocalchatError():
                text = f"Error: {outcome}"
            case _:
                text = f"Error: {call.name} failed: {type(outcome).__name__}: {outcome}"
        result = self._add_result(call, ToolRun(state, title, seconds, len(text)), text)
        tool = self.tools.get(call.name)
        has_changed = tool is not None and tool.effect in _CHANGES and state != "failed"
        if isinstance(outcome, NothingToDo) or not has_changed:
            self._earlier.setdefault(_key(call), result)

    def _add_result(self, call: CalledTool, run: ToolRun, text: str) -> CallResult:
        """Report a call that has ended, and store its result for the model."""
        self._report(call, run, text)
        message = Message("tool", bounded(text, self._limit), tool_call_id=call.id, name=call.name)
        result = self._results[call.id] = CallResult(message, run)
        return result


def with_ids(answer: Message) -> Message:
    """Return an answer whose calls have different ids, so that each result finds its call."""
    seen: set[str] = set()
    calls = []
    for call in answer.tool_calls:
        id_ = call.id
        if not id_ or id_ in seen:
            id_ = f"call_{secrets.token_hex(12)}"
        seen.add(id_)
        calls.append(msgspec.structs.replace(call, id=id_))
    return msgspec.structs.replace(answer, tool_calls=tuple(calls))


def _key(call: CalledTool) -> str:
    """Return name and arguments, which are compared as JSON if they are."""
    arguments = call.arguments
    with suppress(ToolError):
        arguments = json.dumps(parsed_arguments(arguments), sort_keys=True)
    return f"{call.name} {arguments}"
