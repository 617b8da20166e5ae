"""Shared by tests: TINY, can_of, child, steps_by_chance."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

from localchat.backend_api.interface import Capabilities, LoadRequest
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat_cuda.compile_ahead.job import CompileShape
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.load import capabilities
from localchat_cuda.plan.memory_plan import kv_types
from localchat_cuda.runner.input_batch import MAX_DECODE_WIDTH
from tests.support.cuda_configs import QWEN25

ROOT = Path(__file__).parents[2]


ENVIRONMENT = {
    **os.environ,
    "TRITON_INTERPRET": "0",
    "PYTHONPATH": os.pathsep.join(
        filter(None, (str(ROOT), f"{ROOT}/backends", os.environ.get("PYTHONPATH")))
    ),
}


TINY: dict[str, Any] = {
    **QWEN25,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def can_of(
    config: ModelConfig, *, slots: int = 32, context: int = 8192, kv_type: str = ""
) -> Capabilities:
    kind = kv_type or kv_types(config)[0]
    plan = MemoryPlan("cuda", 0, 10**9, 0, 0, 0, True, context, context, kind, True, 0, 0, context)
    return capabilities(config, LoadRequest(plan, LoadOptions(max_slots=slots)))


def child(command: list[str], told: object, cache: Path | None = None) -> str:
    """Run a step in a Python process without the interpreter, and return its answer to an object."""
    environment = ENVIRONMENT | ({"TRITON_CACHE_DIR": str(cache)} if cache else {})
    done = subprocess.run(
        [sys.executable, *command], input=pickle.dumps(told), env=environment, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout.decode()


def random_shapes(count: int) -> list[CompileShape]:
    """Writers, some with drafts, and prompts, as requests come."""
    draw, found = Random(11), list[CompileShape]()
    while len(found) < count:
        most, rows = draw.choice([0, 0, 1, 3, 8, 15]), list[tuple[int, int, int]]()
        for _ in range(draw.choice([0, 0, 1, 2, 3, 5, 8, 13, 31])):
            drafts = draw.randint(0, most)
            rows.append((draw.choice([1, 40, 130, 300, 700, 2000, 7000]), 1 + drafts, drafts))
        left = draw.choice([64, 256, 512, 1024, 2000, 4000, 8000]) - sum(row[1] for row in rows)
        for _ in range(draw.choice([0, 1, 2, 3, 4, 8])):
            if len(rows) < 32 and left > MAX_DECODE_WIDTH:
                size = draw.randint(MAX_DECODE_WIDTH + 1, left)
                rows.append((draw.choice([0, 0, 64, 1000]), min(size, 8192 - 1001), 0))
                left -= size
        if rows and sum(width for _, width, _ in rows) <= 8192:
            found.append(CompileShape(tuple(rows)))
    return found
