"""The session's view: shows blocks in the transcript of the chat screen, and says what came out of sight."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from localchat.models.resolve import GUIDE
from localchat.sanitize import sanitize_line
from localchat.session.blocks import (
    END_PREFIX,
    OVERFLOW_PREFIX,
    RETRY,
    AnswerBlock,
    Block,
    NoticeBlock,
    Offer,
    SummaryBlock,
    UserBlock,
)
from localchat.tui.guide_answers import OFFERS_ID, complete_part, for_screen, offers_for

if TYPE_CHECKING:
    from localchat.session.session import ChatSession
    from localchat.tui.transcript.widget import Transcript


_CLICK: Final = "▸"
"""Stands for the key of an offer that only a click takes."""


class BlockScreen(Protocol):
    """The part of the chat screen that the view uses. Called on the event loop only."""

    session: "ChatSession"

    @property
    def transcript(self) -> "Transcript": ...

    @property
    def is_welcoming(self) -> bool:
        """Whether the conversation is still empty."""
        ...

    @property
    def is_covered(self) -> bool:
        """Whether the panel replaces the conversation."""
        ...

    @property
    def reserved_offers(self) -> int:
        """How many offers the welcome may number."""
        ...

    @property
    def suggested_models(self) -> tuple[Offer, ...]:
        """Models that the welcome offers."""
        ...

    def blocks_changed(self) -> None:
        """Show the welcome or the transcript."""
        ...

    def status_changed(self) -> None:
        """Update status bar, panel and heading."""
        ...

    def hint(self, text: str) -> None:
        """Show a text above the composer for some seconds."""
        ...


class TranscriptView:
    """Implements `SessionView`. `offer_key`: the key of an offer by its number, as it is shown."""

    def __init__(self, screen: BlockScreen, offer_key: Callable[[int], str]) -> None:
        self._screen = screen
        self._offer_key = offer_key
        self._growing: dict[str, str] = {}
        """Unfinished answers of the guide by id, as the guide writes them."""

    def show(self, blocks: Sequence[Block]) -> None:
        transcript = self._screen.transcript
        transcript.show([self._worded(block) for block in blocks])
        for block in blocks:
            if isinstance(block, SummaryBlock) and block.is_new:
                transcript.open_fold(block.id)
        transcript.to_end()
        self._screen.blocks_changed()

    def put(self, block: Block) -> None:
        transcript = self._screen.transcript
        block = self._worded(block)
        if isinstance(block, AnswerBlock) and self._is_from_guide(block.id):
            self._growing[block.id] = block.text
        if isinstance(block, NoticeBlock):
            block = self._with_keys(block)
            self._take_keys(block)
        elif isinstance(block, UserBlock):
            transcript.drop(OFFERS_ID)
            self._keep_offers(lambda offer: not _is_about_question(offer.action))
        transcript.put(block)
        if self._screen.is_welcoming:
            self._screen.blocks_changed()
        if isinstance(block, NoticeBlock):
            self._screen.status_changed()  # it names the keys of the offers
            if not transcript.following or self._screen.is_covered:
                self._screen.hint(f"{sanitize_line(block.text.partition(chr(10))[0])} · Ctrl+End")

    def append_text(self, id_: str, text: str) -> None:
        transcript = self._screen.transcript
        block = transcript.block(id_)
        if id_ in self._growing and isinstance(block, AnswerBlock):
            self._growing[id_] += text
            answer = for_screen(complete_part(self._growing[id_]), self._keys)
            transcript.put(block._replace(text=answer.text))
        else:
            transcript.append_text(id_, text)

    def finish(self, block: Block) -> None:
        self._growing.pop(block.id, None)
        self._screen.transcript.put(self._worded(block))
        self._screen.transcript.finish(block.id)
        if isinstance(block, AnswerBlock) and self._is_from_guide(block.id):
            self._offer_models(block.text)

    def _offer_models(self, answer: str) -> None:
        """Offer what the guide cannot do itself below its answer."""
        shown = for_screen(answer, self._keys)
        offers = offers_for(shown, self._screen.suggested_models)
        if offers:
            text = "A model answers any question:"
            if shown.questions:
                text = "Ask one of these:"
            self.put(NoticeBlock(OFFERS_ID, text, "info", offers))

    @property
    def _keys(self) -> Mapping[str, str]:
        return self._screen.session.context.keys

    def _is_from_guide(self, id_: str) -> bool:
        """Return True if an answer comes from the built-in guide."""
        session = self._screen.session
        node = session.conversation.nodes.get(id_)
        if node is not None and node.metrics is not None:
            return node.metrics.model == GUIDE
        return session.setup.model.word == GUIDE

    def remove(self, id_: str) -> None:
        self._screen.transcript.drop(id_)
        self._screen.status_changed()

    def status_changed(self) -> None:
        self._screen.status_changed()

    def _worded(self, block: Block) -> Block:
        """Return the block, with an answer of the guide as the screen shows it."""
        if isinstance(block, AnswerBlock) and block.text and self._is_from_guide(block.id):
            return block._replace(text=for_screen(block.text, self._keys).text)
        return block

    def _with_keys(self, block: NoticeBlock) -> NoticeBlock:
        """Return the notice with the keys of its offers, which follow the welcome's keys."""
        first = 1
        if self._screen.is_welcoming:
            first += self._screen.reserved_offers
        offers = tuple(
            offer._replace(key=self._offer_key(number))
            for number, offer in enumerate(block.offers, first)
        )
        return block._replace(first=first, offers=offers)

    def _take_keys(self, notice: NoticeBlock) -> None:
        """Give the keys to the offers of a new notice.

        Older offers can only be clicked. Those that the notice repeats are removed.
        """
        if notice.offers:
            again = {offer.action for offer in notice.offers}
            self._keep_offers(lambda offer: offer.action not in again, key=_CLICK)

    def _keep_offers(self, keep: Callable[[Offer], bool], **changes: str) -> None:
        """Drop the offers of all notices but those to `keep`, which get the `changes`."""
        for block in self._screen.transcript.blocks:
            if isinstance(block, NoticeBlock):
                kept = tuple(offer._replace(**changes) for offer in block.offers if keep(offer))
                if kept != block.offers:
                    self._screen.transcript.put(block._replace(offers=kept))


def _is_about_question(action: str) -> bool:
    return action == RETRY or action.startswith((OVERFLOW_PREFIX, END_PREFIX))
