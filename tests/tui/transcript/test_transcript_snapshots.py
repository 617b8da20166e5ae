"""Pictures of the transcript in its states, looked at before they were kept."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pytest_textual_snapshot import normalize_svg  # type: ignore[import-untyped]
from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.selection import Selection

from localchat.session.blocks import (
    AnswerBlock,
    Block,
    Branch,
    Fold,
    NoticeBlock,
    Offer,
    ReasoningBlock,
    SummaryBlock,
    ToolCallBlock,
    UserBlock,
)
from localchat.tui.transcript.widget import Transcript
from tests.support.tui_stage import check_runs

ANSWER = """A **KV cache** keeps the *keys* and *values* of every token that was computed, so that the next one
needs a step and not all of them. It grows by `2 × layers × heads × width` numbers per token.

## What it costs
- 28 layers, f16: **56 KiB** a token
- the same in `q8_0`: half of that
  1. keys first
  2. then values
- [x] shared between conversations
- [ ] kept on disk

> Nothing that was computed is computed again.

| type | bytes a token | at 32,768 |
|---|---:|---:|
| f16 | 57,344 | 1.9 GB |
| q8_0 | 30,464 | 1.0 GB |

```python
def kv_bytes(layers: int, width: int, size: float = 2.0) -> float:
    \"\"\"Bytes of one token.\"\"\"
    return 2 * layers * width * size  # keys and values
```

More on [this page](https://example.com/kv); 日本語 and 👩‍🚀 are wide.
"""
METRICS = "stopped · 214 tokens · 62.0 tok/s · TTFT 0.41 s"
PASTED = "line\n" * 212

TALK: list[Block] = [
    UserBlock("u1", "What is a KV cache, and what does it cost me?"),
    ReasoningBlock("r1", "The user asks about memory. " * 40, 3.2),
    AnswerBlock("a1", ANSWER, Branch(2, 3), METRICS),
]
CARDS: list[Block] = [
    UserBlock("u0", "An old question", dimmed=True),
    AnswerBlock("a0", "An old answer with `code` that is **not sent** any more.", dimmed=True),
    NoticeBlock("n0", "2 messages, 621 tokens not sent"),
    SummaryBlock("s1", "They talked about *caches*.", 14, 6210),
    UserBlock(
        "u1",
        f"Look at this\n{PASTED}and this too, please.",
        (Fold("report.txt · 4.1 KB · 1,204 tokens", 13, 13 + len(PASTED)),),
        Branch(1, 2),
    ),
    ToolCallBlock("t1", "get_weather", '{"city": "Berlin", "days": 3, "units": "metric"}'),
    NoticeBlock(
        "n1",
        "This conversation needs 6,210 tokens, the context has 4,096. Nothing was sent.",
        "warning",
        (
            Offer("leave out the oldest 14 messages", "a"),
            Offer("let the model sum them up (/compact)", "b"),
            Offer("a context of 8,192 tokens, 448 MB more", "c"),
        ),
    ),
    NoticeBlock(
        "n2",
        "The engine died (SIGSEGV). The conversation is whole.",
        "error",
        (Offer("try again", "r"),),
    ),
]


class Shot(App[None]):
    """A transcript in one state."""

    def __init__(self, blocks: Sequence[Block], theme: str) -> None:
        super().__init__()
        self._blocks, self._wanted = blocks, theme

    def compose(self) -> ComposeResult:
        yield Transcript()

    def on_mount(self) -> None:
        self.theme = self._wanted
        self.query_one(Transcript).show(self._blocks)


def to_top(transcript: Transcript) -> None:
    transcript.scroll_to(y=0, animate=False)


def open_all(transcript: Transcript) -> None:
    for id_ in ("s1", "t1", "r1"):
        transcript.open_fold(id_)


def select(transcript: Transcript) -> None:
    transcript.screen.selections = {transcript: Selection(None, None)}


def focus(transcript: Transcript) -> None:
    transcript.focus_block(0)


def write(transcript: Transcript) -> None:
    """An answer in the middle of its code."""
    transcript.put(AnswerBlock("a2", ""))
    transcript.append_text("a2", ANSWER[: ANSWER.index("# keys")])


STATES: dict[str, tuple[Sequence[Block], Callable[[Transcript], object], str]] = {
    "answer": (TALK, to_top, "textual-dark"),
    "end": (TALK, lambda transcript: None, "textual-dark"),
    "cards": (CARDS, lambda transcript: None, "textual-dark"),
    "opened": ([*TALK[:2], *CARDS[3:6]], open_all, "textual-dark"),
    "light": (TALK, to_top, "textual-light"),
    "ansi": (TALK, to_top, "ansi-dark"),
    "selected": (TALK, select, "textual-dark"),
    "focused": (TALK, focus, "textual-dark"),
    "writing": (TALK[:2], write, "textual-dark"),
    "empty": ([], lambda transcript: None, "textual-dark"),
}


KEPT = Path(__file__).with_name("__snapshots__") / "test_transcript_snapshots"
_PATIENCE_S = 90.0
"""A picture that is right ends the wait at once; one that stays wrong for so long is wrong."""


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
@pytest.mark.parametrize("state", STATES)
def test_it_looks_as_it_did(state: str, size: tuple[int, int], snap_compare: Any) -> None:
    blocks, then, theme = STATES[state]

    async def act(pilot: Pilot[None]) -> None:
        transcript = pilot.app.query_one(Transcript)
        then(transcript)
        looked_at = KEPT / f"test_it_looks_as_it_did[{state}-{size[0]}x{size[1]}].svg"
        wanted = normalize_svg(looked_at.read_text("utf-8")) if looked_at.exists() else ""
        end = time.monotonic() + (_PATIENCE_S if wanted else 1.0)
        while time.monotonic() < end:
            check_runs(pilot.app)
            # Heights out of view are counted, and the scroll bar shows them.
            if transcript.is_idle:
                picture = pilot.app.export_screenshot(simplify=True)
                if normalize_svg(picture) == wanted:
                    break
            await pilot.pause(0.02)

    assert snap_compare(Shot(blocks, theme), terminal_size=size, run_before=act)
