"""Every state of the screen, driven by keys: for the snapshots, and to be looked at."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from textual.pilot import Pilot

from localchat.engine.events import (
    Loading,
    MetricsSnapshot,
    Prefill,
    Queued,
    Reasoning,
    Text,
    ToolCall,
)
from localchat.errors import ContextExceeded, EngineDied
from localchat.models.onboarding import FirstRun
from localchat.models.recommended_models import Recommendation
from localchat.session.blocks import NoticeBlock, ToolCallBlock
from localchat.tui.screens.consent import ConsentScreen
from tests.support.scripted_engine import ScriptedAnswer
from tests.support.tui_stage import HOLD, INFO, app_of, say, told, until

Act = Callable[[Pilot[int]], Awaitable[None]]

QUESTION = "Why is decoding slower than prefill?"
ANSWER = (
    "Prefill computes **all prompt tokens at once**; decoding makes one token at a time, and reads every "
    "weight for it.\n\n",
    "| phase | bound by | tokens a step |\n|---|---|---|\n| prefill | arithmetic | up to 512 |\n"
    "| decode | memory bandwidth | 1 |\n\n",
    "So the rate is about *bandwidth over bytes of the weights*:\n\n",
    "```python\ndef decode_rate(bandwidth_gb_s: float, weights_gb: float) -> float:\n"
    '    """Tokens a second, at best."""\n    return bandwidth_gb_s / weights_gb\n```\n\n',
    "1. A smaller quantization reads fewer bytes.\n2. Speculation checks several tokens in one read.\n",
)


@dataclass(frozen=True)
class Scene:
    """How a state is reached. `stage`: what differs in the stage."""

    act: Act
    stage: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ((80, 24), (120, 40))


def held(*events: Any) -> Callable[[object], ScriptedAnswer]:
    """An answer that stays where it is: after these events nothing comes any more."""
    return lambda request: ScriptedAnswer(events=(*events, HOLD))


async def nothing(pilot: Pilot[int]) -> None:
    await pilot.pause(0.05)


async def talk(pilot: Pilot[int]) -> None:
    await say(pilot, QUESTION)


def keys(
    *pressed: str, before: Act = nothing, ready: Callable[[Pilot[int]], object] | None = None
) -> Act:
    """Press keys; then wait until it is ready."""

    async def act(pilot: Pilot[int]) -> None:
        await before(pilot)
        await pilot.press(*pressed)
        await pilot.pause()
        if ready is not None:
            await until(pilot, lambda: ready(pilot))

    return act


def written(text: str, *pressed: str, before: Act = nothing) -> Act:
    """Put a text into the composer, then press keys."""

    async def act(pilot: Pilot[int]) -> None:
        await before(pilot)
        app_of(pilot).chat.composer.write(text)
        await pilot.press(*pressed)
        await pilot.pause(0.05)

    return act


def under_way(state: str) -> Act:
    """Ask, and stay in a state of the engine."""

    async def act(pilot: Pilot[int]) -> None:
        app_of(pilot).chat.composer.write(QUESTION)
        await pilot.press("enter")
        await until(pilot, lambda: app_of(pilot).session.status.state == state)
        await pilot.pause(0.1)

    return act


WRITING = (
    Prefill(6200, 6144, 6200),
    *(Text(0, piece) for piece in ANSWER[:3]),
    *(
        MetricsSnapshot(
            "decode",
            ttft_s=0.41,
            decode_tokens_per_s=48.0 + (n * 37 % 11) * 1.7,
            completion_tokens=n,
            kv_used_tokens=6200 + n,
            kv_total_tokens=32768,
            drafted=51,
            accepted=34,
        )
        for n in range(12)
    ),
)
THOUGHT = ScriptedAnswer(
    events=(
        Reasoning(0, "The person asks for the weather.\nA tool knows it; call it with the city."),
        Text(0, "I look it up."),
        ToolCall(0, 0, "c1", "weather", '{"city": "Oslo", "days": 3}'),
        *told("").events[-2:],
    )
)


def too_long(request: Any) -> ScriptedAnswer:
    if len(request.prompt.messages) > 4:
        problem = ContextExceeded("too long", prompt_tokens=30_100, context_tokens=24_000)
        return ScriptedAnswer((), error=problem)
    return told("That is a long text about rivers. What of it matters to you?")


async def outgrow(pilot: Pilot[int]) -> None:
    app = app_of(pilot)
    for number in range(3):
        await say(pilot, f"Part {number + 1} of the report. " + "rivers " * 5_700)
        app.session.status.pulling = ""
    # The session is not busy while it counts what would help.
    await until(pilot, lambda: isinstance(app.chat.transcript.blocks[-1], NoticeBlock))


async def leave_out(pilot: Pilot[int]) -> None:
    await outgrow(pilot)
    await pilot.press("alt+1")
    await until(pilot, lambda: not app_of(pilot).session.busy)
    await pilot.pause(0.1)


async def branches(pilot: Pilot[int]) -> None:
    await say(pilot, QUESTION)
    await pilot.press("f5")
    await until(pilot, lambda: len(app_of(pilot).session.conversation.nodes) == 3)
    await until(pilot, lambda: not app_of(pilot).session.busy)


async def attach(pilot: Pilot[int]) -> None:
    app = app_of(pilot)
    await until(pilot, lambda: app.chat.composer.count_tokens is not None)
    app.chat.composer.write("Sum this up: ")
    app.chat.composer.editor.insert_paste("A line of a log file.\n" * 312)
    await until(pilot, lambda: "tokens" in str(app.chat.query_one("#attached").render()))


async def past(pilot: Pilot[int]) -> None:
    """Some conversations in the history, and the list of them."""
    for words in ("Plan a week in Norway", "Why is the sky blue?", "Explain paged attention"):
        await say(pilot, words)
        app_of(pilot).chat.run_command("/new")
        await pilot.pause()
        await until(pilot, lambda: not app_of(pilot).session.conversation.nodes)
    await pilot.press("ctrl+r")
    await until(pilot, lambda: pilot.app.screen is not app_of(pilot).chat)


async def panel(pilot: Pilot[int]) -> None:
    await talk(pilot)
    await pilot.press("ctrl+o")
    await until(pilot, lambda: app_of(pilot).session.status.stats is not None)
    await pilot.pause(0.05)


async def models(pilot: Pilot[int]) -> None:
    await pilot.press("f3")
    screen: Any = pilot.app.screen
    await until(pilot, lambda: screen.verdicts_complete)


async def shown_again(pilot: Pilot[int]) -> None:
    """As after a restart: how long the model thought is not known any more."""
    await talk(pilot)
    app_of(pilot).session.show()
    await pilot.pause()


async def settings(pilot: Pilot[int]) -> None:
    await pilot.press("f2", "down")
    screen: Any = pilot.app.screen
    screen.show_about(
        screen.about("system").partition("\n")[0] + "\n~/.config/localchat/settings.toml"
    )


def theme(name: str) -> dict[str, Any]:
    return {"changes": {"theme": name}, "script": told_in_turn(*ANSWER)}


def told_in_turn(*pieces: str) -> Callable[[object], ScriptedAnswer]:
    return lambda request: told(*pieces)


def suggestion(role: Any, name: str, count: int, pace: float) -> Recommendation:
    """One model to begin with."""
    return Recommendation(role, name, name, "Q4_K_M", count, pace)


NOTES = "".join(f"{number} item of the list\n" for number in range(1, 31))
EDIT = {
    "path": "notes.md",
    "old_text": "3 item of the list\n4 item",
    "new_text": "3 item of the list, with words that do not fit into a narrow window\n4 things",
}
COMMAND = {"command": "python3 -m pytest -q tests/tools --maxfail=1 | tail -n 20"}
LOOK = {"path": "missing.md"}


def calling(name: str, arguments: dict[str, str], **changes: Any) -> dict[str, Any]:
    """Return a stage whose model calls a tool once, and answers then."""

    def script(request: Any) -> ScriptedAnswer:
        if request.prompt.messages[-1].role == "tool":
            return told("The file has the new words now.")
        text = msgspec.json.encode(arguments).decode()
        call = ToolCall(0, 0, "c1", name, text)
        return ScriptedAnswer(events=(Text(0, "I change it."), call, *told("").events[-2:]))

    return {"script": script, "changes": {"tools": "edit,run", **changes}}


async def consent(pilot: Pilot[int]) -> None:
    """Ask, until a call waits for consent."""
    Path("notes.md").write_text(NOTES)
    app_of(pilot).chat.composer.write("Change the list in notes.md")
    await pilot.press("enter")
    await until(pilot, lambda: isinstance(pilot.app.screen, ConsentScreen))


async def allowed(pilot: Pilot[int]) -> None:
    """Allow the call, and wait for the answer."""
    await consent(pilot)
    await pilot.press("y")
    await until(pilot, lambda: len(app_of(pilot).session.conversation.path()) == 4)
    await until(pilot, lambda: not app_of(pilot).session.busy)


async def refused(pilot: Pilot[int]) -> None:
    await consent(pilot)
    await pilot.press("n")
    await until(pilot, lambda: len(app_of(pilot).session.conversation.path()) == 4)
    await until(pilot, lambda: not app_of(pilot).session.busy)


async def running(pilot: Pilot[int]) -> None:
    """Allow a command that does not end."""
    await consent(pilot)
    await pilot.press("y")

    def runs() -> bool:
        blocks = app_of(pilot).chat.transcript.blocks
        return any(
            isinstance(block, ToolCallBlock)
            and block.run is not None
            and block.run.state == "running"
            for block in blocks
        )

    await until(pilot, runs)


async def call_opened(pilot: Pilot[int]) -> None:
    await allowed(pilot)
    transcript = app_of(pilot).chat.transcript
    transcript.open_fold(
        next(block.id for block in transcript.blocks if isinstance(block, ToolCallBlock))
    )


async def undone(pilot: Pilot[int]) -> None:
    await allowed(pilot)
    app_of(pilot).chat.run_command("/undo")
    await until(pilot, lambda: not app_of(pilot).session.conversation.path())
    await until(pilot, lambda: Path("notes.md").read_text() == NOTES)


FIRST = FirstRun(
    hardware="AMD EPYC 7B13, 2 cores · 8.1 GB of RAM, 6.0 GB free",
    external=(),
    recommendations=(
        suggestion("fast", "qwen2.5:0.5b", 398_000_000, 41.0),
        suggestion("balanced", "qwen2.5:1.5b", 1_117_000_000, 15.2),
        suggestion("best", "qwen2.5:3b", 1_930_000_000, 7.9),
    ),
)
DIES = EngineDied(
    "the engine died: SIGKILL, while it answered",
    hint="the last words of its log: none; the next question starts it again",
)
SMALL = ((40, 12),)
NARROW = ((60, 24), (80, 24))
LOW = ((60, 14), *NARROW)
DIALOG = ((80, 24), (120, 40), (40, 24))
RICH = {"script": told_in_turn(*ANSWER)}

SCENES: dict[str, Scene] = {
    "welcome": Scene(nothing),
    "welcome-small": Scene(nothing, sizes=SMALL),
    "guide": Scene(nothing, {"models": ("guide", "other")}),
    "first-run": Scene(
        nothing, {"models": ("guide",), "first_run": FIRST}, ((80, 24), (120, 40), (40, 12))
    ),
    "answer": Scene(talk, RICH),
    "answer-wide": Scene(talk, RICH, ((200, 40),)),
    "panel-wide": Scene(panel, RICH, ((200, 40),)),
    "answer-small": Scene(talk, RICH, SMALL),
    "answer-light": Scene(talk, theme("light"), ((80, 24),)),
    "answer-high-contrast": Scene(talk, theme("high-contrast"), ((80, 24),)),
    "answer-ansi": Scene(talk, theme("ansi"), ((80, 24),)),
    "tools": Scene(shown_again, {"script": lambda request: THOUGHT}),
    "consent-edit": Scene(consent, calling("edit_file", EDIT), LOW),
    "consent-command": Scene(consent, calling("run_command", COMMAND), NARROW),
    "call-running": Scene(running, calling("run_command", {"command": "sleep 600"}), NARROW),
    "call-done": Scene(allowed, calling("edit_file", EDIT), NARROW),
    "call-opened": Scene(call_opened, calling("edit_file", EDIT), NARROW),
    "call-failed": Scene(allowed, calling("read_file", LOOK), NARROW),
    "call-refused": Scene(refused, calling("edit_file", EDIT), NARROW),
    "call-undone": Scene(undone, calling("edit_file", EDIT), NARROW),
    "reasoning-open": Scene(
        keys("tab", "up", "up", "enter", before=shown_again),
        {"script": lambda request: THOUGHT},
    ),
    "writing": Scene(under_way("writing"), {"script": held(*WRITING)}),
    "writing-small": Scene(under_way("writing"), {"script": held(*WRITING)}, SMALL),
    "prefill": Scene(under_way("prefill"), {"script": held(Prefill(6144, 6144, 6200))}),
    "loading": Scene(under_way("loading"), {"script": held(Loading(2_100_000_000, 4_700_000_000))}),
    "queued": Scene(under_way("queued"), {"script": held(Queued(2))}),
    "branches": Scene(branches, RICH),
    "editing": Scene(keys("f6", before=talk), RICH),
    "panel": Scene(panel, RICH, ((80, 24), (120, 40), (40, 12))),
    "commands": Scene(keys("slash")),
    "commands-narrow": Scene(keys("slash"), sizes=((40, 24),)),
    "command-help": Scene(keys(*"/set ")),
    "attached": Scene(attach),
    "models": Scene(models, {"models": ("tiny", "other", "guide")}, sizes=DIALOG),
    "parameters": Scene(keys("f4"), sizes=DIALOG),
    "settings": Scene(settings, sizes=DIALOG),
    "history": Scene(past, sizes=DIALOG),
    "history-search": Scene(keys(*"norway", before=past), sizes=((80, 24),)),
    "help": Scene(keys("f1"), sizes=DIALOG),
    "outgrown": Scene(
        outgrow, {"script": too_long, "about": msgspec.structs.replace(INFO, context_tokens=24_000)}
    ),
    "left-out": Scene(
        leave_out,
        {"script": too_long, "about": msgspec.structs.replace(INFO, context_tokens=24_000)},
    ),
    "engine-died": Scene(
        talk,
        {"script": lambda request: ScriptedAnswer(("Prefill computes all prompt",), error=DIES)},
    ),
}
