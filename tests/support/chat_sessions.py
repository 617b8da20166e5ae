"""A session on a stage, without a screen: for the tests of what is asked, shown and kept."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from localchat.chat.conversation import Conversation
from localchat.session.blocks import Block, NoticeBlock
from localchat.session.engine_holder import EngineHolder
from localchat.session.recorder import ConversationRecorder
from localchat.session.session import ChatSession
from tests.support.tui_stage import Stage


class Sheet:
    """A page that remembers what it shows."""

    def __init__(self) -> None:
        self.blocks: dict[str, Block] = {}
        self.pieces: list[tuple[str, str]] = []
        self.changes = 0

    def show(self, blocks: Sequence[Block]) -> None:
        self.blocks = {block.id: block for block in blocks}

    def put(self, block: Block) -> None:
        self.blocks[block.id] = block

    def append_text(self, id_: str, text: str) -> None:
        assert id_ in self.blocks
        self.pieces.append((id_, text))

    def finish(self, block: Block) -> None:
        assert block.id in self.blocks
        self.blocks[block.id] = block

    def remove(self, id_: str) -> None:
        self.blocks.pop(id_, None)

    def status_changed(self) -> None:
        self.changes += 1

    def texts(self) -> list[str]:
        return [
            getattr(block, "text", "")
            for block in self.blocks.values()
            if not isinstance(block, NoticeBlock)
        ]

    def notices(self) -> list[NoticeBlock]:
        return [block for block in self.blocks.values() if isinstance(block, NoticeBlock)]


class Chat:
    """A session on a stage, with its sheet."""

    def __init__(self, stage: Stage, *, keep_unanswered: bool = True) -> None:
        self.stage = stage
        self.page = Sheet()
        engines = EngineHolder()
        app = stage.app()
        setup = stage.resolve(None, {})
        engines.open(setup.open_engine)
        self.engines = engines
        self.session = ChatSession(
            app.session.context,
            engines,
            setup,
            self.page,
            ConversationRecorder(),
            Conversation(model="tiny"),
            keep_unanswered=keep_unanswered,
        )

    async def until(self, true: Callable[[], object]) -> None:
        for _ in range(18_000):
            if true():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it did not become true")


def run(
    stage: Stage,
    play: Callable[[Chat], Coroutine[Any, Any, object]],
    *,
    keep_unanswered: bool = True,
) -> None:
    async def all_of_it() -> None:
        await play(Chat(stage, keep_unanswered=keep_unanswered))

    asyncio.run(all_of_it())
