"""Runs 2,000 random requests on a tiny pool of pages, on a GPU, or over the references without one.

    PYTHONPATH=backends:. [TRITON_INTERPRET=0] python3 scripts/tools/stress_cuda.py [REQUESTS] [SEED]

Needs transformers for its tiny checkpoint. The last line is JSON.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "backends")]


def main() -> int:
    """Run the requests and print their outcomes."""
    import torch

    from scripts.bench.cuda.stress import stress
    from tests.support import tiny_models
    from tests.support.tiny_engine_core import tiny_runner

    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.save(tiny_models.reference("qwen2"), Path(folder))
        runner = tiny_runner(Path(folder), blocks=9, slots=6, context=256, step=48)
        print(json.dumps(stress(runner, count, seed)))
        runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
