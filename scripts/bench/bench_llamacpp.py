#!/usr/bin/env python3
"""Compares our engine over llama.cpp with a bare llama_decode loop: same build, weights and settings.

    scripts/bench/bench_llamacpp.py --models DIR --vocabulary VOCAB.gguf

The models have the shape of a 0.5B Qwen2 and random weights; those missing in DIR are written with the
vocabulary of the given GGUF file (ggml-vocab-qwen2.gguf of llama.cpp's sources). Greedy, end tokens
ignored, speculation off except in the parts about it; rates are by wall clock, the difference of two
lengths. Prints a table, and as the last line one JSON object with the same numbers.
"""

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPINS = "GOMP_SPINCOUNT"

TARGETS = {
    "single_ours_ratio": 0.97,
    "single_child_ratio": 0.97,
    "beside_ratio": 0.97,
    "busy_ratio": 0.8,
    "streams_ours_gain": 2.0,
    "replay_edit_gain": 2.5,
    "replay_random_gain": 0.97,
    "successor_edit_gain": 2.5,
    "successor_new_gain": 0.97,
}
"""At least."""


def main() -> int:
    """Measure and print the requested parts."""
    asked = _arguments()
    _as_the_child_runs()
    from scripts.bench.llamacpp.gguf_models import models
    from scripts.bench.llamacpp.llamacpp_parts import PARTS, Bench, Setting
    from scripts.bench.llamacpp.rounds import Lengths

    quick = asked.quick
    setting = Setting(
        lengths=Lengths(*((8, 24) if quick else asked.lengths)),
        edit_lengths=Lengths(*((32, 112) if quick else asked.edit_lengths)),
        rounds=1 if quick else asked.rounds,
        patience_s=0.0 if quick else asked.patience,
        other_tokens=600 if quick else 6000,
        turn_tokens=300 if quick else 1500,
        file_tokens=160 if quick else 320,
        seed=asked.seed,
        threads=asked.threads,
    )
    unknown = set(asked.parts) - PARTS.keys()
    if unknown:
        print(f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    bench = Bench(models(asked.models, asked.vocabulary, asked.seed), setting, _tell)
    figures: dict[str, float] = {}
    for name, part in PARTS.items():
        if asked.parts and name not in asked.parts:
            continue
        _tell(f"{name}: {(part.__doc__ or '').strip()}")
        found = part(bench)
        _print(found)
        figures |= found
    print(json.dumps({**_circumstances(setting.seed), **_rounded(figures)}))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="parts to measure; none: all")
    parser.add_argument("--models", type=Path, required=True, metavar="DIR")
    parser.add_argument("--vocabulary", type=Path, metavar="GGUF")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: its figures mean nothing"
    )
    parser.add_argument("--lengths", type=int, nargs=2, default=(32, 160))
    parser.add_argument("--edit-lengths", type=int, nargs=2, default=(16, 272))
    parser.add_argument("--rounds", type=int, default=5, help="quiet rounds that are wanted")
    parser.add_argument(
        "--patience", type=float, default=240.0, help="seconds to wait for quiet rounds"
    )
    parser.add_argument("--threads", type=int, default=0, help="0: as many as the product takes")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _as_the_child_runs() -> None:
    """Restart with the environment of the engine's child, which native code reads when it loads."""
    if os.environ.get(SPINS) and str(ROOT) in sys.path:
        return
    sys.path[:0] = [str(ROOT), str(ROOT / "backends")]
    from localchat.engine.local.process import child_environment

    environment = child_environment(os.environ)
    places = [str(ROOT), str(ROOT / "backends"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def _print(figures: dict[str, float]) -> None:
    for name, value in figures.items():
        target = TARGETS.get(name)
        verdict = ""
        if target is not None:
            verdict = f"  at least {target}: {'reached' if value >= target else 'MISSED'}"
        print(f"  {name:<34} {value:>10.3f}{verdict}", flush=True)


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}


def _circumstances(seed: int) -> dict[str, str | int | float]:
    from localchat.fit.hardware import read_machine
    from localchat_llamacpp.build_advice import read_build

    return {
        "library": read_build().version,
        "cores": read_machine().cores,
        "spins": int(os.environ[SPINS]),
        "load_average": round(os.getloadavg()[0], 2),
        "seed": seed,
    }


def _tell(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
