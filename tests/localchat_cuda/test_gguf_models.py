"""Tiny GGUF models of every architecture and form: log probabilities as llama.cpp's on the same file, and as
transformers' in fp32 on the dequantized weights."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from localchat.backend_api.interface import Backend, LoadRequest
from localchat.fit.load_options import LoadOptions
from localchat.model_files.ggml_types import NUMBER_FORMATS
from localchat.model_files.open_gguf import read_header
from localchat_cuda.backend import ReferenceBackend
from localchat_cuda.config.gguf import checkpoint_names, config_of
from localchat_cuda.weights.gguf_source import GgufWeights
from localchat_llamacpp import LlamaCppBackend
from tests.support.ggml_blocks import random_rows
from tests.support.gguf_files import ARCHITECTURES, Size, Tensor
from tests.support.llamacpp_core import Core, request
from tests.support.tiny_models import CPU

SIZE = Size(
    width=256, heads=4, kv_heads=2, head_width=64, feed_forward=512, window=16,
    extra={"tokenizer.ggml.pre": "gpt-2"},
)  # fmt: skip
TOKENS = tuple(int(each) for each in np.random.default_rng(3).integers(0, 250, 48))
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}
IN_BF16 = ("gemma2", "gemma3")
_OF_SIZE_ONE = {"Q4_0": 7.6, "Q4_1": 12.0, "Q5_0": 15.2, "Q5_1": 24.0, "Q8_0": 74.0, "Q2_K": 20.0,
                "Q3_K": 110.0, "Q4_K": 440.0, "Q5_K": 300.0, "Q6_K": 1370.0, "IQ4_NL": 70.0,
                "IQ4_XS": 2300.0}  # fmt: skip
"""Roughly the deviation of numbers in random blocks whose scale is 1."""


def write(path: Path, architecture: str, form: str) -> Path:
    """A model whose matrices are in a form."""
    # Every sixth layer of a Gemma 3 has no window, every fourth of a SmolLM3 no rotations.
    layers = {"gemma3": 7, "smollm3": 5}.get(architecture, 2)
    code = next(code for code, each in NUMBER_FORMATS.items() if each.name == form)
    model = ARCHITECTURES[architecture](replace(SIZE, layers=layers, code=code))
    return model.write(path, 7, drawn)


def drawn(tensor: Tensor, draw: np.random.Generator) -> bytes:
    """Of norms numbers around 1, of all others around 0."""
    shape, form = tensor.shape[::-1], NUMBER_FORMATS[tensor.code].name
    if form in _OF_SIZE_ONE:
        rows, columns = shape
        size = 0.05 / _OF_SIZE_ONE[form]
        return random_rows(form, rows, columns, draw, size=size).tobytes()
    numbers = draw.normal(float(tensor.name.endswith("norm.weight")), 0.05, shape)
    return numbers.astype(np.float16 if form == "F16" else np.float32).tobytes()


def logprobs(path: Path, backend: Backend) -> list[float]:
    """Return log probabilities of the prompt's tokens, computed in this process."""
    load = LoadOptions(context_tokens=256, threads=1, max_slots=1)
    model = backend.open(path, lambda text: None)
    # Some builds of llama.cpp crash on a CPU with AMX unless they load in safe mode. On the CUDA backend it
    # would stay on for this process.
    wish = LoadRequest(model.plan(load), load, safe_mode=isinstance(backend, LlamaCppBackend))
    runner = model.load(wish, lambda done, total: True, print)
    with closing(model), closing(runner):
        asked = request(TOKENS, temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        answer = Core(runner, speculation=False).say(asked)
    return [entry.logprob for entry in answer.prompt_logprobs]


def exact_logprobs(path: Path, architecture: str) -> list[float]:
    """By transformers in fp32, on what the blocks say."""
    header = read_header(path)
    raw = {key: value for key, value in config_of(header).items() if key != "quantization_config"}
    make, model_class = MODELS[architecture]
    if architecture in IN_BF16:
        raw |= {"rope_local_base_freq": 10000.0, "attn_implementation": "eager"}
    raw |= {"torch_dtype": "float32", "pad_token_id": None}
    model: PreTrainedModel = model_class(make(**raw)).eval().float()
    source, names = GgufWeights(header, CPU), checkpoint_names(header)
    state = {
        name: source.tensor(name, each.shape[::-1], torch.float32) for name, each in names.items()
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return [float(logits[at, token]) for at, token in enumerate(TOKENS[1:])]


@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        *((name, form) for name in MODELS for form in ("F32", "Q4_K")),
        *(("llama", form) for form in ("F16", "Q8_0")),
        *(("qwen2", form) for form in _OF_SIZE_ONE if form != "Q4_K"),
    ],
)
def test_a_model_is_as_sure_of_each_token_as_elsewhere(
    tmp_path: Path, architecture: str, form: str
) -> None:
    path = write(tmp_path / "tiny.gguf", architecture, form)
    ours, exact = logprobs(path, ReferenceBackend()), exact_logprobs(path, architecture)
    theirs = logprobs(path, LlamaCppBackend())
    assert len(ours) == len(theirs) == len(exact) == len(TOKENS) - 1
    spread = np.std(exact)
    assert spread > 0.3  # it tells tokens apart
    off, theirs_off = (np.abs(np.subtract(each, exact)) for each in (ours, theirs))
    told = f"{off.max()=}, {theirs_off.max()=}, {spread=}"
    assert off.max() < (0.05 if architecture in IN_BF16 else 0.01), told
    assert theirs_off.max() < 0.2, told  # it rounds activations to 8 bits
