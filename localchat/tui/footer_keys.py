"""Keys of the footer: which ones are of use in a state of the chat screen."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from localchat.sanitize import sanitize_line
from localchat.session.blocks import Offer
from localchat.tui.keymap import key_names
from localchat.tui.widgets.key_footer import FooterKey

_MAX_LABEL = 28


class FooterState(NamedTuple):
    """State of the chat screen, as far as it decides which keys are of use."""

    focus: str = "editor"
    """Id of the widget that has the focus; may be empty."""
    is_busy: bool = False
    is_covered: bool = False
    """The panel replaces the conversation."""
    has_queue: bool = False
    can_continue: bool = False
    offers: tuple[Offer, ...] = ()
    """Open offers of the last notice."""

    @property
    def is_urgent(self) -> bool:
        """Whether the first keys belong to what just happened."""
        return self.is_busy or self.can_continue or bool(self.offers)


def footer_keys(state: FooterState, table: Mapping[str, str]) -> tuple[FooterKey, ...]:
    """Return the keys that a wide window shows, most useful first. `table`: the keymap of the settings."""

    def key(id_: str, label: str, rank: int = 0) -> FooterKey:
        shown = key_names(id_, table).partition(", ")[0]
        return FooterKey(shown.replace("Ctrl+", "^"), label, rank)

    metrics = key("view.panel", "metrics", 2)
    help_ = key("screen.help", "help", 1)
    if state.focus == "transcript":
        return (
            FooterKey("↑↓", "message"),
            key("transcript.open", "open", 3),
            key("transcript.copy", "copy"),
            key("transcript.copy_code", "code", 1),
            key("transcript.edit", "edit", 2),
            key("transcript.regenerate", "answer again", 2),
            key("transcript.leave", "back"),
            help_,
        )
    if state.focus == "panel":
        close = key("view.panel", "close")
        if state.is_covered:
            close = key("chat.stop", "close")
        return (FooterKey("↑↓", "scroll"), FooterKey("Tab", "back"), close, help_)
    offers = list(_offer_keys(tuple(offer for offer in state.offers if offer.key)))
    if state.is_busy:
        stop = key("chat.stop", "stop")
        send = key("composer.send", "send next", 1)
        if state.has_queue:
            offers.insert(0, key("composer.up", "take back", 3))
        return (stop, send, *offers, metrics, help_)
    if state.can_continue:
        offers.append(key("chat.continue", "continue"))
    usual = (
        key("composer.send", "send", 4),
        key("composer.newline", "new line", 7),
        FooterKey("/", "commands", 3),
        FooterKey("@", "files", 5),
        key("screen.history", "history", 6),
        key("screen.models", "models", 6),
    )
    if state.is_covered:
        offers.append(key("chat.stop", "close"))
    return (*offers, *usual, metrics, help_)


def _offer_keys(offers: tuple[Offer, ...]) -> Iterator[FooterKey]:
    """Yield up to two offers by name, or more as a range of keys."""
    if len(offers) > 2:
        yield FooterKey(f"{offers[0].key}…{offers[-1].key[-1]}", "choose")
        return
    for number, offer in enumerate(offers):
        yield FooterKey(offer.key, _shortened(sanitize_line(offer.label)), number)


def _shortened(label: str) -> str:
    if len(label) <= _MAX_LABEL:
        return label
    return f"{label[: _MAX_LABEL - 1].rstrip()}…"
