"""The network that is trained, the GGUF made from it and the checkpoints made from that compute the
same.
"""

import json
from pathlib import Path

import awq
import checkpoint
import gguf
import numpy as np
import pytest
import torch
from export import write_gguf
from llama_text import LlamaText
from model import Guide, Shape
from tokens import train_tokenizer

IDS = [1, 40, 200, 210, 90, 7, 150, 2, 55, 120, 44, 31]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Guide]:
    """A random network, exact in fp16, with its GGUF in F16."""
    torch.manual_seed(0)
    coder = train_tokenizer([f"word{n} list {n * 7} of pull fit" for n in range(400)])
    model = Guide(
        Shape(coder.get_vocab_size(), width=128, layers=2, heads=2, kv_heads=1, inner=256)
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p + 0.05 * torch.randn_like(p)).half().float())
    path = tmp_path_factory.mktemp("guide") / "tiny.gguf"
    weights = {k: p.detach().numpy() for k, p in model.named_parameters()}
    write_gguf(weights, json.loads(coder.to_str()), path, "F16")
    return path, model


def logprobs(model: Guide) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    with torch.no_grad():
        logs = torch.log_softmax(model(torch.tensor([IDS]))[0], -1)
    return np.asarray(logs[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])])


def test_llama_cpp_computes_what_the_trained_network_computes(tiny: tuple[Path, Guide]) -> None:
    path, model = tiny
    assert (
        np.abs(LlamaText(path, context=64, threads=1).logprobs(IDS) - logprobs(model)).max() < 5e-3
    )


def test_weights_come_back_from_the_gguf(tiny: tuple[Path, Guide]) -> None:
    path, model = tiny
    weights, _ = checkpoint.read_gguf(path)
    for name, p in model.named_parameters():
        assert np.array_equal(weights[name], p.detach().numpy()), name


def test_the_file_asks_for_greedy_answers(tiny: tuple[Path, Guide]) -> None:
    field = gguf.GGUFReader(tiny[0]).fields["general.sampling.temp"]
    assert field.contents() == 0


def test_transformers_reads_the_checkpoint_and_agrees(
    tiny: tuple[Path, Guide], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    path, model = tiny
    weights, tokenizer = checkpoint.read_gguf(path)
    tensors = {checkpoint.hub_name(k): v for k, v in weights.items()}
    checkpoint.write_folder(tmp_path, tensors, checkpoint.config(weights, "float32"), tokenizer)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.allclose(
            other(torch.tensor([IDS])).logits, model(torch.tensor([IDS])), atol=1e-4
        )


def test_rounding_is_exact_at_the_borders_and_close_between() -> None:
    weight = torch.linspace(-1, 1, 256).view(1, 256)
    levels, scales, zeros = awq.round_groups(weight)
    assert (int(levels.min()), int(levels.max())) == (0, 15)
    assert (awq.restored(levels, scales, zeros) - weight).abs().max() <= scales.max() * 0.51


def test_eight_integers_stand_in_the_order_of_autoawq() -> None:
    word = int(awq.packed(torch.arange(8, dtype=torch.int32).view(1, 8)).view(np.uint32)[0, 0])
    assert [(word >> (4 * n)) & 15 for n in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_scaling_keeps_the_function_and_rounding_stays_near(tiny: tuple[Path, Guide]) -> None:
    path, model = tiny
    weights, _ = checkpoint.read_gguf(path)
    rounded = awq.scale_and_round(
        weights, torch.randint(7, 250, (2, 64), generator=torch.Generator().manual_seed(1))
    )
    scaled = Guide(model.shape).eval()
    scaled.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in weights.items()})
    assert np.abs(logprobs(scaled) - logprobs(model)).max() < 1e-3
    tensors = awq.tensors_of(weights, rounded)
    front = "model.layers.0.mlp.down_proj"
    assert tensors[f"{front}.qweight"].shape == (256, 16)
    assert tensors[f"{front}.qzeros"].shape == (2, 16)
    assert tensors[f"{front}.scales"].shape == (2, 128)
