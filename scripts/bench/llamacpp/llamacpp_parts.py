"""The parts of bench_llamacpp; each returns results by stable names, with sentences about them."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from scripts.bench.llamacpp.bare import Bare
from scripts.bench.llamacpp.edits import edited
from scripts.bench.llamacpp.gguf_models import CYCLE, Models
from scripts.bench.llamacpp.ours import ChildEngine, Ours
from scripts.bench.llamacpp.rounds import Lengths, Neighbours, Rounds, Variant, measure

MetricsSnapshot: TypeAlias = dict[str, float]
Prompt: TypeAlias = tuple[int, ...]

CONTEXT_TOKENS = 8192
PROMPT_TOKENS = 64
STREAMS = 4


class Setting(NamedTuple):
    """How thoroughly to measure. other_tokens: length of the other conversation. file_tokens: of the
    edited file. turn_tokens: of the continued conversation.
    """

    lengths: Lengths
    edit_lengths: Lengths
    rounds: int
    patience_s: float
    other_tokens: int
    turn_tokens: int
    file_tokens: int
    seed: int
    threads: int


class Bench:
    """The models, opened when a part first needs them."""

    def __init__(self, models: Models, setting: Setting, tell: Callable[[str], None]) -> None:
        self.models, self.setting, self.tell = models, setting, tell
        self._draw = np.random.default_rng(setting.seed)

    @contextmanager
    def ours(self, *, successor: bool = False) -> Iterator[Ours]:
        """Our engine core in this process."""
        path = self.models.successor if successor else self.models.random
        ours = Ours(path, threads=self.setting.threads, context_tokens=CONTEXT_TOKENS)
        try:
            yield ours
        finally:
            ours.close()

    @contextmanager
    def bare(self, ours: Ours) -> Iterator[Bare]:
        """The bare loop on the same weights."""
        bare = Bare(ours.weights, ours.context_spec, ours.model.info.vocab_size)
        try:
            yield bare
        finally:
            bare.close()

    @contextmanager
    def child(self) -> Iterator[ChildEngine]:
        """Our engine as the front ends have it."""
        path = self.models.random
        child = ChildEngine(path, threads=self.setting.threads, context_tokens=CONTEXT_TOKENS)
        try:
            yield child
        finally:
            child.close()

    def prompt(self, tokens: int = PROMPT_TOKENS) -> Prompt:
        """Tokens at random."""
        return tuple(self._draw.integers(CYCLE.start, CYCLE.stop, tokens).tolist())

    def measure(
        self,
        variants: Sequence[Variant],
        *engines: Ours | ChildEngine,
        lengths: Lengths | None = None,
    ) -> Rounds:
        """Warm up, then measure; a run with fewer threads than asked does not count as quiet."""
        chosen = lengths or self.setting.lengths
        for variant in variants:
            variant.generate(chosen.short)
        return measure(
            variants,
            chosen,
            rounds=self.setting.rounds,
            patience_s=self.setting.patience_s,
            steady=lambda: all(tuple(one.all_threads() for one in engines)),
        )


def single(bench: Bench) -> MetricsSnapshot:
    """One stream compared with the bare loop: in this process and through the child."""
    prompt = bench.prompt()
    with bench.ours() as ours, bench.bare(ours) as bare, bench.child() as child:
        rounds = bench.measure(
            [
                Variant("bare", lambda n: bare.generate([prompt], n)),
                Variant("ours", lambda n: _many(ours, [prompt], n)),
                Variant("child", lambda n: _one(child, prompt, n)),
            ],
            ours,
            child,
        )
    return {
        "single_bare_tokens_per_s": rounds.rate("bare"),
        "single_ours_tokens_per_s": rounds.rate("ours"),
        "single_child_tokens_per_s": rounds.rate("child"),
        "single_ours_ratio": rounds.ratio("ours", "bare"),
        "single_child_ratio": rounds.ratio("child", "bare"),
        **_noise("single", rounds, ("ours", "bare")),
    }


def beside(bench: Bench) -> MetricsSnapshot:
    """One stream while another conversation is in the cache: computed before each measurement, idle,
    and swapped out by the request itself.
    """
    prompt, other = bench.prompt(), bench.prompt(bench.setting.other_tokens)

    def touch_then_run(tokens: int) -> None:
        ours.generate([other], 1)
        ours.generate([prompt], tokens)

    with bench.ours() as ours, bench.bare(ours) as bare:
        variants = [
            Variant("bare", lambda n: bare.generate([prompt], n)),
            Variant("ours", touch_then_run),
        ]
        rounds = bench.measure(variants, ours)
        again = ours.generate([other], 1)[0].usage
    return {
        "beside_bare_tokens_per_s": rounds.rate("bare"),
        "beside_ours_tokens_per_s": rounds.rate("ours"),
        "beside_ratio": rounds.ratio("ours", "bare"),
        "beside_other_tokens": len(other),
        "beside_other_computed_again": again.prompt_tokens - again.cached_tokens,
        **_noise("beside", rounds, ("ours", "bare")),
    }


def busy(bench: Bench) -> MetricsSnapshot:
    """One stream next to a process that never rests, compared with one thread of the bare loop without it."""
    prompt = bench.prompt()
    with bench.ours() as ours, bench.bare(ours) as bare:
        bare.use_threads(1)
        quiet = bench.measure([Variant("one thread", lambda n: bare.generate([prompt], n))])
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
            try:
                # Long enough for the number of threads to settle.
                ours.generate([prompt], bench.setting.lengths.long)
                found = bench.measure([Variant("busy", lambda n: _many(ours, [prompt], n))])
            finally:
                neighbour.kill()
        for note in dict.fromkeys(ours.notes):
            bench.tell(f"  {note}")
    return {
        "busy_one_thread_tokens_per_s": quiet.rate("one thread"),
        "busy_ours_tokens_per_s": found.rate("busy"),
        "busy_ratio": found.rate("busy") / quiet.rate("one thread"),
        "busy_others_cores": found.others(),
        "busy_rounds": len(found.counted),
        "busy_rounds_quiet": found.quiet,
        "busy_rounds_made": found.made,
    }


def streams(bench: Bench) -> MetricsSnapshot:
    """Four streams against one, in our engine and in the bare loop."""
    prompts = [bench.prompt() for _ in range(STREAMS)]
    with bench.ours() as ours, bench.bare(ours) as bare, bench.bare(ours) as bare_many:
        rounds = bench.measure(
            [
                Variant("bare 1", lambda n: bare.generate(prompts[:1], n)),
                Variant("ours 1", lambda n: _many(ours, prompts[:1], n)),
                Variant("bare 4", lambda n: bare_many.generate(prompts, n), STREAMS),
                Variant("ours 4", lambda n: _many(ours, prompts, n), STREAMS),
            ],
            ours,
        )
    return {
        "streams_bare_1_tokens_per_s": rounds.rate("bare 1"),
        "streams_ours_1_tokens_per_s": rounds.rate("ours 1"),
        "streams_bare_4_tokens_per_s": rounds.rate("bare 4"),
        "streams_ours_4_tokens_per_s": rounds.rate("ours 4"),
        "streams_ours_gain": rounds.ratio("ours 4", "ours 1"),
        "streams_bare_gain": rounds.ratio("bare 4", "bare 1"),
        "streams_4_ratio": rounds.ratio("ours 4", "bare 4"),
        **_noise("streams", rounds, ("ours 4", "bare 4")),
    }


def turn(bench: Bench) -> MetricsSnapshot:
    """The second turn of a conversation computes its new tokens and the one whose KV was never needed."""
    first = bench.prompt(bench.setting.turn_tokens)
    said, asked = 16, 30
    recorded = (*first, *bench.prompt(said))
    with bench.ours() as ours:
        ours.sampler.recorded = recorded
        ours.generate([first], said)
        ours.sampler.recorded = ()
        second = (*recorded, *bench.prompt(asked))
        began_s = time.perf_counter()
        done = ours.generate([second], 1)[0]
        elapsed_s = time.perf_counter() - began_s
    return {
        "turn_prompt_tokens": done.usage.prompt_tokens,
        "turn_cached_tokens": done.usage.cached_tokens,
        "turn_computed_tokens": done.usage.prompt_tokens - done.usage.cached_tokens,
        "turn_new_tokens": asked,
        "turn_s": elapsed_s,
    }


def drafts_replay(bench: Bench) -> MetricsSnapshot:
    """Drafts on a recorded text. It overrules the sampler; every other cost is real."""
    setting = bench.setting
    source = bench.prompt(setting.file_tokens)
    edit = edited(source, np.random.default_rng(setting.seed + 2))
    noise = bench.prompt(setting.edit_lengths.long)
    with bench.ours() as ours:
        figures = _drafts(bench, ours, "replay_edit", source + edit[:1], edit[1:])
        figures |= _drafts(bench, ours, "replay_random", source, noise)
    return figures


def drafts_successor(bench: Bench) -> MetricsSnapshot:
    """Drafts on a model that follows a chain, so nothing is overruled. The prompt is the chain with
    edits, so the answer is the file with each edit undone.
    """
    setting = bench.setting
    following = bench.models.successors
    chain = [int(np.random.default_rng(setting.seed + 3).choice(np.array(CYCLE)))]
    while len(chain) < setting.file_tokens + 1:
        chain.append(int(following[chain[-1]]))
    source = edited(tuple(chain), np.random.default_rng(setting.seed + 4))
    with bench.ours(successor=True) as ours:
        figures = _drafts(bench, ours, "successor_edit", (*source, chain[0]), None)
        figures |= _drafts(bench, ours, "successor_new", tuple(chain), None)
    return figures


def _drafts(
    bench: Bench, ours: Ours, name: str, prompt: Prompt, recorded: Prompt | None
) -> MetricsSnapshot:
    """With and without drafts; `first`: as after a load, when the costs of steps are not known yet."""
    counts: dict[str, tuple[int, int]] = {}

    def run(kind: str, tokens: int) -> None:
        ours.sampler.recorded = prompt + recorded if recorded is not None else ()
        if kind == "first":
            ours.forget_costs()
        done = ours.generate([prompt], tokens, drafts=kind != "plain")[0]
        counts[kind] = done.speculation.drafted, done.speculation.accepted

    rounds = bench.measure(
        [
            Variant("plain", lambda n: run("plain", n)),
            Variant("first", lambda n: run("first", n)),
            Variant("drafts", lambda n: run("drafts", n)),
        ],
        ours,
        lengths=bench.setting.edit_lengths,
    )
    ours.sampler.recorded = ()
    drafted, accepted = counts["drafts"]
    return {
        f"{name}_plain_tokens_per_s": rounds.rate("plain"),
        f"{name}_tokens_per_s": rounds.rate("drafts"),
        f"{name}_gain": rounds.ratio("drafts", "plain"),
        f"{name}_first_gain": rounds.ratio("first", "plain"),
        f"{name}_drafted": drafted,
        f"{name}_accepted": accepted,
        **_noise(name, rounds, ("drafts", "plain")),
    }


def rows(bench: Bench) -> MetricsSnapshot:
    """One decode by its number of rows, at 256 tokens of context, in ms: what batching and drafts can gain."""
    start = 256
    kinds = [(1, n) for n in (1, 2, 3, 4, 6, 8, 12, 16)] + [(STREAMS, 1)]
    prompts = [bench.prompt(start) for _ in range(STREAMS)]
    figures: MetricsSnapshot = {}
    with bench.ours() as ours:
        for flash in (False, True):
            options = ours.context_spec._replace(flash_attention=flash)
            bare = Bare(ours.weights, options, ours.model.info.vocab_size)
            bare.generate(prompts, 1)
            times: dict[tuple[int, int], list[tuple[float, float]]] = {kind: [] for kind in kinds}
            for _ in range(4 * bench.setting.rounds):
                for sequences, each in kinds:
                    decode = partial(bare.rows, start, sequences, each)
                    times[sequences, each].append(_timed(decode))
            bare.close()
            for (sequences, each), found in times.items():
                name = f"rows_{'flash' if flash else 'plain'}_{sequences}x{each}_ms"
                quieter = sorted(found)[: -(-len(found) // 2)]
                figures[name] = 1000 * statistics.median(seconds for _, seconds in quieter)
    return figures


def _timed(task: Callable[[], None]) -> tuple[float, float]:
    """(cores that others used, in tenths; seconds)."""
    neighbours = Neighbours()
    neighbours.start()
    began_s = time.perf_counter()
    task()
    return round(neighbours.cores(), 1), time.perf_counter() - began_s


def _many(ours: Ours, prompts: Sequence[Prompt], tokens: int) -> None:
    ours.generate(prompts, tokens)


def _one(child: ChildEngine, prompt: Prompt, tokens: int) -> None:
    child.generate(prompt, tokens)


def _noise(name: str, rounds: Rounds, pair: tuple[str, str]) -> MetricsSnapshot:
    low, high = rounds.spread(*pair)
    return {
        f"{name}_ratio_low": low,
        f"{name}_ratio_high": high,
        f"{name}_others_cores": rounds.others(),
        f"{name}_rounds": len(rounds.counted),
        f"{name}_rounds_quiet": rounds.quiet,
        f"{name}_rounds_made": rounds.made,
    }


PARTS: dict[str, Callable[[Bench], MetricsSnapshot]] = {
    "single": single,
    "beside": beside,
    "busy": busy,
    "streams": streams,
    "turn": turn,
    "replay": drafts_replay,
    "successor": drafts_successor,
    "rows": rows,
}
