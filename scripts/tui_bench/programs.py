"""The programs that are measured, each run as a process of its own in a pseudo-terminal.

    python -m scripts.tui_bench.programs bare
    python -m scripts.tui_bench.programs widget MESSAGES TOKENS_PER_MESSAGE RATE

`bare` is a Textual app with one Static. `widget` is a transcript over an input line; once a key came, an
answer of RATE tokens a second is written into it until the process is ended.
"""

import os
import sys

os.environ.setdefault("TEXTUAL_FPS", "120")

MARK = "ready-to-type"


def bare() -> None:
    """The smallest app there is."""
    from textual.app import App, ComposeResult
    from textual.widgets import Static

    class Bare(App[None]):
        def compose(self) -> ComposeResult:
            yield Static(MARK)

    Bare().run()


def widget(messages: int, tokens: int, rate: float) -> None:
    """A transcript of so many messages and an input line."""
    import asyncio
    import time

    from textual.app import App, ComposeResult
    from textual.widgets import Input

    from localchat.tui.blocks import AnswerBlock, Block, NoticeBlock, UserBlock
    from localchat.tui.transcript import Transcript
    from scripts.tui_bench.prose import markdown, pieces

    class Widget(App[None]):
        CSS = "Input { border: none; height: 1; }"

        def compose(self) -> ComposeResult:
            yield Transcript()
            yield Input()

        def on_mount(self) -> None:
            self.query_one(Input).focus()
            blocks: list[Block] = []
            for number in range(messages):
                blocks.append(UserBlock(f"u{number}", f"question {number}"))
                blocks.append(AnswerBlock(f"a{number}", markdown(tokens, number)))
            self.query_one(Transcript).show([*blocks, NoticeBlock("n", MARK)])

        def on_input_changed(self) -> None:
            if rate and not hasattr(self, "writing"):
                self.writing = asyncio.create_task(self.write())

        async def write(self) -> None:
            transcript = self.query_one(Transcript)
            transcript.put(AnswerBlock("new", ""))
            begun = time.monotonic()
            for told, piece in enumerate(pieces(markdown(100_000, 77))):
                while told >= (time.monotonic() - begun) * rate:
                    await asyncio.sleep(0.002)
                transcript.append_text("new", piece)

    Widget().run()


if __name__ == "__main__":
    if sys.argv[1] == "bare":
        bare()
    else:
        widget(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
