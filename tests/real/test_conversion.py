"""Checkpoints converted to GGUF, and LoRA adapters, on real weights."""

import copy
import random
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch

from localchat.engine.local.engine import LocalEngine
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling, TokenIds
from localchat.fit.load_options import LoraAdapter
from localchat.model_files.open_gguf import read_header
from localchat_cuda.gguf_tokenizer import ARRAYS, tokenizer_files
from localchat_llamacpp.quantize import GgufQuantizer
from tests.real.conftest import (
    GEMMA,
    SMOLLM2,
    OpenEngine,
    SaveCheckpoint,
    load_reference,
    model_path,
)
from tests.support.answers import Answer, ask
from tests.support.peft_folders import MODULES, merge, write_peft
from tests.support.transformers_reference import TransformersReference

QUESTIONS = ("What is the capital of France?", "Write a haiku about rain.")
TEXT = "The river rises in a narrow valley and reaches the sea after two hundred miles."
WEIGHT_OF_RANDOM_ADAPTER = 0.1
LARGEST_DIFFERENCE = 0.001
"""Largest difference of a log probability with weights and KV in float32."""


class Converted:
    """A real model as a checkpoint, converted back to F16."""

    def __init__(self, name: str, saved: Path, folder: Path) -> None:
        self.original = model_path(name)
        self.reference = load_reference(name)
        checkpoint = folder / "checkpoint"
        checkpoint.mkdir()
        for file in saved.iterdir():
            (checkpoint / file.name).symlink_to(file)
        # transformers does not restore the steps that split a text.
        files = tokenizer_files(read_header(self.original, ARRAYS))
        (checkpoint / "tokenizer.json").unlink()
        (checkpoint / "tokenizer.json").write_text(files.text)
        self.path = write(checkpoint, folder / "converted.gguf")

    def merged(self, adapter: Path) -> TransformersReference:
        """Return the model in transformers with an adapter in its weights."""
        merged = copy.copy(self.reference)
        merged.model = copy.deepcopy(self.reference.model)
        merge(merged.model, adapter, WEIGHT_OF_RANDOM_ADAPTER)
        return merged


def write(source: Path, target: Path) -> Path:
    GgufQuantizer().write(source, target, "F16", 2, lambda done, total: None)
    return target


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA])
def converted(
    request: pytest.FixtureRequest,
    save_checkpoint: SaveCheckpoint,
    tmp_path_factory: pytest.TempPathFactory,
) -> Converted:
    saved = save_checkpoint(request.param)
    return Converted(request.param, saved, tmp_path_factory.mktemp("converted"))


def texts() -> list[str]:
    """Return 200 texts: words, and letters of many scripts."""
    chance = random.Random(3)
    words = Path("README.md").read_text("utf-8").split()
    scripts = [
        *range(32, 127),
        *range(0xA0, 0x250),
        *range(0x400, 0x460),
        *range(0x4E00, 0x4E80),
        10,
        9,
    ]
    many = [" ".join(chance.choices(words, k=12)) for _ in range(120)]
    return many + ["".join(map(chr, chance.choices(scripts, k=40))) for _ in range(80)]


def worst(answer: Answer, expected: Any) -> float:
    """Return the largest difference of a log probability of the prompt."""
    return max(
        abs(value - float(expected[place, token]))
        for place, entry in enumerate(answer.prompt_logprobs)
        for token, _, value in entry.top
    )


def greedy(engine: LocalEngine) -> list[str]:
    prompts = [Messages((Message("user", question),)) for question in QUESTIONS]
    sampling = Sampling(temperature=0)
    return [
        ask(engine, GenerateRequest(prompt, sampling=sampling, max_tokens=12)).text
        for prompt in prompts
    ]


