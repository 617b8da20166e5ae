"""KL per token (nats) of the built-in guide with 8-bit weights, over its own answer. Found when this was
written: an 8-bit head 5e-6 (one of e4m3 9e-5), FP8 layers 3e-4, with activations in FP8 too 6e-4."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jinja2
import pytest
import torch

from localchat.model_files.chat_templates import chat_templates
from localchat_cuda.kernels import fp8_int8
from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.kernels.fp8_int8.pack import W8
from localchat_cuda.tokenizer import CheckpointTokenizer
from localchat_cuda.weights.formats.weight import Weight
from localchat_cuda.weights.model_weights import ModelWeights
from tests.support import fp8_reference
from tests.support.tiny_models import Stretch, Tiny

ROOT = Path(__file__).parents[2]
LENGTH = 60
Make = Callable[[torch.Tensor], W8]


class Guide(NamedTuple):
    """The model, its weights as they are, a question with its answer, and what the model thinks of each
    token."""

    model: Tiny
    weights: ModelWeights
    tokens: tuple[int, ...]
    exact: torch.Tensor

    def divergence(self, weights: ModelWeights) -> float:
        """KL per token from the exact model."""
        self.model.weights = weights
        found = self.model.prompt(self.tokens, 256).log_softmax(-1)
        return float((self.exact.exp() * (self.exact - found)).sum(-1).mean())


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Guide:
    if not (ROOT / "localchat" / "guide" / "guide.gguf").is_file():
        pytest.skip("this checkout has no guide")
    folder = tmp_path_factory.mktemp("guide")
    script = ROOT / "scripts" / "tools" / "guide" / "checkpoint.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    model = Tiny(folder, torch.float32)
    vocabulary = CheckpointTokenizer(folder, model.config.vocabulary)
    turns = [{"role": "user", "content": "What does KV cache mean?"}]
    template = jinja2.Template(chat_templates(folder).get("default", ""))
    text = template.render(messages=turns, add_generation_prompt=True, bos_token="")
    known = vocabulary.encode(text, special=True)
    logits = model.prompt(known, 256)
    for _ in range(LENGTH):
        known.append(int(logits[-1].argmax()))
        if known[-1] in vocabulary.eog:
            break
        logits = model.step(Stretch(0, len(known) - 1, (known[-1],)))
    return Guide(model, model.weights, tuple(known), model.prompt(known, 256).log_softmax(-1))


def with_layers(weights: ModelWeights, make: Make) -> ModelWeights:
    def rounded(weight: Weight) -> W8:
        assert isinstance(weight, torch.Tensor)
        return make(weight)

    layers = (
        replace(layer, linears={name: rounded(one) for name, one in layer.linears.items()})
        for layer in weights.layers
    )
    return replace(weights, layers=tuple(layers))


@pytest.mark.parametrize("make", [w8_pack.e4m3_rows, fp8_reference.e4m3_blocks])
def test_fp8_layers_cost_little_and_so_do_fp8_activations(
    make: Make, guide: Guide, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = with_layers(guide.weights, make)
    weights_alone = guide.divergence(layers)
    assert 0 < weights_alone < 2e-3

    def both(x: torch.Tensor, weight: W8, **_: object) -> torch.Tensor:
        return fp8_reference.gemm(x, weight)[None]

    monkeypatch.setattr(fp8_int8, "gemm", both)
    together = guide.divergence(layers)
    assert together != weights_alone, "the activations were rounded, too"
    assert 0 < together < 4e-3
