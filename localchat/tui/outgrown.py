"""When a conversation outgrows the context: nothing is sent, the ways on are offered, and one is taken."""

import asyncio
from typing import TYPE_CHECKING, Final

from localchat.chat.compaction import Compaction
from localchat.chat.overflow import (
    Choice,
    Overflow,
    counter,
    examine,
    known_context,
    leave_out,
    reserve_tokens,
    what_to_leave_out,
)
from localchat.engine.events import Text
from localchat.errors import ContextExceeded, LocalchatError, UsageError
from localchat.tui.blocks import Offer

if TYPE_CHECKING:
    from localchat.tui.session import Session

PREFIX: Final = "overflow/"


class Outgrown:
    """Of one session. `found`: what was offered last."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self.found: Overflow | None = None

    async def offer(self, problem: ContextExceeded) -> None:
        """Say that nothing was sent, and what can be done; where the person chose to leave out the oldest
        before, that is done again. Returns with `found` set."""
        session = self._session
        try:
            engine = await session.engine()
            info = await asyncio.to_thread(engine.info)
            self.found = await asyncio.to_thread(
                examine,
                session.conversation,
                counter(engine),
                info,
                max_tokens=session.settled.settings.max_tokens,
                thinking=session.settled.settings.think,
                refusal=problem,
            )
        except LocalchatError:  # an engine that cannot count, or is gone: its own words must do
            session.complain(problem, (Offer("a new conversation", "new"),))
            return
        offers = [Offer(each.label, f"{PREFIX}{each.action}") for each in self.found.choices]
        offers.append(Offer("another model", "model"))
        sentence = self.found.sentence
        session.notice(f"{sentence[0].upper()}{sentence[1:]}.", "warning", offers)

    async def again(self, problem: ContextExceeded) -> bool:
        """The choice made before, made again: leave out what is too old by now. False where nothing was
        chosen, or where it does not help. `problem`: the refusal, which may know the context better than the
        engine's `info`."""
        session = self._session
        if session.conversation.policy.kind != "leave_out_oldest":
            return False
        engine = await session.engine()
        known = problem.details.get("context_tokens")
        context = known if isinstance(known, int) else 0
        context = context or (await asyncio.to_thread(engine.info)).context_tokens
        settings = session.settled.settings
        cut = await asyncio.to_thread(
            what_to_leave_out,
            session.conversation,
            counter(engine),
            context,
            reserve_tokens(context, settings.max_tokens),
            thinking=settings.think,
        )
        if cut is None or not cut.nodes:
            return False
        leave_out(session.conversation, cut)
        session.keeper.changed()
        session.show()
        return True

    async def take(self, action: str) -> None:
        """Do what a notice offered, and send the question. Raises LocalchatError."""
        choice = self._choice(action)
        session = self._session
        match choice.action:
            case "leave_out_oldest":
                assert self.found is not None and self.found.cut is not None
                leave_out(session.conversation, self.found.cut)
                session.keeper.changed()
                session.show()
            case "compact":
                await self.compact()
            case "longer_context":
                session.use(None, {"context_length": str(choice.tokens)}).apply()
            case "smaller_kv":
                changes = {"context_length": str(choice.tokens), "kv_cache_type": choice.kv_type}
                session.use(None, changes).apply()
        await session.retry()

    def _choice(self, action: str) -> Choice:
        name = action.removeprefix(PREFIX)
        for choice in self.found.choices if self.found else ():
            if choice.action == name:
                return choice
        raise UsageError("this offer is no longer open", hint="send the question again")

    async def compact(self) -> None:
        """Let the model sum up the older part; the summary is sent in its place. Raises LocalchatError, and
        then nothing has changed."""
        session = self._session
        with session.occupied("summing up"):
            engine = await session.engine()
            info = await asyncio.to_thread(engine.info)
            count = counter(engine)
            context = known_context(info, self.found)
            run = await asyncio.to_thread(Compaction, session.conversation, count, context)
            while (request := await asyncio.to_thread(run.request)) is not None:
                pieces: list[str] = []
                session.working(f"summing up {run.progress * 100:.0f} %")
                with session.streaming(await asyncio.to_thread(engine.generate, request)) as stream:
                    async for event in stream:
                        session.watch(event)
                        if isinstance(event, Text):
                            pieces.append(event.text)
                run.take("".join(pieces))
            for node in run.finish():
                session.keeper.changed(node)
            session.keeper.changed()
        session.show()
