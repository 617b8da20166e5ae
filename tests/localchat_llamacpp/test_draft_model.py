"""Drafts of a draft model: the same text, the same distribution, and clear errors."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localchat.errors import ModelInvalid, ModelMissing
from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.model_files.architecture import model_shape
from localchat.model_files.open_gguf import read_header
from localchat_llamacpp.draft_shape import draft_shape
from localchat_llamacpp.plan.memory_plan import plan
from tests.support.greedy import NEARLY_GREEDY
from tests.support.llamacpp_core import Core, request
from tests.support.llamacpp_driver import Start
from tests.support.llamacpp_hybrids import write_qwen35
from tests.support.llamacpp_models import VOCAB, write_chain, write_gemma3, write_llama, write_mamba

RANDOM = np.random.default_rng(8)
PROMPT = [int(token) for token in RANDOM.integers(0, VOCAB - 3, 90)]
TOKENS = 60


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "llama": write_llama(folder / "llama.gguf"),
        "other": write_llama(folder / "other.gguf", seed=77),
        "chain": write_chain(folder / "chain.gguf"),
        "qwen35": write_qwen35(folder / "qwen35.gguf"),
        "mamba": write_mamba(folder / "mamba.gguf"),
        "gemma3": write_gemma3(folder / "gemma3.gguf"),
    }


def _free_drafts(core: Core) -> None:
    """Drafts cost nothing, so that there always are some: a tiny model's own time says nothing."""
    model = core.core._draft_model
    assert model is not None
    model.token_s = model.prompt_token_s = 0.0
    model.observe = lambda *_, **__: 0.0  # type: ignore[method-assign]
    model.settle = lambda saved: None  # type: ignore[method-assign]
    model.pause = lambda: None  # type: ignore[method-assign]
    model._pause_left = 0
    model.cost.seconds = lambda rows: 1.0  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("target", "draft"),
    [("llama", "llama"), ("llama", "other"), ("chain", "llama"), ("qwen35", "llama")],
)
@pytest.mark.parametrize("temperature", [NEARLY_GREEDY, 1.0])
def test_text_is_that_without_drafts(
    start: Start, target: str, draft: str, temperature: float
) -> None:
    asked = request(PROMPT, max_tokens=TOKENS, temperature=temperature)
    core = Core(start(target, draft=draft).runner)
    _free_drafts(core)
    id_ = core.ask(asked)
    core.core.process_commands()
    seed = core.core.output_processor.requests[id_].sequences[0].sampling.seed
    core.run_until_idle()
    received = core.received[id_]
    plain = Core(start(target).runner, speculation=False)
    same = request(PROMPT, max_tokens=TOKENS, temperature=temperature, seed=seed)
    assert received.tokens == plain.say(same).tokens
    assert received.done.speculation.drafted > 0


def test_the_model_itself_as_draft_is_accepted_nearly_always(start: Start) -> None:
    core = Core(start("llama", draft="llama").runner)
    _free_drafts(core)
    for temperature in (NEARLY_GREEDY, 1.0):
        asked = request(PROMPT, max_tokens=200, temperature=temperature)
        found = core.say(asked).done.speculation
        assert found.drafted > 100
        assert found.accepted >= 0.9 * found.drafted


def test_sampled_tokens_are_distributed_as_without_drafts(start: Start) -> None:
    """The fourth token of many answers, drafted or not: a test of homogeneity over its commonest values."""
    counts = []
    for draft in ("other", None):
        core = Core(start("chain", draft=draft, slots=8, context=2048, step=256).runner)
        if draft:
            _free_drafts(core)
        found = np.zeros(VOCAB, int)
        asked = request(PROMPT[:12], max_tokens=5, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0)
        for _ in range(10):
            ids = [core.ask(asked) for _ in range(50)]
            core.run_until_idle()
            for id_ in ids:
                found[core.received[id_].tokens[3]] += 1
        counts.append(found)
    table = np.array(counts)
    common = table.sum(0) >= 10
    pooled = np.column_stack([table[:, common], table[:, ~common].sum(1)])
    pooled = pooled[:, pooled.sum(0) > 0]
    assert _deviation(pooled) < 4


def _deviation(table: NDArray[np.int64]) -> float:
    """Chi-square of two rows' homogeneity, in standard deviations (Wilson and Hilferty)."""
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    degrees = table.shape[1] - 1
    chi2 = float(((table - expected) ** 2 / expected).sum())
    mean = 1 - 2 / (9 * degrees)
    return float(((chi2 / degrees) ** (1 / 3) - mean) / np.sqrt(2 / (9 * degrees)))


def test_a_useless_draft_model_is_rarely_asked(start: Start) -> None:
    core = Core(start("chain", draft="other").runner)
    core.say(request(PROMPT, max_tokens=300, temperature=1.0))
    model = core.core._draft_model
    assert model is not None
    # Probes depend on the speed of this machine. Asked at every step, it would draft 300 tokens and more.
    assert model.drafted - model.accepted < 150


@pytest.mark.parametrize(
    ("name", "why"), [("mamba", "running state"), ("gemma3", "sliding window")]
)
def test_a_file_that_cannot_draft_is_refused(models: dict[str, Path], name: str, why: str) -> None:
    with pytest.raises(ModelInvalid, match=why) as refused:
        draft_shape(str(models[name]))
    assert "same family" in refused.value.hint


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match=r"nothing\.gguf"):
        draft_shape(str(tmp_path / "nothing.gguf"))


def test_another_vocabulary_is_refused(
    start: Start, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.llamacpp_models.CONTROL", ["<|a|>", "<|b|>", "<|c|>"])
    models["words"] = write_llama(tmp_path / "words.gguf")
    with pytest.raises(ModelInvalid, match=r"'<\|a\|>', and the model's is '<\|begin\|>'"):
        start("llama", draft="words")


def test_the_plan_counts_the_draft_model(models: dict[str, Path]) -> None:
    machine = Machine(
        cpu_name="",
        cpu_flags=frozenset(),
        cores=2,
        ram_total_bytes=8_000_000_000,
        ram_free_bytes=8_000_000_000,
    )
    shape = model_shape(read_header(models["chain"]))
    options = LoadOptions(context_tokens=1024, max_slots=4)
    with_draft = LoadOptions(context_tokens=1024, max_slots=4, draft=str(models["llama"]))
    plans = [plan(shape, one, machine, can_offload=False) for one in (options, with_draft)]
    file = models["llama"].stat().st_size
    assert plans[1].weights_bytes - plans[0].weights_bytes == pytest.approx(file, rel=0.1)
    assert plans[1].kv_bytes > plans[0].kv_bytes
