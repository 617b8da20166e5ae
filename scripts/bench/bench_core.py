#!/usr/bin/env python3
"""Measures the engine core's own CPU time, over a runner that computes nothing.

    PYTHONPATH=.:backends scripts/bench/bench_core.py [--streams 1 64] [--profile PART]

PART is decode, blocks, crowd, drafts or parked. `decode`: microseconds of a row in decode steps, with slots and
with blocks (two steps in flight), by number of streams; texts that never repeat, and texts that do, with drafts
on. `crowd`: the same with blocks, where requests begin and end all the time. `parked`: microseconds of a
request's prefix search and of its end, by number of prefixes saved in RAM. CPU time of the thread, the least of
three runs. Prints a table, and as the last line one JSON object with the same numbers.
"""

import argparse
import cProfile
import gc
import json
import pstats
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import numpy as np

from localchat.backend_api.interface import Capabilities
from localchat.core.engine_core import EngineCallbacks, EngineCore
from localchat.core.input_processor import InputProcessor
from localchat.core.kv_cache import make_kv_cache_manager
from localchat.core.kv_cache.manager import ValidTokens
from localchat.core.kv_cache.slots import SlotKVCacheManager
from localchat.engine.events import Event
from localchat.engine.local import protocol
from localchat.engine.request import GenerateRequest, Sampling, TokenIds
from localchat.errors import LocalchatError
from scripts.bench.server.echo_backend import EchoRunner
from tests.support.scripted_backend import VOCAB, Script, ScriptedModel

STREAMS = (1, 8, 32, 64, 128)
PARKED = (0, 300, 3000)
PROMPT_TOKENS = 64
STEPS = 200
CROWD_TOKENS = 200
"""Tokens of an answer in a crowd."""
_PERIOD = 48
"""Tokens after which a repeating text begins again."""
_RUNS = 3


def engine_core(runner: EchoRunner, *, drafts: bool) -> tuple[EngineCore, InputProcessor]:
    """The core as the engine process makes it, frames included."""
    model = ScriptedModel(Path(__file__), Script())
    encode = msgspec.msgpack.Encoder().encode

    def send(items: list[tuple[int, Event]]) -> None:
        encode(protocol.Events(tuple(items)))

    def fail(_id: int, error: LocalchatError) -> None:
        raise error

    can = runner.capabilities
    core = EngineCore(
        runner,
        model.tokenizer,
        make_kv_cache_manager(can, "bench", 1 << 30),
        EngineCallbacks(send, fail, lambda _text: None),
        speculation=drafts,
    )
    return core, InputProcessor(model, can.context_tokens, {}, lambda _text: None)


def decode_us(streams: int, *, blocks: bool, drafts: bool, repeats: bool) -> float:
    """Microseconds of the core's thread for each token that it generates in decode steps."""
    can = _capabilities(streams, blocks=blocks)
    runner = EchoRunner(can, _texts(repeats=repeats), _gpu_step_s if blocks else _cpu_step_s)
    core, input_processor = engine_core(runner, drafts=drafts)
    draw = np.random.default_rng(1)
    states = []
    for number in range(streams):
        prompt = tuple(draw.integers(32, 127, PROMPT_TOKENS).tolist())
        request = GenerateRequest(
            TokenIds(prompt), Sampling(temperature=0.8), max_tokens=STEPS * 32, ignore_eos=True
        )
        states.append(input_processor.accept(number + 1, request)[0])
        core.submit(states[-1])
    core.process_commands()
    while not all(state.completion_tokens for state in states):
        core.step()
    said = sum(state.completion_tokens for state in states)
    began_s = time.thread_time()
    for _ in range(STEPS):
        core.step()
    elapsed_s = time.thread_time() - began_s
    return 1e6 * elapsed_s / (sum(state.completion_tokens for state in states) - said)


