"""The app on scripted engines: what its tests and its pictures share."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from textual.app import App
from textual.pilot import Pilot

from localchat.chat.conversation import Conversation
from localchat.config.paths import Paths, find_paths
from localchat.config.settings import SAMPLING_KEYS, Given, Settings, resolve
from localchat.config.settings_file import read_settings
from localchat.engine.events import (
    Accepted,
    Done,
    EngineStats,
    Event,
    Finished,
    MetricsSnapshot,
    Prefill,
    RunningRequest,
    Speculation,
    Text,
    Timings,
    Usage,
)
from localchat.engine.interface import EngineInfo, MemoryParts
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Messages, Prompt, Sampling
from localchat.engine.stream import Stream
from localchat.errors import LocalchatError, ModelMissing
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.steps import MemoryStep
from localchat.models.onboarding import FirstRun
from localchat.models.resolve import ResolvedModel
from localchat.session.context import CatalogEstimate, ModelSetup, SessionContext
from localchat.session.engine_holder import EngineHolder
from localchat.tui.app import ChatApp
from localchat.tui.widgets.key_footer import KeyFooter
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine

GB = 1_000_000_000
DONE = Done(
    usage=Usage(prompt_tokens=6200, cached_tokens=6144, completion_tokens=212),
    timings=Timings(
        load_s=1.2,
        queue_s=0.0,
        ttft_s=0.41,
        prefill_tokens_per_s=312.5,
        decode_tokens_per_s=62.04,
        tpot_ms_p50=16.0,
        tpot_ms_p95=20.2,
        tpot_ms_p99=24.9,
        total_s=3.9,
    ),
    kv_used_tokens=6412,
    kv_total_tokens=32768,
    speculation=Speculation(drafted=51, accepted=34, speedup=1.31),
    fingerprint="f1",
)
INFO = EngineInfo(
    model="qwen2.5:7b-q4_k_m",
    path="/models/qwen.gguf",
    backend="llamacpp",
    architecture="qwen2",
    quantization="Q4_K_M",
    parameters=7_600_000_000,
    context_tokens=32768,
    context_train=131072,
    kv_type="f16",
    gpu_layers=0,
    layers=29,
    threads=8,
    file_bytes=4_683_000_000,
    predicted_bytes=int(6.9 * GB),
    actual_bytes=int(6.7 * GB),
    loaded=True,
    safe_mode=False,
    why="GGUF runs on llama.cpp",
    fingerprint="f1",
    predicted=MemoryParts(int(4.6 * GB), int(1.88 * GB), int(0.31 * GB), int(0.11 * GB)),
    actual=MemoryParts(int(4.6 * GB), int(1.88 * GB), int(0.12 * GB), int(0.10 * GB)),
    free_bytes=int(11.2 * GB),
)
STATS = EngineStats(
    now=MetricsSnapshot(
        phase="decode",
        kv_used_tokens=6412,
        kv_shared_tokens=2048,
        kv_cached_tokens=9216,
        kv_swapped_tokens=1536,
        kv_total_tokens=32768,
        running=2,
        waiting=0,
    ),
    steps=412,
    drafted=51,
    accepted=34,
    draft_steps=19,
    tpot_ms=tuple(13.0 + (n * 7919 % 97) ** 2 / 700 for n in range(300)),
    requests=(
        RunningRequest("decode", 6200, 6144, 212, 3.4),
        RunningRequest("prefill", 900, 0, 0, 0.6, "serve"),
    ),
)


HOLD = Text(1, "hold")
"""As the last event of an answer: what came before stays as it is, nothing comes any more."""


@dataclass(slots=True)
class StagedEngine(ScriptedEngine):
    """A scripted engine that knows what it is, and counts tokens by four characters."""

    about: EngineInfo = INFO
    figures: EngineStats = STATS

    def generate(self, request: GenerateRequest) -> Stream:
        answer = self.script(request)
        if answer.events[-1:] != (HOLD,):
            script, self.script = self.script, lambda request: answer  # asked once, not twice
            try:
                return ScriptedEngine.generate(self, request)
            finally:
                self.script = script
        self.requests.append(request)
        stream = Stream(lambda: None)
        for event in (Accepted(6200, 100, 7), *answer.events[:-1]):
            stream.put(event)
        return stream

    def info(self) -> EngineInfo:
        return self.about

    def stats(self) -> EngineStats:
        return self.figures

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        return list(range(max(1, len(text) // 4)))


def told(*pieces: str, done: Done = DONE, cached: int = 6144, total: int = 6200) -> ScriptedAnswer:
    """An answer with figures that do not depend on the clock."""
    events: list[Event] = [
        Prefill(cached, cached, total),
        Prefill(total, cached, total),
        MetricsSnapshot("decode", ttft_s=0.41, kv_used_tokens=total, kv_total_tokens=32768),
    ]
    for n, piece in enumerate(pieces, 1):
        events.append(Text(0, piece))
        events.append(
            MetricsSnapshot(
                "decode",
                ttft_s=0.41,
                decode_tokens_per_s=55.0 + n % 9,
                completion_tokens=n,
                kv_used_tokens=total + n,
                kv_total_tokens=32768,
                drafted=3 * n,
                accepted=2 * n,
            )
        )
    return ScriptedAnswer(events=(*events, Finished(0, "stop"), done))


Script = Callable[[GenerateRequest], ScriptedAnswer]


@dataclass(slots=True)
class Stage:
    """One app with everything around it. `engines`: every engine that was opened, with its options."""

    tmp: Path
    script: Script = lambda request: ScriptedAnswer(("Hello ", "there."))
    about: EngineInfo = INFO
    changes: dict[str, object] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    models: tuple[str, ...] = ("tiny", "other")
    environ: dict[str, str] = field(default_factory=dict)
    conversation: Conversation = field(default_factory=Conversation)
    refuse: LocalchatError | None = None
    first_run: FirstRun | None = None
    opened: list[tuple[EngineOptions, StagedEngine]] = field(default_factory=list)
    remembered: list[tuple[str, EngineInfo | None, Done | None]] = field(default_factory=list)
    context_free_bytes: int = 11 * GB
    memory_steps: tuple[MemoryStep, ...] = ()
    """What would make room for a load that does not fit."""

    @property
    def paths(self) -> Paths:
        return find_paths({**self.environ, "LOCALCHAT_DATA_DIR": str(self.tmp)})

    @property
    def engine(self) -> StagedEngine:
        return self.opened[-1][1]

    def open_engine(self, options: EngineOptions, say: Callable[[str], None]) -> StagedEngine:
        if self.refuse is not None:
            raise self.refuse
        engine = StagedEngine(script=self.script, about=self.about)
        self.opened.append((options, engine))
        return engine

    def resolve(self, word: str | None, changes: Mapping[str, str]) -> ModelSetup:
        word = word or self.models[0]
        if word not in self.models:
            raise ModelMissing(f"no model {word!r}", hint="localchat pull fetches one")
        base = {key: Given(value, "test") for key, value in self.changes.items()}
        given = {key: Given(text, "/set") for key, text in changes.items()}
        file = read_settings(self.paths.settings_file).layer()
        settings = resolve(file, base, given).settings
        path = self.tmp / f"{word}.gguf"
        options = EngineOptions(
            load=LoadOptions(
                context_tokens=settings.context_length, kv_type=settings.kv_cache_type, max_slots=2
            ),
            model=path,
            name=word,
        )
        return ModelSetup(
            ResolvedModel(word, word, path, "test"),
            settings,
            options,
            lambda say: self.open_engine(options, say),
        )

    def plan(self, settled: ModelSetup, requested: LoadOptions) -> MemoryPlan:
        context = requested.context_tokens or 32768
        kv_bytes = context * (57344 if requested.kv_type in (None, "f16") else 30464)
        total = int(4.6 * GB) + kv_bytes + 230_000_000
        return MemoryPlan(
            backend="llamacpp",
            weights_bytes=int(4.6 * GB),
            kv_bytes=kv_bytes,
            compute_bytes=120_000_000,
            overhead_bytes=110_000_000,
            free_bytes=self.context_free_bytes,
            fits=total <= self.context_free_bytes,
            context_tokens=context,
            max_context_tokens=65536,
            kv_type=requested.kv_type or "f16",
            flash_attention=False,
            gpu_layers=0,
            cache_ram_bytes=0,
            max_step_tokens=128,
            layers=29,
        )

    def estimate(self, name: str) -> CatalogEstimate | None:
        """Of the catalogue the Qwens alone have a shape that is known, all the same."""
        if not name.startswith("qwen"):
            return None
        plan = self.plan(self.resolve(None, {}), LoadOptions())
        return CatalogEstimate(plan, plan.weights_bytes)

    def _remember(self, model: ResolvedModel, info: EngineInfo | None, done: Done | None) -> None:
        self.remembered.append((model.word, info, done))

    def app(self) -> ChatApp:
        context = SessionContext(
            paths=self.paths,
            environ={"LOCALCHAT_DATA_DIR": str(self.tmp), **self.environ},
            resolve=self.resolve,
            request=request,
            plan=self.plan,
            estimate=self.estimate,
            remember=self._remember,
            first_run=lambda: self.first_run,
            keys=self.keys,
            notices=self.notices,
            history_file=self.tmp / "history.sqlite3",
            memory_steps=lambda setup: self.memory_steps,
        )
        settled = self.resolve(None, {})
        return ChatApp(context, settled, EngineHolder(), self.conversation)

    @asynccontextmanager
    async def play(self, width: int = 80, height: int = 24) -> AsyncIterator[Pilot[int]]:
        app = self.app()
        async with (
            app.run_test(size=(width, height), notifications=True, tooltips=True) as pilot,
            unhurried(pilot),
        ):
            app.chat.composer.editor.cursor_blink = False
            await until(pilot, lambda: app.recorder.history is not None)
            await until(
                pilot, lambda: app.session.status.info is not None or self.refuse is not None
            )
            yield pilot
        app.recorder.close()


Play = Callable[[Pilot[int]], Awaitable[None]]


def play(stage: Stage, what: Play, width: int = 80, height: int = 24) -> None:
    """Open a stage, do something on it, and close it."""

    async def all_of_it() -> None:
        async with stage.play(width, height) as pilot:
            await what(pilot)

    asyncio.run(all_of_it())


@asynccontextmanager
async def unhurried(pilot: Pilot[int]) -> AsyncIterator[None]:
    """Inside, a key or a pause is over when every widget has done what it was told. Textual itself waits until
    the process takes less than a millisecond of CPU in twenty: on a machine that does something else, long."""
    ask_all = pilot._wait_for_screen

    async def wait_for_screen(timeout: float = 30.0) -> bool:
        """Wait for every widget if one is busy. Textual asks all of them, four times in five for nothing."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
            if not _is_idle(pilot.app):
                return await ask_all(timeout)
        return True

    async def idle(min_sleep: float = 0, max_sleep: float = 1) -> None:
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)
            await pilot._wait_for_screen()

    with (
        patch("textual.app.wait_for_idle", idle),
        patch("textual.pilot.wait_for_idle", idle),
        patch.object(pilot, "_wait_for_screen", wait_for_screen),
    ):
        yield


