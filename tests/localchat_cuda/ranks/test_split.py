"""A model divided among ranks: logits are those of one rank, and what cannot be divided is refused.

All families and formats: scripts/tools/check_ranks.py."""

from pathlib import Path
from typing import Any

import pytest
import torch

from localchat.errors import LocalchatError, ModelInvalid, UsageError
from localchat_cuda.config.reader import read_config
from localchat_cuda.ranks.split import possible_ranks, split_config
from localchat_cuda.weights.source import CheckpointWeights
from tests.support import int4_reference, quantizers, tiny_models
from tests.support.fp8_checkpoints import save_fp8
from tests.support.quantizers import Way
from tests.support.rank_cases import FAMILIES, FORMATS, RankCase, distances, save_case
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_models import Tiny, tokens_of

SHOWN_FAMILIES = (
    *("llama", "gemma4-moe", "phi3", "deepseek-v2", "olmo2", "gpt-oss"),
    *("granite4-h-moe", "qwen3.5-moe"),
)
SHOWN_FORMATS = (
    *("awq", "gptq 8 bits", "compressed", "int8", "fp8 deepseek", "rounded int4", "mxfp4"),
    *("nvfp4", "nvfp4 modelopt", "mxfp8"),
)


@pytest.mark.parametrize("kind", SHOWN_FAMILIES)
def test_logits_of_a_family_on_two_ranks_are_those_of_one(kind: str, tmp_path: Path) -> None:
    found = distances(FAMILIES[kind], tmp_path, ranks=2)
    assert max(found) < 1e-5


@pytest.mark.parametrize("stored", SHOWN_FORMATS)
def test_logits_of_a_format_on_two_ranks_are_those_of_one(stored: str, tmp_path: Path) -> None:
    case = FORMATS[stored]
    assert max(distances(case, tmp_path, ranks=2)) < case.near


def test_key_heads_are_copied_where_ranks_outnumber_them(tmp_path: Path) -> None:
    case = RankCase("llama", {"num_attention_heads": 8, "num_key_value_heads": 2})
    assert max(distances(case, tmp_path, ranks=4)) < 1e-5


def test_a_vocabulary_that_ranks_do_not_divide_is_padded(tmp_path: Path) -> None:
    heads = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3}
    case = RankCase("llama", {"vocab_size": 161, "intermediate_size": 96, **heads})
    assert max(distances(case, tmp_path, ranks=3)) < 1e-5


def test_packed_steps_and_fp8_keys_are_divided_too(tmp_path: Path) -> None:
    rounded = save_case(FORMATS["awq"], tmp_path)
    tokens = tokens_of(31, 40)

    def logits(**how: Any) -> torch.Tensor:
        tiny = Tiny(tmp_path, torch.float32, rounded=rounded, fp8_kv=True, **how)
        return tiny.prompt(tokens, 17, packed=True)

    with int4_reference.in_place_of_kernels():
        whole = logits()
        for part in on_ranks(2, lambda collective: logits(collective=collective)):
            assert float((part - whole).norm() / whole.norm()) < 3e-2


@pytest.mark.parametrize(
    ("kind", "changes", "ranks", "why"),
    [
        ("llama", {}, 3, "3 does not divide its 4 query heads"),
        (
            "llama",
            {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 6},
            4,
            "6 query heads",
        ),
        (
            "llama",
            {"hidden_size": 192, "num_attention_heads": 12, "num_key_value_heads": 6},
            4,
            "6 key heads",
        ),
        ("llama", {"intermediate_size": 144}, 2, "144 columns"),
        ("llama", {}, 9, "1 to 8 GPUs"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_with_the_possible_numbers(
    kind: str, changes: dict[str, Any], ranks: int, why: str, tmp_path: Path
) -> None:
    tiny_models.save(tiny_models.reference(kind, **changes), tmp_path)
    config = read_config(tmp_path)
    with pytest.raises(UsageError, match=why) as caught:
        split_config(config, ranks, "The model")
    possible = possible_ranks(config)
    assert ranks not in possible
    for number in possible[1:]:
        assert str(number) in caught.value.hint
        assert split_config(config, number, "The model").ranks == number


def test_scattered_groups_are_refused(tmp_path: Path) -> None:
    model = tiny_models.reference("llama", hidden_size=256, intermediate_size=512)
    quantizers.save(model, tmp_path, Way(ordered=True), 2)
    with pytest.raises(UsageError, match="act-order"):
        split_config(read_config(tmp_path), 2, "The model")


def test_a_part_that_ends_inside_a_block_of_scales_is_refused(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_models.reference("phi3", hidden_size=256, intermediate_size=512, **heads)
    save_fp8(model, tmp_path, "deepseek")
    with pytest.raises(ModelInvalid, match="ends inside a group"):
        on_ranks(2, lambda collective: Tiny(tmp_path, torch.float32, collective=collective))


class _Counting(CheckpointWeights):
    """Counts the bytes of tensors that are in memory after a read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, torch.device("cpu"))
        self.bytes = 0

    def tensor(self, *asked: Any, **how: Any) -> torch.Tensor:
        found = super().tensor(*asked, **how)
        self.bytes += found.nbytes
        return found


def test_a_rank_reads_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.save(tiny_models.reference("llama"), tmp_path)
    sources: list[_Counting] = []

    def counting(folder: Path, device: torch.device) -> _Counting:
        sources.append(_Counting(folder))
        return sources[-1]

    monkeypatch.setattr(tiny_models, "CheckpointWeights", counting)
    Tiny(tmp_path, torch.float32)
    on_ranks(2, lambda collective: Tiny(tmp_path, torch.float32, collective=collective))
    whole, *parts = (source.bytes for source in sources if source.bytes)
    assert len(parts) == 2
    for part in parts:
        # Norms are whole.
        assert 0.5 < part / whole < 0.51


def test_a_damaged_tensor_is_reported_with_its_whole_shape(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("llama"), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        path.read_text().replace('"intermediate_size": 256', '"intermediate_size": 512')
    )
    with pytest.raises(LocalchatError, match=r"\(256, 128\), but config.json implies \(512, 128\)"):
        on_ranks(2, lambda collective: Tiny(tmp_path, torch.float32, collective=collective))