def test_a_checkpoint_becomes_the_file_that_it_came_from(
    converted: Converted, open_engine: OpenEngine, tmp_path: Path
) -> None:
    before = gguf.GGUFReader(converted.original)
    after = gguf.GGUFReader(converted.path)
    tensors = {tensor.name: tensor for tensor in before.tensors}
    assert tensors.keys() == {tensor.name for tensor in after.tensors}
    for tensor in after.tensors:
        other = tensors[tensor.name]
        expected = gguf.quants.dequantize(other.data, other.tensor_type)
        if tensor.tensor_type == gguf.GGMLQuantizationType.F16:
            expected = expected.astype(np.float16).astype(np.float32)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        # Norms of Gemma lose bits, because transformers stores them without the 1 that it adds.
        assert np.abs(values - expected).max() <= 1e-6, tensor.name
    architecture = read_header(converted.original).architecture
    for key, field in before.fields.items():
        if key.startswith((f"{architecture}.", "tokenizer.ggml.bos", "tokenizer.ggml.eos")):
            assert after.fields[key].contents() == pytest.approx(field.contents()), key
    engine = open_engine(converted.path, context_tokens=512)
    original = open_engine(converted.original, context_tokens=512)
    for text in texts():
        assert engine.tokenize(text) == original.tokenize(text)
    if converted.original.name == SMOLLM2:
        direct = open_engine(write(converted.original, tmp_path / "f16.gguf"), context_tokens=512)
        assert greedy(engine) == greedy(direct)


def test_an_adapter_gives_the_logits_of_merged_weights_and_leaves_no_trace(
    converted: Converted, open_engine: OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALCHAT_DATA_DIR", str(tmp_path / "data"))
    model = converted.reference.model
    folder = write_peft(tmp_path / "adapter", model, lora_alpha=4 * WEIGHT_OF_RANDOM_ADAPTER)
    plain = open_engine(converted.path, context_tokens=512)
    tokens = plain.tokenize(TEXT)
    request = GenerateRequest(
        TokenIds(tuple(tokens)),
        sampling=Sampling(temperature=0, repetition_penalty=1.0),
        max_tokens=24,
        prompt_logprobs=20,
        ignore_eos=True,
    )
    base = ask(plain, request)
    engine = open_engine(converted.path, context_tokens=512, lora=(LoraAdapter(str(folder)),))
    adapted = ask(engine, request)
    expected = converted.merged(folder).logprobs(tokens)
    differences = [
        abs(value - float(expected[place, token]))
        for place, entry in enumerate(adapted.prompt_logprobs)
        for token, _, value in entry.top
    ]
    # The weights are in F16, and llama.cpp rounds the activations, too.
    assert np.mean(differences) < 0.02
    assert adapted.text != base.text
    for lora in (), ((0, 0.0),):
        assert ask(engine, msgspec.structs.replace(request, lora=lora)).text == base.text


# Of names that PEFT uses and transformers has deprecated.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_smollm2_with_an_adapter_of_peft_has_its_logits_and_without_it_the_text_of_the_base(
    save_checkpoint: SaveCheckpoint,
    open_engine: OpenEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peft = pytest.importorskip("peft")
    monkeypatch.setenv("LOCALCHAT_DATA_DIR", str(tmp_path / "data"))
    model = copy.deepcopy(load_reference(SMOLLM2).model)
    torch.manual_seed(4)
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=list(MODULES), init_lora_weights=False
    )
    adapted = copy.copy(load_reference(SMOLLM2))
    adapted.model = peft.get_peft_model(model, config).eval()
    adapted.model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    path = tmp_path / "f32.gguf"
    GgufQuantizer().write(model_path(SMOLLM2), path, "F32", 2, lambda done, total: None)
    options = {"context_tokens": 512, "kv_type": "f32"}
    plain = open_engine(path, **options)
    engine = open_engine(path, **options, lora=(LoraAdapter(str(tmp_path / "adapter")),))
    tokens = plain.tokenize(TEXT)
    request = GenerateRequest(
        TokenIds(tuple(tokens)),
        sampling=Sampling(temperature=0, repetition_penalty=1.0),
        max_tokens=24,
        logprobs=0,
        prompt_logprobs=20,
        ignore_eos=True,
    )
    received = ask(engine, request)
    with_adapter = adapted.logprobs(tokens)
    assert worst(received, with_adapter) < LARGEST_DIFFERENCE
    text = adapted.model.generate(
        input_ids=torch.tensor([tokens]), max_new_tokens=24, do_sample=False, min_new_tokens=24
    )
    answer = [entry.token for entry in received.logprobs]
    assert answer == text[0, len(tokens) :].tolist()
    adapted.model = adapted.model.unload()
    without_adapter = adapted.logprobs(tokens)
    assert abs(with_adapter - without_adapter).max() > 1, "the adapter changes too little"
    unloaded = ask(engine, msgspec.structs.replace(request, lora=()))
    assert worst(unloaded, without_adapter) < LARGEST_DIFFERENCE
    assert unloaded.text == ask(plain, request).text != received.text
