"""Several tries at the next answer of a conversation. One is shown, a card stores the others."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final

import msgspec

from localchat.chat.conversation import Node
from localchat.engine.events import Done, Event, Finished, Reasoning, Text, ToolCall
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest
from localchat.engine.stream import Stream
from localchat.errors import UsageError
from localchat.session.blocks import TriesBlock
from localchat.session.view import SessionView

# What tries need is imported when there are any: the first frame of the screen waits for none of it.
if TYPE_CHECKING:
    from localchat.tries.collection import Tries
    from localchat.tries.model_judge import ModelJudge
    from localchat.tries.spec import TriesSpec

_FORM: Final = "vote N [KIND], best N, or critique"


def parse_tries(words: str) -> "TriesSpec":
    """The tries that a command asks for. Raises UsageError."""
    from localchat.tries.extractor import extractor, last_number
    from localchat.tries.spec import MOST_TRIES, TriesSpec

    name, _, rest = words.partition(" ")
    number, _, kind = rest.strip().partition(" ")
    if name == "critique" and not rest.strip():
        return TriesSpec(critique=True)
    if name not in ("vote", "best") or not number.isdecimal() or (kind and name == "best"):
        raise UsageError(f"/tries {words}: it takes {_FORM}")
    count = int(number)
    if not 2 <= count <= MOST_TRIES:
        raise UsageError(f"/tries {name} {count}: 2 to {MOST_TRIES} tries are possible")
    if name == "best":
        return TriesSpec(count, "best_of")
    return TriesSpec(count, "vote", extractor(kind) if kind else last_number)


def describe(spec: "TriesSpec") -> str:
    """One sentence for the user who asked for them."""
    if spec.critique:
        return "the model reviews its next answer, and keeps a correction if that is better"
    kept = "the one that most agree on" if spec.method == "vote" else "the likeliest"
    return f"the next message is tried {spec.count} times; {kept} is kept"


class NextTries:
    """What the user asked for the next answer; then it is one try again."""

    def __init__(self) -> None:
        self.next: TriesSpec | None = None

    def begin(self, request: GenerateRequest, engine: Engine) -> "TriesRun":
        """Begin with a request that is sent now. Raises UsageError."""
        spec = self.next
        if spec is not None and spec.needs_judge:
            from localchat.tries.critique import refuse_guide

            refuse_guide(engine.info().model, "/tries critique")
        self.next = None
        return TriesRun(spec, request, engine)


class TriesRun:
    """One request, perhaps of several tries: gives the events of the answer that is kept."""

    def __init__(self, spec: "TriesSpec | None", request: GenerateRequest, engine: Engine) -> None:
        """`spec` None: one try. Raises UsageError for a request whose tries would all be the same."""
        one = msgspec.structs.replace(request, n=1)
        self.request = request if spec is None else spec.widened(one)
        self._spec = spec
        self._engine = engine
        self._tries = spec.begin() if spec is not None else None
        self._texts: dict[str, str] = {}
        """What the card shows, by title."""
        self.label = ""
        """Gain and cost in one line, once `batches` has ended."""

    async def batches(
        self, stream: Stream, progress: Callable[[str], None]
    ) -> AsyncIterator[list[Event]]:
        """Events of progress as they come, then those of the kept answer. `progress`: gets a line."""
        spec = self._spec
        tries = self._tries
        if spec is None or tries is None:
            async for batch in stream.batches():
                yield batch
            return
        from localchat.tries.model_judge import ModelJudge, summed

        held: defaultdict[int, list[Event]] = defaultdict(list)
        done: Done | None = None
        async for batch in stream.batches():
            passed: list[Event] = []
            for event in batch:
                tries.add(event)
                match event:
                    case Text() | Reasoning() | ToolCall() | Finished():
                        held[event.choice].append(event)
                    case Done():
                        done = event
                    case _:
                        passed.append(event)
            progress(tries.progress())
            if passed:
                yield passed
            if tries.method == "vote" and tries.vote.open and tries.decided:
                stream.close()
                break
        judge = ModelJudge(self._ask, self.request)
        if spec.critique:
            progress("judging the answer")
            kept = await self._criticized(judge, tries, held[0])
        else:
            self.label = tries.report().sentence()
            kept = [msgspec.structs.replace(one, choice=0) for one in held[tries.chosen]]
            for number, text in sorted(tries.texts.items()):
                mark = ", kept" if number == tries.chosen else ""
                ended = "" if number in tries.vote.answers else ", cancelled"
                self._texts[f"Try {number + 1}{mark}{ended}"] = text
        if done is not None:
            usage = summed(done.usage, judge.spent)
            kept.append(msgspec.structs.replace(done, usage=usage))
        progress("")
        yield kept

    async def _criticized(
        self, judge: "ModelJudge", tries: "Tries", events: list[Event]
    ) -> list[Event]:
        if not tries.whole:
            self.label = "critique: the answer did not end, so it was not judged"
            return events
        review = await judge.critique(tries.texts[0])
        cost = f"{tries.tokens + judge.tokens:,} tokens, {tries.tokens:,} without it"
        self.label = f"critique: {review.outcome} · {cost}"
        if review.faults:
            self._texts["Faults"] = "\n".join(f"- {fault}" for fault in review.faults)
        if review.second is None or not review.replaced:
            if review.second is not None:
                self._texts["Second answer"] = review.second
            return events
        self._texts["First answer"] = review.first
        return [Text(0, review.second), Finished(0, "stop")]

    async def _ask(self, request: GenerateRequest) -> Stream:
        return await asyncio.to_thread(self._engine.generate, request)

    def show_card(self, view: SessionView, node: Node | None) -> None:
        """Put the card below the answer, folded until it is opened; nothing below one try."""
        if node is not None and self.label:
            texts = (f"{title}:\n{text.strip()}" for title, text in self._texts.items())
            view.put(TriesBlock(f"{node.id}/tries", self.label, "\n\n".join(texts)))
