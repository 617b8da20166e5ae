"""Decodes with prediction heads on llama.cpp and without: texts, acceptance, and processor time per token.

    PYTHONPATH=.:backends python -m scripts.tools.check_heads [--layers 48] [--tokens 200] [--prompts 6]

The models have the shapes of Qwen3.5 with random weights and many small layers, so that a head of one layer is
cheap, as in a real model. An exact head agrees with its model; a random one never does, and must cost nothing.
The texts must be equal, token by token. Ten steps of each load run in turn, so that other programs slow all of
them down alike. The last line is JSON. Ends with 1 if a text differs.
"""

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from localchat.backend_api.interface import LoadRequest, Runner
from localchat.fit.load_options import LoadOptions
from localchat_llamacpp.model import GgufModel
from tests.support.greedy import NEARLY_GREEDY
from tests.support.llamacpp_core import Core, request
from tests.support.llamacpp_hybrids import write_qwen35
from tests.support.llamacpp_models import VOCAB

_PROMPT_TOKENS = 60
_CHUNK_STEPS = 10


class Result(NamedTuple):
    """Figures of one model at one temperature."""

    head: str
    temperature: float
    texts: int
    equal_texts: int
    drafted: int
    accepted: int
    tokens_per_step: float
    ms_with: float
    """Processor time per token with the head, in ms."""
    ms_ngrams: float
    """The same of a load without the head."""
    ms_plain: float
    """The same without any drafts."""


def load(path: Path, stack: ExitStack, *, head: bool) -> Runner:
    """Load a model on one thread. Close it with `stack`."""
    options = LoadOptions(
        context_tokens=1024, gpu_layers=0, threads=1, max_slots=4, speculation=head
    )
    model = GgufModel(path)
    plan = model.plan(options)
    assert plan.prediction_head is head
    wanted = LoadRequest(plan, options, safe_mode=False)
    runner = model.load(wanted, lambda _done, _total: True, lambda _note: None)
    stack.callback(runner.close)
    model.close()
    return runner


def compare(
    path: Path, head: str, temperature: float, prompts: list[list[int]], tokens: int
) -> Result:
    """Answer each prompt with the head, without it, and without any drafts."""
    with ExitStack() as stack:
        with_head = Core(load(path, stack, head=True))
        ngrams = Core(load(path, stack, head=False))
        plain = Core(load(path, stack, head=False), speculation=False)
        cores = [with_head, ngrams, plain]
        equal_texts = drafted = accepted = 0
        seconds = [0.0] * len(cores)
        # All have computed something before the clock runs.
        for core in cores:
            core.say(request(prompts[0][::-1], max_tokens=8, temperature=temperature))
        for prompt in prompts:
            asked = request(prompt, max_tokens=tokens, temperature=temperature)
            id_ = with_head.ask(asked)
            with_head.core.process_commands()
            state = with_head.core.output_processor.requests[id_]
            seed = state.sequences[0].sampling.seed
            ngrams.ask(asked)
            again = request(prompt, max_tokens=tokens, temperature=temperature, seed=seed)
            plain_id = plain.ask(again)
            while not all(core.core.idle for core in cores):
                for index, core in enumerate(cores):
                    start_s = time.process_time()
                    core.step(_CHUNK_STEPS)
                    seconds[index] += time.process_time() - start_s
            received = with_head.received[id_]
            equal_texts += received.tokens == plain.received[plain_id].tokens
            drafted += received.done.speculation.drafted
            accepted += received.done.speculation.accepted
    count = tokens * len(prompts)
    return Result(
        head,
        temperature,
        len(prompts),
        equal_texts,
        drafted,
        accepted,
        count / (count - accepted),
        *(1000 * elapsed_s / count for elapsed_s in seconds),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=6)
    options = parser.parse_args()
    random = np.random.default_rng(1)
    prompts = random.integers(0, VOCAB - 3, (options.prompts, _PROMPT_TOKENS)).tolist()
    heads: tuple[Literal["exact", "random"], ...] = ("exact", "random")
    results = []
    print(
        f"{'head':7} {'temp':>5} {'equal':>8} {'accepted':>12} {'per step':>9} "
        f"{'ms: head, n-grams, plain':>26} {'gain':>5}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for head in heads:
            scale = 0.2
            if head == "exact":
                scale = 0.005
            path = Path(folder, f"{head}.gguf")
            write_qwen35(path, head=head, scale=scale, layers=options.layers)
            for temperature in (NEARLY_GREEDY, 1.0):
                result = compare(path, head, temperature, prompts, options.tokens)
                results.append(result)
                print(
                    f"{head:7} {temperature:5.2g} {result.equal_texts:3} of {result.texts} "
                    f"{result.accepted:5} of {result.drafted:4} {result.tokens_per_step:9.2f} "
                    f"{result.ms_with:10.2f} {result.ms_ngrams:7.2f} {result.ms_plain:7.2f} "
                    f"{result.ms_ngrams / result.ms_with:5.2f}",
                    flush=True,
                )
    is_equal = all(result.equal_texts == result.texts for result in results)
    print(json.dumps({"results": [result._asdict() for result in results], "ok": is_equal}))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
