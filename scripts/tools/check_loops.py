"""Counts answers that repeat themselves, without DRY and with it.

    PYTHONPATH=.:backends python -m scripts.tools.check_loops MODEL [--prompts 20] [--tokens 300] [--threads 2]

The prompts are everyday questions. Each is answered greedily and at temperature 0.7, without the loop guard. An
answer loops if eight words in a row occur three times in it. "again" is the share of four words in a row that
have occurred before. The last line is JSON.
"""

import argparse
import json
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling
from localchat.fit.load_options import LoadOptions
from tests.support.answers import ask

PROMPTS: Final = (Path(__file__).parent / "everyday.txt").read_text("utf-8").splitlines()
_LOOP_WORDS: Final = 8
_LOOP_TIMES: Final = 3
_SHORT_WORDS: Final = 4
SAMPLERS: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "dry 0.8": {"dry_multiplier": 0.8},
    "xtc 0.5": {"xtc_probability": 0.5},
    "dry 0.8, xtc 0.5": {"dry_multiplier": 0.8, "xtc_probability": 0.5},
}


class Loops(NamedTuple):
    """Repetition of the answers of one setting."""

    looping: int
    again: float
    """Mean share of short sequences of words that occurred before."""
    words: float
    """Mean length of an answer."""
    seconds: float


def is_looping(text: str) -> bool:
    """Return True if a long sequence of words occurs several times."""
    counts = Counter(_sequences(text, _LOOP_WORDS))
    return max(counts.values(), default=0) >= _LOOP_TIMES


def repeated_share(text: str) -> float:
    """Return the share of short sequences of words that occurred before in the text."""
    sequences = _sequences(text, _SHORT_WORDS)
    if not sequences:
        return 0.0
    return 1 - len(set(sequences)) / len(sequences)


def _sequences(text: str, length: int) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[start : start + length]) for start in range(len(words) - length + 1)]


def measure(engine: LocalEngine, prompts: list[str], tokens: int, **sampling: Any) -> Loops:  # noqa: ANN401
    """Answer the prompts and count loops."""
    start_s = time.perf_counter()
    answers = []
    for number, prompt in enumerate(prompts):
        request = GenerateRequest(
            Messages((Message("user", prompt),)),
            sampling=Sampling(seed=number, **sampling),
            max_tokens=tokens,
            loop_guard=False,
        )
        answers.append(ask(engine, request).text)
    count = len(answers)
    return Loops(
        sum(map(is_looping, answers)),
        sum(map(repeated_share, answers)) / count,
        sum(len(answer.split()) for answer in answers) / count,
        time.perf_counter() - start_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    load = LoadOptions(context_tokens=2048, threads=options.threads)
    engine_options = EngineOptions(options.model, load, name=options.model.stem)
    rows = []
    prompts = PROMPTS[: options.prompts]
    print(f"{'temperature':>11} {'samplers':18} {'looping':>8} {'again':>7} {'words':>6} {'s':>6}")
    with closing(LocalEngine(engine_options, notify=lambda text: None)) as engine:
        for temperature in (0.0, 0.7):
            for name, samplers in SAMPLERS.items():
                if temperature == 0 and "xtc_probability" in samplers:
                    continue  # Greedy answers draw nothing.
                loops = measure(
                    engine, prompts, options.tokens, temperature=temperature, **samplers
                )
                rows.append({"temperature": temperature, "samplers": name, **loops._asdict()})
                print(
                    f"{temperature:11} {name:18} {loops.looping:3} of {len(prompts)} {loops.again:7.1%} "
                    f"{loops.words:6.0f} {loops.seconds:6.0f}",
                    flush=True,
                )
    print(json.dumps({"prompts": len(prompts), "tokens": options.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
