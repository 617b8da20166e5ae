"""Measures tiers of the KV cache: first tokens from pinned memory and from the disk, and what writing costs."""

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from localchat.backend_api.interface import LoadBlock, Runner, SaveBlock, StepPlan
from localchat.fit.kv_types import FP8
from localchat.kv_store.store import KVStore
from scripts.bench.cuda.driving import Engine, config_of, random_tokens, runner_of
from scripts.bench.cuda.speed import LONG, SHORT, MetricsSnapshot

LENGTHS = (7_000, 30_000)
POOL, CONTEXT = 34_000, 32_768
"""A pool of little more than one prompt: the next one evicts it."""
RAM_BYTES, DISK_BYTES = 8_000_000_000, 10_000_000_000
STREAMS = (1, 8, 32)
ROUNDS = 5
ANSWER = 8
_COPIED = 400


def warm(results: MetricsSnapshot) -> None:
    """warm_ttft_ms_* computed, from RAM and from the disk, for 16 and 8 bits; warm_rate_*: decoding with the
    tiers over that without.
    """
    config = config_of("awq")
    for name, kv_type in (("kv16", None), ("kv8", FP8)):
        runner = runner_of(
            config, slots=max(STREAMS), kv_tokens=POOL, context=CONTEXT, kv_type=kv_type,
            cache_ram_bytes=RAM_BYTES,
        )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="bench-warm-") as folder:
            if kv_type is None:
                _copies(runner, results)
                _decode(runner, config.vocabulary, Path(folder), results)
            for length in LENGTHS:
                _first_tokens(runner, config.vocabulary, Path(folder), f"{name}_{length}", results)
        runner.close()
        torch.cuda.empty_cache()


def _first_tokens(
    runner: Runner, vocabulary: int, folder: Path, name: str, results: MetricsSnapshot
) -> None:
    length = int(name.rpartition("_")[2])
    draw = np.random.default_rng(length)
    prompts = [random_tokens(draw, length) for _ in range(2)]
    filler = random_tokens(draw, LENGTHS[-1])

    def engine() -> Engine:
        return Engine(runner, vocabulary, disk=KVStore(folder / name, DISK_BYTES))

    first, texts = engine(), []
    computed = []
    for warm_up in (random_tokens(draw, length), filler):
        _ask(first, warm_up, owner="")
    for prompt in prompts:
        spent_ms, text = _ask(first, prompt)
        computed.append(spent_ms)
        texts.append(text)
        _ask(first, filler, owner="")
    _tell(results, f"warm_ttft_ms_{name}_computed", computed)
    found = []
    for prompt, text in [*zip(prompts, texts, strict=True)] * 2:
        spent_ms, again = _ask(first, prompt)
        found.append(spent_ms)
        print(f"    {first.states[-1].cached:,} from RAM, text equal: {again == text}", flush=True)
        _ask(first, filler, owner="")
    _tell(results, f"warm_ttft_ms_{name}_ram", found)
    assert first.disk_tier is not None
    began_s = time.perf_counter()
    first.disk_tier.finish(time.monotonic() + 20)
    written = sum(path.stat().st_size for path in (folder / name).rglob("*.kv"))
    print(f"    {written / 1e9:.2f} GB on the disk, {time.perf_counter() - began_s:.2f} s behind",
          flush=True)  # fmt: skip
    for state in ("warm", "cold"):
        found = []
        for prompt, text in zip(prompts, texts, strict=True):
            if state == "cold":
                _drop_file_cache(folder / name)
            spent_ms, again = _ask(fresh := engine(), prompt)
            found.append(spent_ms)
            [state_] = fresh.states
            print(f"    {state_.read_back:,} of {length:,} tokens read back in "
                  f"{state_.read_s * 1e3:.1f} ms, text equal: {again == text}", flush=True)  # fmt: skip
        _tell(results, f"warm_ttft_ms_{name}_disk_{state}", found)


def _ask(engine: Engine, prompt: Sequence[int], owner: str = "1") -> tuple[float, str]:
    """First token in ms, and the whole text."""
    asked = engine.ask(prompt, ANSWER, salt="warm", owner=owner)
    engine.settle()
    return (asked.times_s[0] - asked.begun_s) * 1e3, "".join(asked.text)


def _tell(results: MetricsSnapshot, name: str, values: Sequence[float]) -> None:
    results[name] = statistics.median(values)
    print(f"{name}: {results[name]:.1f}   {min(values):.1f} to {max(values):.1f}", flush=True)


def _drop_file_cache(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _decode(runner: Runner, vocabulary: int, folder: Path, results: MetricsSnapshot) -> None:
    """Times of decoding without the tiers over those with them, in turns; the disk gets everything."""
    engines = {
        True: Engine(runner, vocabulary, disk=KVStore(folder / "decode", DISK_BYTES)),
        False: Engine(runner, vocabulary, tiers=False),
    }
    draw = np.random.default_rng(5)

    def ask(tiers: bool, streams: int, most: int) -> float:
        engine, began_s = engines[tiers], time.perf_counter()
        prompts = [random_tokens(draw, 128) for _ in range(streams)]
        asked = [engine.ask(prompt, most, owner="1") for prompt in prompts]
        engine.settle(lambda: all(one.tokens == most for one in asked))
        spent_s = time.perf_counter() - began_s
        engine.settle()
        return spent_s

    for streams in STREAMS:
        times: dict[bool, list[float]] = {True: [], False: []}
        for round_ in range(ROUNDS + 2):
            for tiers in (True, False) if round_ % 2 else (False, True):
                spent_s = ask(tiers, streams, LONG) - ask(tiers, streams, SHORT)
                times[tiers] += [spent_s] if round_ > 1 else []
        pairs = [off / on for off, on in zip(times[False], times[True], strict=True)]
        _tell(results, f"warm_rate_bs{streams}", pairs)
        rate = streams * (LONG - SHORT) / statistics.median(times[True])
        print(f"    {rate:.0f} tok/s with the tiers", flush=True)
    for length in (128, 2_000):
        times = {True: [], False: []}
        for round_ in range(2 * ROUNDS):
            for tiers in (True, False) if round_ % 2 else (False, True):
                asked = engines[tiers].ask(random_tokens(draw, length), 1, owner="1")
                engines[tiers].settle()
                times[tiers].append(asked.times_s[0] - asked.begun_s)
        pairs = [off / on for off, on in zip(times[False], times[True], strict=True)][2:]
        _tell(results, f"warm_first_{length}", pairs)


def _copies(runner: Runner, results: MetricsSnapshot) -> None:
    """Rates of copies to and from pinned memory through the runner."""
    size = _COPIED * runner.capabilities.block_tokens * runner.capabilities.bytes_per_token
    for name, kind in (("save", SaveBlock), ("load", LoadBlock)):
        for _ in range(2):
            ops = tuple(kind(number, number) for number in range(_COPIED))
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            runner.launch(StepPlan(0, memory=ops))
            queued_s = time.perf_counter() - began_s
            runner.collect()
            torch.cuda.synchronize()
            spent_s = time.perf_counter() - began_s
        results[f"warm_{name}_gb_s"] = rate = size / spent_s / 1e9
        print(f"{name}: {rate:.1f} GB/s; {_COPIED} blocks queued in {queued_s * 1e3:.1f} ms",
              flush=True)  # fmt: skip
