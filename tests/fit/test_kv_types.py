"""Names of KV types, and what is proposed where a cache takes too much."""

import pytest

from localchat.fit.kv_types import FP8, canonical_kv_type, number_bytes, smaller_kv_type

LLAMACPP = ("f32", "f16", "bf16", "q8_0", "q4_0")
CUDA = ("bf16", FP8)


def test_one_name_stands_for_each_type() -> None:
    assert [canonical_kv_type(name) for name in ("fp8_e4m3", "fp8", "q8_0", None)] == [
        FP8,
        FP8,
        "q8_0",
        None,
    ]


@pytest.mark.parametrize(
    ("kv_type", "possible", "wanted", "share"),
    [
        ("f16", LLAMACPP, "q8_0", 34 / 64),
        ("bf16", CUDA, FP8, 129 / 256),
        ("f32", (*CUDA, "f32"), FP8, 129 / 512),
        ("f16", (), "q8_0", 34 / 64),
    ],
)
def test_a_plain_cache_has_a_smaller_one(
    kv_type: str, possible: tuple[str, ...], wanted: str, share: float
) -> None:
    found = smaller_kv_type(kv_type, possible)
    assert found is not None
    assert found.kv_type == wanted
    assert found.share == pytest.approx(share)


@pytest.mark.parametrize(
    ("kv_type", "possible"),
    [("q8_0", LLAMACPP), ("q4_0", LLAMACPP), (FP8, CUDA), ("f16", ("f16",)), ("unheard", LLAMACPP)],
)
def test_a_small_cache_has_none(kv_type: str, possible: tuple[str, ...]) -> None:
    assert smaller_kv_type(kv_type, possible) is None


def test_eight_bits_and_an_exponent_are_half_of_sixteen_but_for_a_hundredth() -> None:
    found = number_bytes(FP8)
    assert found is not None
    assert 2 / found == pytest.approx(1.984, abs=1e-3)
