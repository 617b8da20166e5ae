"""Random requests against a runner with few pages."""

import random

from localchat.engine.request import GenerateRequest, Sampling, TokenIds
from localchat.errors import ContextExceeded
from localchat_cuda.runner.runner import CudaRunner
from tests.support.tiny_engine_core import TinyLoop
from tests.support.tiny_models import VOCABULARY

_TEXTS = 12
_BUSY = 10


def stress(runner: CudaRunner, requests: int, seed: int) -> dict[str, int]:
    """Outcomes of `requests` random requests, and the number of preemptions. Raises AssertionError if
    the page counts are wrong or something is left over.
    """
    draw = random.Random(seed)
    loop = TinyLoop(runner)
    context = runner.capabilities.context_tokens
    texts = [[draw.randrange(VOCABULARY) for _ in range(context)] for _ in range(_TEXTS)]
    results = {"answered": 0, "cancelled": 0, "refused": 0}
    cancelled: set[int] = set()
    asked: list[int] = []
    for _ in range(requests):
        try:
            asked.append(loop.ask(_request(draw, texts, context)))
        except ContextExceeded:
            results["refused"] += 1
        for _ in range(draw.randrange(4)):
            loop.step()
        open_ = [i for i in asked if i not in cancelled and not _ended(loop, i)]
        if open_ and draw.random() < 0.15:
            victim = draw.choice(open_)
            loop.core.cancel(victim)
            cancelled.add(victim)
        while len([i for i in open_ if not _ended(loop, i)]) > _BUSY:
            loop.step()
    loop.run_until_idle()
    for id_ in asked:
        error = loop.received[id_].error
        assert error is None, error
    results["cancelled"] = len(cancelled)
    results["answered"] = len(asked) - len(cancelled)
    return results | {"preemptions": loop.core.stats().preemptions}


def _request(draw: random.Random, texts: list[list[int]], context: int) -> GenerateRequest:
    length = context + draw.randrange(9) if draw.random() < 0.08 else draw.randint(1, context // 2)
    text = draw.choice(texts) + [1] * 16
    sampling = Sampling(
        temperature=draw.choice([0.0, 0.8]),
        top_k=draw.choice([0, 5]),
        repetition_penalty=draw.choice([1.0, 1.2]),
        seed=draw.choice([None, 7]),
    )
    return GenerateRequest(
        TokenIds(tuple(text[:length])),
        sampling=sampling,
        n=draw.choice([1, 1, 1, 2, 3]),
        max_tokens=draw.randint(1, 40),
        logprobs=draw.choice([None, None, 2]),
        prompt_logprobs=draw.choice([None, None, None, 1]),
        priority=draw.choice([0, 0, 1]),
        salt=draw.choice(["", "", "other"]),
        ignore_eos=True,
    )


def _ended(loop: TinyLoop, id_: int) -> bool:
    results = loop.received[id_]
    return results.error is not None or type(results.events[-1]).__name__ == "Done"
