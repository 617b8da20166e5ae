"""--head-int8: the output head rounded to 8 bits at the load."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Sampling, TextPrompt
from localchat.errors import UsageError
from localchat.fit.load_options import LoadOptions
from localchat_cuda.config.reader import parse_config, read_config
from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.kernels.fp8_int8.pack import W8
from localchat_cuda.plan import memory_plan
from localchat_cuda.plan.memory_plan import plan
from localchat_cuda.plan.weight_sizes import head_int8_bytes
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.model_weights import ModelWeights
from localchat_cuda.weights.source import CheckpointWeights
from tests.support import tiny_models
from tests.support.answers import ask
from tests.support.cuda_configs import QWEN25
from tests.support.cuda_machines import CONFIG, GB, gpu, header
from tests.support.speaking_checkpoint import write_speaking
from tests.support.tiny_models import CPU, Tiny, tokens_of


def rounded(folder: Path, dtype: torch.dtype) -> ModelWeights:
    config = read_config(folder)
    return load(config, CheckpointWeights(folder, CPU), CPU, dtype=dtype, head_int8=True)


def logs(logits: torch.Tensor, tokens: tuple[int, ...]) -> torch.Tensor:
    """Log probabilities of each token behind the first."""
    ids = torch.tensor(tokens[1:])
    return logits[:-1].float().log_softmax(-1).gather(1, ids[:, None])[:, 0]


def compute_logits(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_logprobs_are_within_the_error_of_bf16(kind: str, tmp_path: Path) -> None:
    model, tokens = tiny_models.reference(kind), tokens_of(51, 100)
    tiny_models.save(model, tmp_path)
    ours = Tiny(tmp_path, torch.float32)
    ours.weights = rounded(tmp_path, torch.float32)
    exact = logs(compute_logits(model, tokens), tokens)
    off = logs(ours.prompt(tokens, 100), tokens) - exact
    theirs = logs(compute_logits(model.bfloat16(), tokens), tokens) - exact
    assert 0 < float(off.norm()) < float(theirs.norm())


@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # with a head of its own, and tied
def test_the_embedding_stays_and_the_head_is_its_rounding(kind: str, tmp_path: Path) -> None:
    model = tiny_models.reference(kind)
    tiny_models.save(model, tmp_path)
    plain, found = Tiny(tmp_path, torch.float32).weights, rounded(tmp_path, torch.float32)
    assert torch.equal(found.embedding, plain.embedding)
    assert isinstance(found.head, W8)
    assert isinstance(plain.head, torch.Tensor)
    assert torch.equal(w8_pack.dense(found.head), w8_pack.dense(w8_pack.whole_rows(plain.head)))
    more = found.bytes - plain.bytes
    numbers = plain.head.numel()
    assert more == numbers + 4 * plain.head.shape[0] - (0 if kind == "qwen2" else 4 * numbers)


def test_kernels_of_the_head_are_its_reference(tmp_path: Path) -> None:
    model, tokens = tiny_models.reference("qwen2"), tokens_of(52, 9)
    tiny_models.save(model, tmp_path)
    ours = Tiny(tmp_path, torch.float16, kernels=True)
    ours.weights = rounded(tmp_path, torch.float16)
    model.lm_head.weight = torch.nn.Parameter(
        w8_pack.dense(w8_pack.whole_rows(model.lm_head.weight))
    )
    found, wanted = ours.prompt(tokens, 9), compute_logits(model, tokens)
    assert float((found - wanted).norm() / wanted.norm()) < 2e-2


def test_the_plan_counts_an_int8_head_and_notes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "HEAD_BOUNDS", False)
    requested, card = LoadOptions(max_slots=2, head_int8=True), gpu(140 * GB, 141 * GB)
    usual = plan(CONFIG, [header(15 * GB)], LoadOptions(max_slots=2), card)
    found = plan(CONFIG, [header(15 * GB)], requested, card)
    assert found.weights_bytes - usual.weights_bytes == head_int8_bytes(CONFIG) < 0
    assert found.notes == ("The output head is rounded to 8 bits.",)
    tied = parse_config({**QWEN25, "tie_word_embeddings": True}, "it")
    assert head_int8_bytes(tied) == CONFIG.vocabulary * (CONFIG.hidden + 4)


def test_a_head_of_other_columns_is_refused() -> None:
    odd = parse_config({**QWEN25, "hidden_size": 1792 + 64, "head_dim": 64}, "it")
    with pytest.raises(UsageError, match="1856 columns, cannot be rounded"):
        plan(odd, [header(GB)], LoadOptions(head_int8=True), gpu(20 * GB))


def test_head_int8_reaches_the_engine_process(tmp_path: Path) -> None:
    said: list[str] = []
    options = EngineOptions(
        load=LoadOptions(context_tokens=128, max_slots=1, head_int8=True),
        model=write_speaking(tmp_path),
        backend="localchat_cuda.backend:ReferenceBackend",
    )
    with closing(LocalEngine(options, notify=said.append)) as engine:
        sampling = Sampling(temperature=0)
        answer = ask(engine, GenerateRequest(TextPrompt("hello"), sampling=sampling, max_tokens=4))
    assert answer.text
    assert "The output head is rounded to 8 bits." in said
