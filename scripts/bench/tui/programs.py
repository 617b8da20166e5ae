"""The measured programs, each run as a separate process in a pseudo-terminal.

    python -m scripts.bench.tui.programs bare
    python -m scripts.bench.tui.programs widget MESSAGES TOKENS_PER_MESSAGE RATE
    python -m scripts.bench.tui.programs app MESSAGES TOKENS_PER_MESSAGE RATE

`bare` is a Textual app with one Static. `widget` is a transcript over an input line; after the first
key an answer of RATE tokens a second is written into it until the process is killed. `app` is the whole
program on a scripted engine, which answers at that rate.
"""

import os
import sys

os.environ.setdefault("TEXTUAL_FPS", "120")

MARK = "ready-to-type"


def bare() -> None:
    """The smallest possible app."""
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

    from localchat.session.blocks import AnswerBlock, Block, NoticeBlock, UserBlock
    from localchat.tui.transcript.widget import Transcript
    from scripts.bench.tui.prose import markdown, pieces

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
            for written, piece in enumerate(pieces(markdown(100_000, 77))):
                while written >= (time.monotonic() - begun) * rate:
                    await asyncio.sleep(0.002)
                transcript.append_text("new", piece)

    Widget().run()


def app(messages: int, tokens: int, rate: float) -> None:
    """The whole program, with a conversation of so many messages."""
    import tempfile
    from pathlib import Path

    import msgspec.structs

    from localchat.chat.conversation import Conversation
    from localchat.engine.request import Message
    from scripts.bench.tui.prose import markdown, pieces
    from tests.support.scripted_engine import ScriptedAnswer
    from tests.support.tui_stage import INFO, Stage

    conversation = Conversation()
    for number in range(messages):
        asked = conversation.add(Message("user", f"question {number}"), parent=conversation.head)
        mark = f"\n\n{MARK}" if number == messages - 1 else ""
        answer = Message("assistant", markdown(tokens, number) + mark)
        conversation.add(answer, parent=asked.id)
    scripted = ScriptedAnswer(tuple(pieces(markdown(100_000, 77))), gap_s=1 / rate if rate else 0.0)
    about = msgspec.structs.replace(INFO, context_tokens=1_000_000)
    with tempfile.TemporaryDirectory() as folder:
        Stage(
            Path(folder), lambda request: scripted, about=about, conversation=conversation
        ).app().run()


if __name__ == "__main__":
    if sys.argv[1] == "bare":
        bare()
    else:
        program = {"widget": widget, "app": app}[sys.argv[1]]
        program(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
