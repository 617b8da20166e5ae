"""Words for what an engine does before it speaks."""

from localchat.engine.events import Event, Loading, Prefill, Queued
from localchat.metrics import sizes


def progress_line(event: Event) -> str:
    """One quiet line for a phase before the first text; empty for every other event."""
    match event:
        case Queued(ahead=ahead):
            return f"queued, {ahead} ahead"
        case Loading(done_bytes=done, total_bytes=total):
            return f"loading {sizes(done, total)}"
        case Prefill(done=done, cached=cached, total=total):
            came = f" of which {cached:,} cached" if cached else ""
            return f"prefill {done:,}/{total:,}{came}"
        case _:
            return ""