_ROUNDS = 3
"""What a message leads to is often another one."""
_TURNS = 5
"""Turns of the event loop in which an idle screen stays idle, for what runs beside its widgets."""


def _is_idle(app: App[Any]) -> bool:
    """Return True if the app and each widget of its screen wait for a message."""
    for pump in (app, *app.screen.walk_children(with_self=True)):
        queue: Any = pump._message_queue
        if not queue.empty() or not queue.ready_event._waiters:
            return False
    return True


def request(settings: Settings, prompt: Prompt) -> GenerateRequest:
    return GenerateRequest(
        prompt=prompt,
        sampling=Sampling(**{key: getattr(settings, key) for key in SAMPLING_KEYS}),
        max_tokens=settings.max_tokens,
    )


def check_runs(app: App[Any]) -> None:
    """Raise what an app died of. Textual raises it only at the end of a test, which would wait in vain."""
    if app._exception is not None:
        raise app._exception


async def until(pilot: Pilot[int], true: Callable[[], object], seconds: float = 90.0) -> None:
    """Wait until something is true."""
    for _ in range(int(seconds / 0.01)):
        check_runs(pilot.app)
        if true():
            await pilot.pause()
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"it did not become true within {seconds:.0f} s")


def app_of(pilot: Pilot[int]) -> ChatApp:
    app = pilot.app
    assert isinstance(app, ChatApp)
    return app


def footer(app: ChatApp) -> str:
    """The row of keys, as it is shown."""
    return app.chat.query_one(KeyFooter).render_line(0).text


def visible(app: ChatApp) -> str:
    """The text of the conversation's rows on the screen."""
    transcript = app.chat.transcript
    return "\n".join(transcript.render_line(y).text for y in range(transcript.size.height))


async def say(pilot: Pilot[int], text: str) -> None:
    """Write a message, send it, and wait until it is answered."""
    app = app_of(pilot)
    app.chat.composer.write(text)
    await pilot.pause()
    await pilot.press("enter")
    await pilot.pause()
    await until(pilot, lambda: not app.session.busy and not app.chat._queue.is_sending)


def sent(request: GenerateRequest) -> list[tuple[str, str]]:
    """The messages of a request, as (role, content)."""
    assert isinstance(request.prompt, Messages)
    return [(each.role, each.content) for each in request.prompt.messages]
