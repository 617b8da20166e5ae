#!/usr/bin/env python3
"""Makes the pictures of the README: drives the real program with the built-in guide, saves SVG.

    python scripts/tools/pictures.py [FOLDER]        default: docs/pictures

The metrics in them are those of the machine that ran this.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from textual.pilot import Pilot

SIZE = (100, 30)
_PATIENCE_S = 180.0


async def until(pilot: Pilot[int], true: Callable[[], object]) -> None:
    """Wait until something is true."""
    for _ in range(int(_PATIENCE_S / 0.02)):
        if true():
            await pilot.pause()
            return
        await asyncio.sleep(0.02)
    raise SystemExit("the program did not come to where a picture is made")


async def pictures(folder: Path) -> None:
    """Start, the first run, an answer, the panel, the models."""
    from localchat.chat.conversation import Conversation
    from localchat.cli.chat.run import prompt_command
    from localchat.cli.chat.session_context import session_context
    from localchat.cli.context import AppContext
    from localchat.cli.main import root
    from localchat.cli.resolve import resolve_setup
    from localchat.session.engine_holder import EngineHolder
    from localchat.tui.app import ChatApp

    parent = root.make_context("localchat", [], obj=AppContext())
    with parent, prompt_command.make_context("ask", [], parent=parent) as ctx:
        context, setup = session_context(resolve_setup(ctx))
    engines = EngineHolder()
    app = ChatApp(context, setup, engines, Conversation(model=setup.model.word))

    # A busy machine would put its notices into the pictures.
    app.session.remark = lambda *_, **__: None  # type: ignore[method-assign]

    def save(name: str) -> None:
        (folder / f"{name}.svg").write_text(app.export_screenshot(title="localchat"))

    try:
        async with app.run_test(size=SIZE, notifications=True, tooltips=True) as pilot:
            app.chat.composer.editor.cursor_blink = False
            await until(pilot, lambda: app.session.status.info is not None)
            await until(pilot, lambda: len(app.chat.query_one("#welcome").offers) > 3)  # type: ignore[attr-defined]
            save("first-run")
            app.chat.composer.write("What is a KV cache, and why is decoding slower than prefill?")
            await pilot.press("enter")
            await until(pilot, lambda: app.session.last_answer() and not app.session.busy)
            save("chat")
            await pilot.press("ctrl+o")
            await until(pilot, lambda: app.session.status.stats is not None)
            await pilot.pause(0.2)
            save("panel")
            await pilot.press("ctrl+o", "f3")
            screen = app.screen
            await until(pilot, lambda: getattr(screen, "verdicts_complete", False))
            save("models")
    finally:
        app.recorder.close()
        engines.close()


if __name__ == "__main__":
    target = Path(
        sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2] / "docs" / "pictures"
    )
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        os.environ["LOCALCHAT_DATA_DIR"] = home
        os.environ["LOCALCHAT_CONFIG"] = str(Path(home) / "settings.toml")
        asyncio.run(pictures(target))
