"""Measures the CUDA backend through engine core and runner on one NVIDIA GPU: random AWQ weights of
Qwen2.5-7B.

    PYTHONPATH=backends:. python3 scripts/bench/bench_cuda.py [PARTS]

PARTS, all by default: decoding prefix gaps drafts formats rounded gguf types kept warm families experts
hybrid heads half bytes startup cold.

Random token ids, greedy, speculation and prefix cache off, end tokens ignored; rates are the difference
of 257 and 1 tokens, medians of 3. Prints a table, and as the last line one JSON object. The kernels
alone: scripts/bench/bench_kernels.py; correctness: tests/localchat_cuda with a GPU.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "backends")]

PARTS = (
    *("decoding", "prefix", "gaps", "drafts"),
    *(
        "formats",
        "floats",
        "rounded",
        "gguf",
        "types",
        "kept",
        "warm",
        "families",
        "experts",
        "hybrid",
        "heads",
    ),
    *("half", "bytes", "startup", "cold"),
)
STREAMS = (1, 8, 32, 128)


def main() -> int:
    """Measure the requested parts."""
    import torch

    from scripts.bench.cuda import speed
    from scripts.bench.cuda.driving import Engine, config_of, runner_of
    from scripts.bench.cuda.families import families
    from scripts.bench.cuda.gguf import gguf, gguf_types
    from scripts.bench.cuda.heads import heads
    from scripts.bench.cuda.hybrid import hybrid
    from scripts.bench.cuda.kept import kept
    from scripts.bench.cuda.mixture import mixture
    from scripts.bench.cuda.startup import startup
    from scripts.bench.cuda.stored import eight_bits, four_bits, grouped_floats, rounded
    from scripts.bench.cuda.warm import warm

    parts = sys.argv[1:] or list(PARTS)
    results: dict[str, float] = {}
    failed: list[str] = []

    def run(name: str, part: Callable[[], None]) -> None:
        if name in parts:
            try:
                part()
            except (RuntimeError, AssertionError, ValueError) as trouble:
                failed.append(f"{name}: {type(trouble).__name__}: {trouble}")
                print(f"FAILED {failed[-1]}", flush=True)
            torch.cuda.empty_cache()

    if set(parts) & {"decoding", "prefix", "gaps", "drafts"}:
        config = config_of("awq")
        runner = runner_of(config, slots=128, kv_tokens=128 * 512 + 65536)
        engine = Engine(runner, config.vocabulary)
        drafting = Engine(runner, config.vocabulary, speculation=True)
        run("decoding", lambda: speed.decoding(engine, results, STREAMS))
        run("prefix", lambda: speed.prefix_caching(engine, results))
        run("gaps", lambda: speed.chunked_prefill(results, engine))
        run("drafts", lambda: speed.speculation(config.vocabulary, results, drafting))
        results["graphs"] = runner.graphs.count
        runner.close()
        del engine, drafting, runner
        torch.cuda.empty_cache()
    run("formats", lambda: four_bits(results))
    run("floats", lambda: grouped_floats(results))
    run("rounded", lambda: rounded(results))
    run("gguf", lambda: gguf(results))
    run("types", lambda: gguf_types(results))
    run("kept", lambda: kept(results))
    run("warm", lambda: warm(results))
    run("families", lambda: families(results))
    run("experts", lambda: mixture(results))
    run("hybrid", lambda: hybrid(results))
    run("heads", lambda: heads(results))
    run("half", lambda: speed.half_precision(results))
    run("bytes", lambda: eight_bits(results))
    run("startup", lambda: startup(results, cold="cold" in parts))
    print(json.dumps({name: round(value, 3) for name, value in results.items()}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
