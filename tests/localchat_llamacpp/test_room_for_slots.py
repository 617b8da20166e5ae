"""The KV cache of a server has room for its slots; contexts beyond the trained length are rejected."""

from dataclasses import replace
from pathlib import Path

import pytest

from localchat.errors import UsageError
from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.model_files.architecture import ModelShape, model_shape
from localchat.model_files.open_gguf import read_header
from localchat_llamacpp.plan import memory_plan as planner
from tests.support.gguf_files import write_model

GB = 10**9
MACHINE = Machine("cpu", frozenset({"avx2"}), 2, 16 * GB, 12 * GB)


@pytest.fixture
def shape(tmp_path: Path) -> ModelShape:
    found = model_shape(read_header(write_model(tmp_path / "m.gguf")))
    return replace(found, context_train=8192)


def plan(shape: ModelShape, machine: Machine = MACHINE, **options: object) -> MemoryPlan:
    load = LoadOptions(**options)  # type: ignore[arg-type]
    return planner.plan(shape, load, machine, can_offload=False)


def test_each_slot_of_a_server_has_room_for_a_full_context(shape: ModelShape) -> None:
    found = plan(shape, context_tokens=2048, max_slots=8, room_for_slots=True)
    assert (found.context_tokens, found.kv_tokens) == (2048, 8 * 2048)
    assert any("8 requests at once" in note for note in found.notes)
    alone = plan(shape, context_tokens=2048, max_slots=8)
    assert alone.kv_tokens == 2048
    assert found.kv_bytes == 8 * alone.kv_bytes


def test_without_a_chosen_context_each_slot_has_room_for_a_usual_conversation(
    shape: ModelShape,
) -> None:
    long = replace(shape, context_train=32_768)
    found = plan(long, max_slots=4, room_for_slots=True)
    assert (found.context_tokens, found.kv_tokens) == (32_768, 32_768)
    found = plan(long, max_slots=8, room_for_slots=True)
    assert (found.context_tokens, found.kv_tokens) == (32_768, 8 * 8192)


def test_room_is_limited_by_memory_and_by_the_users_limit(shape: ModelShape) -> None:
    one = plan(shape, context_tokens=8192)
    limit = 3 * one.kv_bytes
    found = plan(
        shape, context_tokens=8192, max_slots=16, room_for_slots=True, kv_limit_bytes=limit
    )
    assert found.fits and found.kv_bytes <= limit
    assert 2 * 8192 < found.kv_tokens < 16 * 8192
    tight = replace(MACHINE, ram_free_bytes=one.total_bytes + 16 * GB // 20 + 14 * one.kv_bytes)
    small = plan(shape, tight, context_tokens=8192, max_slots=16, room_for_slots=True)
    assert small.fits and small.kv_tokens < 16 * 8192


def test_slots_that_nobody_asked_for_take_part_of_what_one_context_leaves(
    shape: ModelShape,
) -> None:
    """The weights do not count against the room, so a model that nearly fills the memory has some too."""
    one = plan(shape, context_tokens=8192)
    tight = replace(MACHINE, ram_free_bytes=one.total_bytes + 16 * GB // 20 + 40 * one.kv_bytes)
    found = plan(
        shape, tight, context_tokens=8192, max_slots=16, room_for_slots=True, more_slots=True
    )
    asked = plan(shape, tight, context_tokens=8192, max_slots=16, room_for_slots=True)
    assert 2 * 8192 < found.kv_tokens < asked.kv_tokens


def test_long_rope_factors_keep_the_size_of_the_cache(shape: ModelShape) -> None:
    long_rope = replace(shape, long_rope=True)
    assert plan(long_rope, context_tokens=2048, max_slots=8, room_for_slots=True).kv_tokens == 2048


@pytest.mark.parametrize("requested", [8193, 1_022_976])
def test_a_context_beyond_the_trained_length_is_rejected(shape: ModelShape, requested: int) -> None:
    with pytest.raises(UsageError, match=r"trained for a context of 8,192 tokens") as problem:
        plan(shape, context_tokens=requested)
    assert "--ctx 8192" in problem.value.hint
    assert plan(shape, context_tokens=requested, anyway=True).context_tokens == requested


def test_declared_rope_scaling_extends_the_limit(shape: ModelShape) -> None:
    scaled = replace(shape, context_scaled=32_768)
    assert plan(scaled, context_tokens=32_768).context_tokens == 32_768
    with pytest.raises(UsageError, match="32,768"):
        plan(scaled, context_tokens=32_769)


@pytest.mark.parametrize(("key_biases", "words"), [(True, "2,702"), (False, "one of three facts")])
def test_a_q4_0_cache_is_loaded_with_a_warning(
    shape: ModelShape, key_biases: bool, words: str
) -> None:
    found = plan(replace(shape, key_biases=key_biases, head_width=32), kv_type="q4_0")
    assert words in found.loss and found.loss in found.notes
    usual = plan(shape)
    assert not usual.loss and not any("q4_0" in note for note in usual.notes)


def test_only_windows_are_cached_on_request(shape: ModelShape) -> None:
    layers = (replace_layer(shape, 0), *shape.layers[1:])
    windowed = replace(shape, layers=layers, window=512)
    whole = plan(windowed, context_tokens=8192, max_slots=2)
    assert any("--window-only saves" in note for note in whole.notes)
    small = plan(windowed, context_tokens=8192, max_slots=2, window_only=True)
    assert small.window_only and small.kv_bytes < whole.kv_bytes


def replace_layer(shape: ModelShape, number: int):  # type: ignore[no-untyped-def]  # noqa: ANN201
    return shape.layers[number]._replace(sliding=True)
