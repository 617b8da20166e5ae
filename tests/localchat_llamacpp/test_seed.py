"""A seed means the same text: bit for bit, whatever steps are measured to cost."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Form
from gguf.quants import quantize
from numpy.typing import NDArray

from localchat.backend_api.interface import LoadRequest, Runner
from localchat.engine.events import Text, TokenLogprob
from localchat.fit.load_options import LoadOptions
from localchat_llamacpp.model import GgufModel
from tests.support.llamacpp_core import Core, request
from tests.support.llamacpp_models import (
    CYCLE,
    ModelWriter,
    byte_letters,
    vocabulary,
    write_chain,
)

LETTERS = byte_letters()
PROMPT = [vocabulary().index(LETTERS[ord(character)]) for character in CYCLE * 2]


class Loader:
    """Opens models, and closes them after the test."""

    def __init__(self) -> None:
        self._runners: list[Runner] = []

    def __call__(self, path: Path, kv_type: str = "f16") -> Runner:
        model = GgufModel(path)
        options = LoadOptions(
            context_tokens=1024, kv_type=kv_type, gpu_layers=0, threads=1, max_slots=4
        )
        asked = LoadRequest(model.plan(options), options, safe_mode=True)
        self._runners.append(model.load(asked, lambda _done, _total: True, lambda _note: None))
        model.close()
        return self._runners[-1]

    def close(self) -> None:
        for runner in self._runners:
            runner.close()


@pytest.fixture
def load() -> Iterator[Loader]:
    loader = Loader()
    yield loader
    loader.close()


def _say(runner: Runner, power: int, n: int) -> tuple[list[TokenLogprob], int]:
    """The tokens of an answer, and how many were drafted, where steps take this power of their rows."""
    core = Core(runner)
    for rows in (1, 4, 16):
        core.core._step_costs.observe(rows, rows**power)
    core.core._step_costs.observe = lambda *_: None  # type: ignore[method-assign]
    received = core.say(request(PROMPT, max_tokens=150, temperature=1.0, seed=7, n=n))
    texts = [event for event in received.events if isinstance(event, Text)]
    tokens = [
        one
        for choice in range(n)
        for text in texts
        if text.choice == choice
        for one in text.logprobs
    ]
    assert len(tokens) == 150 * n
    return tokens, received.done.speculation.drafted


@pytest.mark.parametrize("form", [Form.F32, Form.F16, Form.Q8_0, Form.Q4_0])
@pytest.mark.parametrize(("kv_type", "n"), [("f16", 1), ("q8_0", 1), ("f16", 3)])
def test_a_seed_gives_the_same_bits_whatever_steps_cost(
    load: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Form, kv_type: str, n: int
) -> None:
    def tensor(self: ModelWriter, name: str, values: NDArray[np.float64]) -> None:
        chosen = form if values.ndim == 2 else Form.F32
        self.gguf.add_tensor(name, quantize(values.astype(np.float32), chosen), raw_dtype=chosen)

    monkeypatch.setattr(ModelWriter, "tensor", tensor)
    path = write_chain(tmp_path / "chain.gguf")
    (cheap, drafted), dear = (_say(load(path, kv_type), power, n) for power in (0, 2))
    assert drafted == 0
    assert (cheap, drafted) == dear


@pytest.mark.parametrize("form", [Form.F16, Form.Q8_0, Form.Q4_0])
def test_the_next_turn_has_the_same_bits_behind_a_recomputed_answer(
    load: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    def tensor(self: ModelWriter, name: str, values: NDArray[np.float64]) -> None:
        chosen = form if values.ndim == 2 else Form.F32
        self.gguf.add_tensor(name, quantize(values.astype(np.float32), chosen), raw_dtype=chosen)

    monkeypatch.setattr(ModelWriter, "tensor", tensor)
    path = write_chain(tmp_path / "chain.gguf")
    core = Core(load(path))
    first = core.say(request(PROMPT, max_tokens=150, temperature=1.0, seed=7))
    chunks = 0
    while core.core._answer_kv.compute_next():
        chunks += 1
    text = [*PROMPT, *first.tokens]
    following = request([*text, *PROMPT], max_tokens=40, temperature=1.0, seed=7)
    second = core.say(following)
    assert chunks
    assert second.done.usage.cached_tokens == len(text) // 64 * 64
    fresh = Core(load(path)).say(following)
    assert second.tokens == fresh.tokens
    assert [event for event in second.events if isinstance(event, Text)] == [
        event for event in fresh.events if isinstance(event, Text)
    ]