def crowd_us(streams: int) -> float:
    """Microseconds of the core's thread for each token of a crowd, whose requests begin and end all the time.

    The answers have different lengths at first, so that later ones end in different steps.
    """
    can = _capabilities(streams, blocks=True)
    core, input_processor = engine_core(
        EchoRunner(can, _texts(repeats=False), _gpu_step_s), drafts=True
    )
    draw = np.random.default_rng(1)
    numbers = count(1)

    def submit(tokens: int) -> None:
        prompt = tuple(draw.integers(32, 127, PROMPT_TOKENS).tolist())
        request = GenerateRequest(TokenIds(prompt), Sampling(temperature=0.8), max_tokens=tokens)
        core.submit(input_processor.accept(next(numbers), request)[0])

    def run(steps: int) -> tuple[int, float]:
        tokens = 0
        spent_s = 0.0
        for _ in range(steps):
            for _ in range(streams - len(core.output_processor.requests)):
                submit(CROWD_TOKENS)
            before = core.stats().completion_tokens
            began_s = time.thread_time()
            core.step()
            spent_s += time.thread_time() - began_s
            tokens += core.stats().completion_tokens - before
        return tokens, spent_s

    for number in range(streams):
        submit(1 + CROWD_TOKENS * number // streams)
    core.process_commands()
    run(CROWD_TOKENS)
    # As the engine process does once it is loaded.
    gc.collect()
    gc.freeze()
    tokens, spent_s = run(2 * CROWD_TOKENS)
    return 1e6 * spent_s / tokens


def _texts(*, repeats: bool) -> Callable[[], list[int]]:
    """Return a function that makes the text of the next sequence."""
    draw = np.random.default_rng(0)
    length = PROMPT_TOKENS + STEPS * 40

    def next_text() -> list[int]:
        tokens: list[int] = np.resize(
            draw.integers(32, 127, _PERIOD if repeats else length), length
        ).tolist()
        return tokens

    return next_text


def _gpu_step_s(width: int) -> float:
    return 0.001 + 2e-6 * width


def _cpu_step_s(width: int) -> float:
    """A wide step costs more on a CPU: drafts pay only where most of them are right."""
    return 0.02 + 0.006 * width


def parked_us(parked: int) -> float:
    """Microseconds of one conversation's search, allocation, commit and end beside `parked` others.

    A chat's prompts have a head in common: the chat template and the system message.
    """
    cache = SlotKVCacheManager(_capabilities(8, blocks=False), 1 << 34)
    draw = np.random.default_rng(2)
    head = draw.integers(0, VOCAB, 40).tolist()
    numbers = count(1)

    def converse() -> None:
        seq = next(numbers)
        tokens = head + draw.integers(0, VOCAB, 400).tolist()
        assert cache.allocate(seq, tokens, cache.find_prefix(tokens, ""), "") is not None
        assert cache.extend(seq, len(tokens)) is not None
        cache.commit(seq, tokens, ValidTokens(len(tokens)))
        cache.release(seq, keep=True)

    for _ in range(parked + 2):
        converse()
    began_s = time.thread_time()
    for _ in range(100):
        converse()
    return 1e4 * (time.thread_time() - began_s)


def _capabilities(streams: int, *, blocks: bool) -> Capabilities:
    return Capabilities(
        context_tokens=PROMPT_TOKENS + STEPS * 40,
        kv_tokens=(PROMPT_TOKENS + STEPS * 40) * max(streams, 8),
        max_slots=max(streams, 8),
        max_rows=max(streams, 8),
        max_step_tokens=4096,
        depth=2 if blocks else 1,
        block_tokens=64 if blocks else 0,
        moves_rows=blocks,
        bytes_per_token=1000,
    )


def main() -> int:
    """Measure, print, or profile one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", choices=("decode", "blocks", "crowd", "drafts", "parked"))
    parser.add_argument("--streams", type=int, nargs="*", default=STREAMS)
    asked = parser.parse_args()
    if asked.profile is not None:
        _profile(asked.profile)
        return 0
    figures: dict[str, float] = {}
    for name, part in _parts(asked.streams).items():
        figures[name] = min(part() for _ in range(_RUNS))
        print(f"  {name:<28} {figures[name]:>10.1f} us", flush=True)
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}))
    return 0


def _parts(streams: Sequence[int]) -> dict[str, Callable[[], float]]:
    parts: dict[str, Callable[[], float]] = {}
    for n in streams:
        parts[f"slots_{n}"] = partial(decode_us, n, blocks=False, drafts=False, repeats=False)
        parts[f"slots_{n}_drafts"] = partial(decode_us, n, blocks=False, drafts=True, repeats=False)
        parts[f"slots_{n}_repeats"] = partial(decode_us, n, blocks=False, drafts=True, repeats=True)
        parts[f"blocks_{n}"] = partial(decode_us, n, blocks=True, drafts=False, repeats=False)
        parts[f"crowd_{n}"] = partial(crowd_us, n)
        parts[f"blocks_{n}_drafts"] = partial(decode_us, n, blocks=True, drafts=True, repeats=False)
    for parked in PARKED:
        parts[f"parked_{parked}"] = partial(parked_us, parked)
    return parts


def _profile(name: str) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    if name == "parked":
        parked_us(PARKED[-1])
    elif name == "crowd":
        crowd_us(STREAMS[-1])
    else:
        decode_us(32, blocks=name == "blocks", drafts=name == "drafts", repeats=False)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(32)


if __name__ == "__main__":
    sys.exit(main())
