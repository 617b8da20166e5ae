"""Rotations against transformers' own tables of frequencies."""

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from localchat.errors import ModelInvalid
from localchat_cuda.config.fields import ConfigFields
from localchat_cuda.config.rope import LongRopeScaling, Rotation, read_rotations
from localchat_cuda.kernels import rope

FACTORS = {
    "short_factor": [1.0 + i / 30 for i in range(48)],
    "long_factor": [2.0 + i for i in range(48)],
}
SCALINGS: dict[str, dict[str, Any]] = {
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "linear": {"factor": 8.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn of fractions": {
        "factor": 3.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "longrope": {
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        **FACTORS,
    },
}


def fields(**raw: Any) -> ConfigFields:
    return ConfigFields(raw, "it", "otherwise")


@pytest.mark.parametrize("context", [4096, 4097])
@pytest.mark.parametrize("name", sorted(SCALINGS))
def test_frequencies_and_magnitudes_are_those_of_transformers(name: str, context: int) -> None:
    kind, trained = name.split()[0], 131072
    held = {"rope_type": kind, "rope_theta": 5e5, **SCALINGS[name]}
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=1, head_dim=128, max_position_embeddings=trained,
        rope_parameters=held,
    )  # fmt: skip
    wanted, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=context)
    found = read_rotations(fields(rope_parameters=held), 128, trained)
    radians = torch.tensor(found.all.radians(128, context))
    assert torch.allclose(radians, wanted, rtol=1e-5)
    assert found.all.magnitude == pytest.approx(magnitude)
    assert found.windowed is None


def test_older_spellings_mean_the_same() -> None:
    scaling = {"type": "su", "short_factor": FACTORS["short_factor"], "long_factor": [3.0] * 48}
    found = read_rotations(
        fields(
            rope_theta=1e4, rope_scaling=scaling, partial_rotary_factor=0.75,
            original_max_position_embeddings=4096,
        ),
        128, 131072,
    ).all  # fmt: skip
    assert found.columns == 96
    assert isinstance(found.scaling, LongRopeScaling)
    assert found.scaling.original_context == 4096
    assert found.scaling.long == (3.0,) * 48
    gemma = read_rotations(
        fields(
            rope_theta=1e6, rope_local_base_freq=1e4,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
        256, 131072,
    )  # fmt: skip
    assert gemma.windowed == Rotation(1e4)
    assert gemma.all.radians(256, 1)[0] == pytest.approx(1 / 8)


@pytest.mark.parametrize("context", [1, 4096, 4097, 9000])
def test_a_base_grows_only_where_more_is_loaded_than_was_trained_for(context: int) -> None:
    held = {"type": "dynamic", "factor": 3.0}
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=1, head_dim=64, max_position_embeddings=4096,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
    )  # fmt: skip
    wanted, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=context)
    found = read_rotations(fields(rope_theta=1e4, rope_scaling=held), 64, 4096)
    radians = found.all.radians(64, context)
    assert torch.allclose(torch.tensor(radians), wanted, rtol=1e-5)
    assert (radians == Rotation(1e4).radians(64, context)) is (context <= 4096)
    assert found.context == 0


def test_yarn_reaches_further_than_the_config_says() -> None:
    held = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read_rotations(fields(rope_scaling=held), 128, 32768).context == 131072
    assert read_rotations(fields(), 128, 32768).context == 0


def test_columns_that_stand_still_have_cosine_one() -> None:
    table = rope.angle_table(
        9, 128, Rotation(1e4, None, 96).radians(128, 9), torch.device("cpu"), 1.5
    )
    cosines, sines = table.chunk(2, 1)
    assert table.shape == (9, 128)
    assert bool((cosines[:, 48:] == 1.0).all()) and not bool(sines[:, 48:].any())
    assert bool((cosines[0, :48] == 1.5).all())


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "type spiral"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor"),
        ({"rope_scaling": [1]}, "not an object"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0.5}}, "original"),
        (
            {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 1}},
            "original",
        ),
        ({"rope_scaling": {"type": "llama3", "low_freq_factor": 4.0}}, "high_freq_factor"),
        ({"partial_rotary_factor": 0.01}, "0 of 64 columns"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": []}},
            "32 num",
        ),
    ],
)
def test_unsupported_rotations_are_refused(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelInvalid, match=words):
        read_rotations(fields(**raw), 64, 4096)
