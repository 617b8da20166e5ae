"""The command on scripted answers: in this process for click's runner, and as a program of its own
(`python -m tests.support.cli_program SCENARIO …`) where signals, pipes and terminals are what is tested."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from localchat.cli import main
from localchat.cli.context import AppContext
from localchat.engine.events import (
    Accepted,
    Done,
    Event,
    Finished,
    Loading,
    MetricsSnapshot,
    Prefill,
    Reasoning,
    Speculation,
    Text,
    Timings,
    ToolCall,
    Usage,
)
from localchat.engine.interface import EngineInfo
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest
from localchat.engine.stream import Stream
from localchat.errors import ContextExceeded, EngineDied, LocalchatError
from tests.support.scripted_engine import ScriptedEngine

Item: TypeAlias = Event | LocalchatError | float
"""What a script holds: events, the failure that ends it, and pauses in seconds."""

DONE = Done(
    usage=Usage(prompt_tokens=12, cached_tokens=4, completion_tokens=3),
    timings=Timings(
        load_s=0.5,
        queue_s=0.0,
        ttft_s=0.41,
        prefill_tokens_per_s=200.0,
        decode_tokens_per_s=62.04,
        tpot_ms_p50=16.0,
        tpot_ms_p95=20.0,
        tpot_ms_p99=21.0,
        total_s=1.0,
    ),
    kv_used_tokens=412,
    kv_total_tokens=32768,
    speculation=Speculation(drafted=51, accepted=34),
    fingerprint="f1",
)
BEGIN: tuple[Item, ...] = (
    Accepted(prompt_tokens=12, max_tokens=100, seed=7),
    Loading(done_bytes=2_100_000_000, total_bytes=4_700_000_000),
    Prefill(done=12, cached=4, total=12),
)
HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\x9b1md\u202ee\rf\x00g"
CODE = "Here:\n\n```python\nprint(1)\n\n```\n\nand\n\n```\nsecond\n```\n"


def answer(*texts: str, choices: int = 1) -> tuple[Item, ...]:
    """A script that says these texts and ends well."""
    pieces = [Text(choice, text) for choice in range(choices) for text in texts]
    ends = [Finished(choice, "stop") for choice in range(choices)]
    return (*BEGIN, *pieces, *ends, DONE)


SCENARIOS: dict[str, tuple[Item, ...]] = {
    "hello": answer("Hel", "lo", ".\n", "\n"),
    "empty": answer(),
    "hostile": answer(HOSTILE),
    "code": answer(*CODE.partition("print")),
    "prose": answer("no code here"),
    "two": answer("one\n", choices=2),
    "thinks": (*BEGIN, Reasoning(0, "hm "), Reasoning(0, "so"), *answer("Yes")[3:]),
    "slow": (
        *BEGIN,
        Text(0, "first "),
        MetricsSnapshot("decode", completion_tokens=1),
        30.0,
        *answer("x")[3:],
    ),
    "pauses": (*BEGIN, Text(0, "first "), 1.0, *answer("and last")[3:]),
    "loads": (BEGIN[1], 60.0, *answer("x")),
    "talks": (
        *BEGIN,
        *(item for n in range(1, 4000) for item in (Text(0, f"word{n} "), 0.005)),
        *answer()[3:],
    ),
    "endless": (*BEGIN, *[Text(0, "line\n")] * 200_000, Finished(0, "length"), DONE),
    "dies": (
        *BEGIN,
        Text(0, "half an ans"),
        EngineDied(
            "the engine died: SIGKILL", hint="its last words", signal="SIGKILL", phase="serve"
        ),
    ),
    "edits": (
        *BEGIN,
        ToolCall(
            0, 0, "c1", "edit_file", '{"path": "a.txt", "old_text": "alpha", "new_text": "beta"}'
        ),
        Finished(0, "tool_calls"),
        DONE,
    ),
    "long": (ContextExceeded("too long", prompt_tokens=9000, context_tokens=4096),),
}


@dataclass(slots=True)
class ScenarioEngine(ScriptedEngine):
    """Plays one script to the letter, whatever is asked."""

    items: Sequence[Item] = ()
    about: EngineInfo | None = None

    def generate(self, request: GenerateRequest) -> Stream:
        self.requests.append(request)
        stream = Stream(cancel=self._count)
        threading.Thread(target=self._play, args=(stream,), daemon=True).start()
        return stream

    def info(self) -> EngineInfo:
        assert self.about is not None
        return self.about

    def _count(self) -> None:
        self.cancelled += 1

    def _play(self, stream: Stream) -> None:
        for item in self.items:
            if isinstance(item, float):
                time.sleep(item)
            else:
                stream.put(item)


INFO = EngineInfo(
    model="tiny",
    path="tiny.gguf",
    backend="llamacpp",
    architecture="qwen2",
    quantization="Q8_0",
    parameters=1,
    context_tokens=4096,
    context_train=32768,
    kv_type="f16",
    gpu_layers=0,
    layers=1,
    threads=2,
    file_bytes=1,
    predicted_bytes=1,
    actual_bytes=1,
    loaded=True,
    safe_mode=False,
    why="GGUF runs on llama.cpp",
    fingerprint="f0",
    notes=("the context was shortened to 4,096 tokens to fit into memory",),
    warning="",
)


class ScriptedApp:
    """`app` goes to the command; `options` and `engines` tell afterwards what it did."""

    def __init__(self, script: Sequence[Item], info: EngineInfo = INFO) -> None:
        self._script = script
        self._info = info
        self.options: list[EngineOptions] = []
        self.engines: list[ScenarioEngine] = []
        self.app = AppContext(open_engine=self._open)

    def _open(self, options: EngineOptions, say: Callable[[str], None]) -> ScenarioEngine:
        say("the engine speaks")
        self.options.append(options)
        self.engines.append(ScenarioEngine(items=self._script, about=self._info))
        return self.engines[-1]


if __name__ == "__main__":
    if sys.argv[2:3] == ["fit"]:  # a busy machine has no constant bandwidth
        import pytest

        from tests.support.ram_bandwidth import put_bandwidth

        put_bandwidth(pytest.MonkeyPatch(), 20e9)
    main(sys.argv[2:], ScriptedApp(SCENARIOS[sys.argv[1]]).app)
