"""What an empty chat says."""

from localchat.library.locate import GUIDE
from localchat.tui.blocks import Offer
from localchat.tui.workplace import Settled, Workplace

_HOW = (
    "Enter sends, Ctrl+J begins a new line",
    "/ commands · @ files · Ctrl+R conversations",
    "Ctrl+O figures · F1 everything else",
)


def greeting(workplace: Workplace, settled: Settled) -> tuple[tuple[str, ...], tuple[Offer, ...]]:
    """The lines and the offers. Looks at the disk: call it in a thread."""
    name = settled.model.name
    if name != GUIDE:
        return ((f"{name} answers.", "", *_HOW), ())
    lines = (
        "The guide answers: a small model that came with the program.",
        "It knows localchat; for everything else choose a model:",
    )
    return ((*lines, "", *_HOW), (Offer("choose a model (F3)", "model"),))
