"""Where the time of a decode step goes: wall, GPU, kernels, host by function.

    PYTHONPATH=.:backends python3 -m scripts.bench.cuda.step_time MODEL|awq|reference:MODEL STREAMS...

A model's real weights and real prompts, or random AWQ weights of Qwen2.5-7B, drafts off, through engine core
and runner in this process. Environment: `TEMPERATURE` (0.8), `KERNELS` (number of kernels to list), `FUNCTIONS`
(number of functions to list), `ROUNDS`.
"""

import cProfile
import gc
import io
import os
import pstats
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from localchat.backend_api.interface import LoadRequest, Runner
from localchat.fit.load_options import LoadOptions
from localchat_cuda.backend import CudaBackend, ReferenceBackend
from localchat_cuda.runner.runner import CudaRunner
from scripts.bench.cuda.driving import Engine, config_of, random_tokens, runner_of

PROMPTS = Path(__file__).parents[2] / "tools/everyday.txt"
STEPS = 100
"""Steps of each measurement."""
LEAD_STEPS = 30
"""Steps before a measurement, in which prompts are read and graphs are captured."""


class StepTimer:
    """Times `launch` and `collect` of a runner, and how long `collect` waited for the GPU."""

    def __init__(self, runner: CudaRunner) -> None:
        self.launch_s: list[float] = []
        self.wait_s: list[float] = []
        self.gpu_s: list[float] = []
        launch = runner.launch
        collect = runner.collect

        def timed_launch(plan: object) -> None:
            began_s = time.perf_counter()
            launch(plan)  # type: ignore[arg-type]
            self.launch_s.append(time.perf_counter() - began_s)

        def timed_collect() -> object:
            began_s = time.perf_counter()
            events = runner._pending[0].events
            if events is not None:
                events[1].synchronize()
            self.wait_s.append(time.perf_counter() - began_s)
            if events is not None:
                self.gpu_s.append(events[0].elapsed_time(events[1]) / 1e3)
            return collect()

        runner.launch = timed_launch  # type: ignore[method-assign]
        runner.collect = timed_collect  # type: ignore[method-assign,assignment]

    def clear(self) -> None:
        self.launch_s.clear()
        self.wait_s.clear()
        self.gpu_s.clear()


def us(seconds: list[float]) -> float:
    """Median in microseconds; 0 without values."""
    return 1e6 * statistics.median(seconds) if seconds else 0.0


def load(name: str, slots: int) -> tuple[Runner, int, list[list[int]]]:
    """Load the model. Return its runner, vocabulary and prompts."""
    if name == "awq":
        import numpy as np

        config = config_of("awq")
        runner = runner_of(
            config, slots=slots, kv_tokens=slots * 640 + 8192, context=2048, step=2048
        )
        draw = np.random.default_rng(1)
        return runner, config.vocabulary, [list(random_tokens(draw, 250)) for _ in range(slots)]
    kind, _, path = name.rpartition(":")
    backend = ReferenceBackend() if kind == "reference" else CudaBackend()
    model = backend.open(Path(path), print)
    options = LoadOptions(context_tokens=2048, max_slots=slots, room_for_slots=True)
    plan = model.plan(options)
    loaded = model.load(LoadRequest(plan, options), lambda _done, _total: True, print)
    encode = model.tokenizer.encode
    prompts = [
        encode(f"<|im_start|>user\n{line}<|im_end|>\n<|im_start|>assistant\n", special=True)
        for line in PROMPTS.read_text().splitlines()
    ]
    return (
        loaded,
        model.tokenizer.vocab_size,
        [prompts[n % 50] + [n // 50 + 1000] for n in range(slots)],
    )


def main() -> int:
    """Measure and print."""
    name = sys.argv[1]
    streams = [int(word) for word in sys.argv[2:]] or [1, 8, 128]
    temperature = float(os.environ.get("TEMPERATURE", "0.8"))
    began_s = time.perf_counter()
    runner, vocabulary, prompts = load(name, max(streams))
    print(f"loaded {time.perf_counter() - began_s:.1f} s", flush=True)
    while runner.warm_up_next():
        pass
    print(f"warm {time.perf_counter() - began_s:.1f} s", flush=True)
    timer = StepTimer(runner)  # type: ignore[arg-type]
    engine = Engine(runner, vocabulary)
    gc.disable()

    def start(count: int) -> None:
        for prompt in prompts[:count]:
            engine.ask(prompt, 2 * LEAD_STEPS + 4 * STEPS, sampling={"temperature": temperature})
        asked = list(engine.asked.values())[-count:]
        while not all(request.tokens for request in asked):
            engine.turn()
        for _ in range(LEAD_STEPS):
            engine.turn()

    for count in streams:
        walls = []
        start(count)
        for _ in range(3):
            timer.clear()
            began_s = time.perf_counter()
            for _ in range(STEPS):
                engine.turn()
            walls.append((time.perf_counter() - began_s) / STEPS)
        wall_s = statistics.median(walls)
        print(
            f"{Path(name).stem[:24]} {count} streams: {count / wall_s:.0f} tok/s, wall {1e6 * wall_s:.0f} us a "
            f"step; launch {us(timer.launch_s):.0f}, wait {us(timer.wait_s):.0f}, rest of the host "
            f"{1e6 * wall_s - us(timer.launch_s) - us(timer.wait_s):.0f}; events {us(timer.gpu_s):.0f}",
            flush=True,
        )
        engine.settle()
        _kernels(engine, start, count)
        _functions(engine, start, count)
    runner.close()
    return 0


def _kernels(engine: Engine, start: Callable[[int], object], count: int) -> None:
    listed = int(os.environ.get("KERNELS", "16"))
    if not torch.cuda.is_available() or not listed:
        return
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    start(count)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        began_s = time.perf_counter()
        for _ in range(40):
            engine.turn()
        torch.cuda.synchronize()
        wall_s = (time.perf_counter() - began_s) / 40
    engine.settle()
    calls: defaultdict[str, int] = defaultdict(int)
    added_us: defaultdict[str, float] = defaultdict(float)
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    end_us = 0.0
    # Kernels overlap, so the time that a kernel takes is the time by which it moves the end.
    for event in sorted(events, key=lambda event: event.time_range.end):
        span = event.time_range
        name = event.name[:60]
        calls[name] += 1
        added_us[name] += span.end - max(span.start, end_us)
        end_us = span.end
    print(
        f"  profiled wall {1e6 * wall_s:.0f} us, {len(events) / 40:.0f} kernels a step; time that each adds:"
    )
    for key, value in sorted(added_us.items(), key=lambda item: -item[1])[:listed]:
        times = calls[key] / 40
        print(f"   {value / 40:8.1f} us {times:6.1f}x {value / calls[key]:6.2f} us {key}")


def _functions(engine: Engine, start: Callable[[int], object], count: int) -> None:
    listed = int(os.environ.get("FUNCTIONS", "24"))
    if not listed:
        return
    start(count)
    profiler = cProfile.Profile()
    profiler.enable()
    began_s = time.perf_counter()
    for _ in range(STEPS):
        engine.turn()
    wall_s = (time.perf_counter() - began_s) / STEPS
    profiler.disable()
    engine.settle()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(listed)
    print(f"  with cProfile: wall {1e6 * wall_s:.0f} us a step, {STEPS} steps")
    print(
        "\n".join(line[:140] for line in text.getvalue().splitlines()[6 : 10 + listed]), flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
