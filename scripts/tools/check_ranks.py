"""Compares the logits of all families and storage formats on several ranks with those of one.

    PYTHONPATH=.:backends python scripts/tools/check_ranks.py [--ranks N] [NAME...]

The models are tiny and random, and the ranks are threads on a CPU, so this takes about a minute. A line says
the largest relative distance. Exit status 1: a distance is larger than rounding explains.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from localchat.errors import LocalchatError
from tests.support.rank_cases import FAMILIES, FORMATS, distances


def main() -> int:
    """Check the named cases, or all. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for name, case in {**FAMILIES, **FORMATS}.items():
        if arguments.names and name not in arguments.names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                distance = max(distances(case, Path(folder), arguments.ranks))
            except LocalchatError as error:
                sys.stdout.write(f"{name:24} refused: {error.message}\n")
                continue
        verdict = "ok"
        if distance > case.near:
            verdict = "TOO FAR"
            failed += 1
        sys.stdout.write(f"{name:24} {distance:.1e} {verdict}\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
