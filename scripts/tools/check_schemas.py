#!/usr/bin/env python3
"""Checks answers held to generated JSON Schemas: how many end in time, and whether those are valid.

    scripts/tools/check_schemas.py [--model MODEL.gguf] [--count N] [--first N]

Sampling is plain: temperature 1, the whole vocabulary, 400 tokens at most. Prints the failures, and as
the last line one JSON object. Exit status 1 if an answer that ended is not valid, or if fewer than 95 %
end.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.fit.load_options import LoadOptions
from scripts.tools.schemas.answers import MOST_TOKENS, assess_answers

LEAST_FINISHED = 0.95


def main() -> int:
    """Ask, validate, print."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--model", type=Path, help="a GGUF file; the built-in guide otherwise")
    options.add_argument("--count", type=int, default=200)
    options.add_argument("--first", type=int, default=0)
    asked = options.parse_args()
    model = asked.model or Path(__file__).parents[2] / "localchat" / "guide" / "guide.gguf"
    engine = LocalEngine(
        EngineOptions(load=LoadOptions(context_tokens=4096, max_slots=8), model=model),
        notify=lambda sentence: print(sentence, file=sys.stderr),
    )
    try:
        answers = list(assess_answers(engine, range(asked.first, asked.first + asked.count)))
    finally:
        engine.close()
    for one in answers:
        if one.fault or not one.finished:
            why = one.fault or f"not ended after {one.tokens} tokens"
            print(
                f"{one.number}: {why}\n  {json.dumps(one.schema)[:300]}\n  {one.text[:150]} … {one.text[-150:]}"
            )
    finished = sum(one.finished for one in answers)
    invalid = sum(bool(one.fault) for one in answers)
    figures = {
        "model": model.name,
        "asked": len(answers),
        "finished": finished,
        "finished_share": round(finished / len(answers), 4),
        "invalid": invalid,
        "most_tokens": MOST_TOKENS,
        "median_tokens": statistics.median(one.tokens for one in answers),
    }
    print(json.dumps(figures))
    return 1 if invalid or finished < LEAST_FINISHED * len(answers) else 0


if __name__ == "__main__":
    sys.exit(main())
