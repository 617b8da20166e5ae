import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from localchat.errors import DoesNotFit, UsageError
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import demand
from localchat_cuda.config.reader import parse_config
from localchat_cuda.plan.memory_plan import (
    OVERHEAD_BYTES,
    graph_bytes,
    kv_token_bytes,
    plan,
    workspace_bytes,
)
from localchat_cuda.plan.weight_sizes import dummy_bytes, token_bytes, unpacked_bytes
from tests.support.cuda_configs import AWQ, QWEN25
from tests.support.cuda_machines import CONFIG, GB, gpu, header
from tests.support.hub_configs import CONFIGS

ROOT = Path(__file__).parents[3]


def test_a_cache_of_every_slot_is_planned_and_no_more() -> None:
    found = plan(CONFIG, [header(15 * GB)], LoadOptions(max_slots=2), gpu(140 * GB, 141 * GB))
    assert found.fits
    assert found.context_tokens == found.max_context_tokens == 32768
    assert found.kv_bytes == 2 * 32768 * kv_token_bytes(CONFIG)
    assert kv_token_bytes(CONFIG) == 2 * 28 * 4 * 128 * 2
    assert found.notes == ()


def test_a_context_that_does_not_fit_is_shrunk_with_a_note() -> None:
    found = plan(CONFIG, [header(15 * GB)], LoadOptions(max_slots=4), gpu(19 * GB))
    assert found.fits
    assert 512 <= found.context_tokens < 32768
    assert found.total_bytes <= found.free_bytes
    (note,) = found.notes
    assert f"{found.context_tokens:,}" in note and "32,768" in note


def test_a_context_asked_for_is_never_shrunk() -> None:
    options = LoadOptions(context_tokens=32768, max_slots=4)
    found = plan(CONFIG, [header(15 * GB)], options, gpu(18_700_000_000))
    assert not found.fits
    assert found.context_tokens == 32768
    with pytest.raises(DoesNotFit, match="32,768"):
        demand(found, "it")


def test_more_sequences_run_at_once_where_the_cache_has_room_for_short_ones() -> None:
    large = gpu(140 * GB, 141 * GB)
    asked, wide = LoadOptions(), LoadOptions(more_slots=True)
    few, many = (plan(CONFIG, [header(15 * GB)], each, large) for each in (asked, wide))
    assert (few.slots, many.slots) == (0, 128)
    assert many.kv_bytes == few.kv_bytes and many.context_tokens == few.context_tokens
    more = workspace_bytes(CONFIG, 128) - workspace_bytes(CONFIG, 16)
    assert more < many.compute_bytes - few.compute_bytes < more + 20_000_000  # tables
    assert many.total_bytes - few.total_bytes == many.compute_bytes - few.compute_bytes
    for room in (19, 20, 21, 22, 24, 28, 36):
        found = plan(CONFIG, [header(15 * GB)], wide, gpu(room * GB))
        assert found.total_bytes <= found.free_bytes, room
        assert found.kv_tokens >= max(found.slots * 1024, found.context_tokens), room
        assert (
            found.context_tokens
            == plan(CONFIG, [header(15 * GB)], asked, gpu(room * GB)).context_tokens
        )
    assert plan(CONFIG, [header(15 * GB)], wide, gpu(19 * GB)).slots == 0
    asked = LoadOptions(max_slots=200, more_slots=True)
    assert plan(CONFIG, [header(15 * GB)], asked, large).slots == 0


def test_tables_logits_and_graphs_are_planned_for_every_slot() -> None:
    whole = gpu(140 * GB, 141 * GB)
    few, many = (
        plan(CONFIG, [header(GB)], LoadOptions(context_tokens=32768, max_slots=slots), whole)
        for slots in (64, 256)
    )
    tokens, logits = 192 * 32768 * 4, 4 * 192 * CONFIG.vocabulary * 4
    assert tokens + logits <= many.compute_bytes - few.compute_bytes <= 1.05 * (tokens + logits)
    assert many.overhead_bytes - OVERHEAD_BYTES == graph_bytes(whole, None) == 2_820_000_000
    limited = plan(CONFIG, [header(GB)], LoadOptions(gpu_limit_bytes=8 * GB), whole)
    assert limited.overhead_bytes < GB, "graphs take what the user did not allow"


def test_weights_that_do_not_fit_raise_with_advice() -> None:
    found = plan(CONFIG, [header(15 * GB)], LoadOptions(), gpu(10 * GB))
    assert not found.fits
    assert found.max_context_tokens == 0
    assert any("Other programs hold 14" in line for line in found.advice)
    assert "llama.cpp" in found.advice[-1]


@pytest.mark.parametrize(
    "options", [LoadOptions(gpu_limit_bytes=18 * GB), LoadOptions(kv_limit_bytes=GB)]
)
def test_limits_are_absolute(options: LoadOptions) -> None:
    found = plan(CONFIG, [header(15 * GB)], options, gpu(140 * GB, 141 * GB))
    assert found.fits
    assert found.total_bytes <= (options.gpu_limit_bytes or 141 * GB)
    assert found.kv_bytes <= (options.kv_limit_bytes or 141 * GB)
    assert found.context_tokens < 32768


def test_a_kv_type_of_llamacpp_is_refused() -> None:
    with pytest.raises(UsageError):
        plan(CONFIG, [header(GB)], LoadOptions(kv_type="q8_0"), gpu(20 * GB))


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_cache_of_8_bits_holds_twice_the_tokens(name: str) -> None:
    room = gpu(140 * GB, 141 * GB)
    options = LoadOptions(max_slots=256, kv_limit_bytes=10 * GB)
    plain = plan(CONFIG, [header(15 * GB)], options, room)
    found = plan(CONFIG, [header(15 * GB)], structs.replace(options, kv_type=name), room)
    assert (plain.kv_type, found.kv_type) == ("bf16", "fp8")
    assert plain.kv_types == found.kv_types == ("bf16", "fp8")
    assert kv_token_bytes(CONFIG, found.kv_type) == 2 * 28 * 4 * (128 + 1)
    tokens = [one.kv_bytes // kv_token_bytes(CONFIG, one.kv_type) for one in (plain, found)]
    assert tokens[1] / tokens[0] == pytest.approx(256 / 129, rel=1e-3)


def test_a_cache_of_8_bits_is_proposed_where_it_helps() -> None:
    room = gpu(19 * GB)
    found = plan(CONFIG, [header(15 * GB)], LoadOptions(max_slots=4), room)
    (note,) = found.notes
    coded = plan(CONFIG, [header(15 * GB)], LoadOptions(max_slots=4, kv_type="fp8"), room)
    assert f"FP8 KV would give {coded.max_context_tokens:,} tokens (--kv-type fp8)" in note
    asked = LoadOptions(context_tokens=coded.max_context_tokens, max_slots=4)
    assert not plan(CONFIG, [header(15 * GB)], asked, room).fits
    assert not any("FP8" in line for line in coded.notes)


def test_ggml_kv_types_are_refused_with_the_possible_ones() -> None:
    with pytest.raises(UsageError, match="q8_0") as caught:
        plan(CONFIG, [header(GB)], LoadOptions(kv_type="q8_0"), gpu(20 * GB))
    assert "bf16, fp8" in caught.value.hint and "llama.cpp" in caught.value.hint


def test_planning_imports_no_torch() -> None:
    code = "import sys, localchat_cuda.plan.memory_plan; sys.exit('torch' in sys.modules)"
    path = f"{ROOT}:{ROOT / 'backends'}"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=False)
    assert done.returncode == 0


def test_windows_are_noted_and_their_cache_is_kept_whole_where_all_of_it_fits() -> None:
    config = parse_config(CONFIGS["gemma3:4b"][0], "it")
    options = LoadOptions(dummy_weights=True, max_slots=2)
    found = plan(config, [], options, gpu(140 * GB, 141 * GB))
    assert not found.window_pages
    assert any("29 of 34 layers see the last 1,024 tokens" in note for note in found.notes)
    assert found.kv_bytes >= 131072 * kv_token_bytes(config)
    assert kv_token_bytes(config) == 2 * 34 * 4 * 256 * 2


def test_two_rotations_take_two_tables() -> None:
    config = parse_config(CONFIGS["gemma3:4b"][0], "it")
    one = replace(config, windowed_rotation=None)
    sizes = [
        plan(each, [], LoadOptions(context_tokens=8192), gpu(140 * GB)).compute_bytes
        for each in (one, config)
    ]
    assert sizes[1] - sizes[0] == 8192 * 256 * 4


def test_stretched_positions_are_noted_with_their_start() -> None:
    config = parse_config(CONFIGS["phi4-mini:3.8b"][0], "it")
    for context, said in ((4096, False), (4097, True)):
        found = plan(config, [], LoadOptions(context_tokens=context), gpu(140 * GB, 141 * GB))
        assert any("--ctx 4096" in note for note in found.notes) is said


def test_a_context_ends_where_attention_would_be_scaled_by_the_position() -> None:
    raw, _ = CONFIGS["mistral-small:24b"]
    rotation = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16384,
    }  # fmt: skip
    config = parse_config(
        {**raw, "text_config": {**raw["text_config"], "rope_parameters": rotation}}, "it"
    )
    found = plan(config, [], LoadOptions(), gpu(140 * GB, 141 * GB))
    assert found.context_tokens == 16384
    assert any("ends at 16,384" in note for note in found.notes)
    with pytest.raises(UsageError, match="by the position"):
        plan(config, [], LoadOptions(context_tokens=16385), gpu(140 * GB, 141 * GB))


def test_a_limit_on_the_cache_alone_is_named_if_it_forbids_the_load() -> None:
    options = LoadOptions(context_tokens=32768, max_slots=1, kv_limit_bytes=GB)
    found = plan(CONFIG, [header(GB)], options, gpu(20 * GB))
    needed = kv_token_bytes(CONFIG) * 32768
    assert not found.fits and found.total_bytes < found.free_bytes
    assert "--kv-gb allows 1.0 GB" in found.missing
    flag, value = found.advice[0].partition(":")[0].split()
    assert flag == "--kv-gb" and needed <= float(value) * GB < needed + GB / 10
    enough = structs.replace(options, kv_limit_bytes=int(float(value) * GB))
    assert plan(CONFIG, [header(GB)], enough, gpu(20 * GB)).fits
    with pytest.raises(DoesNotFit, match="it is not loaded: the KV cache"):
        demand(found, "it")
    scarce = plan(CONFIG, [header(GB)], options, gpu(5 * GB))
    assert not scarce.missing and not any("--kv-gb" in line for line in scarce.advice)


def test_a_limit_on_the_gpu_can_be_raised_where_there_is_memory() -> None:
    options = LoadOptions(context_tokens=2048, max_slots=1, gpu_limit_bytes=10 * GB)
    found = plan(CONFIG, [header(15 * GB)], options, gpu(23 * GB))
    assert not found.fits and not found.missing
    flag, value = found.advice[0].partition(":")[0].split()
    assert flag == "--vram-gb"
    enough = structs.replace(options, gpu_limit_bytes=int(float(value) * GB))
    assert plan(CONFIG, [header(15 * GB)], enough, gpu(23 * GB)).fits
    scarce = plan(CONFIG, [header(15 * GB)], options, gpu(12 * GB))
    assert not any("--vram-gb" in line for line in scarce.advice)


def test_fp8_plans_memory_for_dequantized_pages_on_possible_hopper_gpus() -> None:
    for total, extra in (
        (24 * GB, 0),
        (80 * GB, 512 * 2 * CONFIG.key_heads * 64 * CONFIG.head_dim * 2),
    ):
        held = [
            plan(
                CONFIG, [header(5 * GB)], LoadOptions(kv_type=name), gpu(total, total)
            ).compute_bytes
            for name in (None, "fp8")
        ]
        assert held[1] - held[0] == extra


@pytest.mark.parametrize(("total_gb", "copied"), [(141, True), (40, False), (24, False)])
def test_4_bit_weights_are_kept_unpacked_too_where_the_cache_leaves_room(
    total_gb: int, copied: bool
) -> None:
    config = parse_config(QWEN25 | {"quantization_config": AWQ}, "it")
    found = plan(config, [], LoadOptions(max_slots=8), gpu((total_gb - 1) * GB, total_gb * GB))
    linears = 28 * 3584 * (4608 + 3584 + 3 * 18944)
    assert found.unpacked_bytes == (2 * linears if copied else 0)
    assert found.fits and found.total_bytes <= found.free_bytes
    assert found.weights_bytes > found.unpacked_bytes
    bf16 = plan(CONFIG, [header(15 * GB)], LoadOptions(), gpu(140 * GB, 141 * GB))
    assert not bf16.unpacked_bytes


def test_experts_in_ram_are_refused_with_the_way() -> None:
    with pytest.raises(UsageError, match="keeps all weights on the GPU") as caught:
        plan(CONFIG, [header(GB)], LoadOptions(experts_on_cpu=4), gpu(20 * GB))
    assert "GGUF" in caught.value.hint
    plan(CONFIG, [header(GB)], LoadOptions(experts_on_cpu=0), gpu(20 * GB))


def test_states_are_planned_beside_the_pages_of_attention_layers() -> None:
    config = parse_config(CONFIGS["qwen3.5:9b"][0], "it")
    assert kv_token_bytes(config) == 8 * 2 * 4 * 256 * 2
    found = plan(config, [], LoadOptions(max_slots=4), gpu(23 * GB, 24 * GB))
    assert found.fits
    assert 3 <= found.saved_states <= 6
    assert found.kv_bytes > 3 * found.saved_states * config.state_bytes
    more = plan(config, [], LoadOptions(max_slots=5), gpu(23 * GB, 24 * GB))
    tables = (262_144 + 4096) * 4
    assert more.compute_bytes - found.compute_bytes == pytest.approx(
        (1 + more.saved_states - found.saved_states) * config.state_bytes + tables, rel=0.01
    )
    roomy = plan(config, [], LoadOptions(max_slots=4), gpu(79 * GB, 80 * GB))
    assert roomy.saved_states == 64


def test_experts_are_planned_whole_and_read_in_part() -> None:
    raw = {**CONFIGS["qwen3:30b-a3b"][0], "quantization_config": AWQ}
    config = parse_config(raw, "it")
    found = plan(config, [], LoadOptions(max_slots=4), gpu(23 * GB, 24 * GB))
    experts = 48 * 128 * 3 * 2048 * 768
    assert experts * 4.25 / 8 < found.weights_bytes < 1.15 * experts * 4.25 / 8
    assert found.fits
    read = token_bytes(config, dummy_bytes(config))
    others = dummy_bytes(config) - experts * 4.25 / 8
    assert read == pytest.approx(others + experts * 4.25 / 8 * 8 / 128, rel=0.01)
    assert token_bytes(CONFIG, GB) == GB
    results = 2048 * 8 * (2048 * 4 + 768 * 2)
    dense = replace(config, mixture=None, intermediate=1024)
    assert workspace_bytes(config, 4) - workspace_bytes(dense, 4) >= results
    assert unpacked_bytes(config) == 2 * 48 * 2048 * (5120 + 4096)


@pytest.mark.parametrize(
    ("asked", "ram", "planned"),
    [
        (None, 64 * GB, 4 * GB),
        (None, 8 * GB, 2 * GB),
        (0, 64 * GB, 0),
        (10 * GB, 64 * GB, 10 * GB),
        (10 * GB, 8 * GB, 4 * GB),
    ],
)
def test_pinned_ram_is_a_part_of_what_is_free(asked: int | None, ram: int, planned: int) -> None:
    options = LoadOptions(max_slots=2, cache_ram_bytes=asked)
    found = plan(CONFIG, [header(15 * GB)], options, gpu(140 * GB, 141 * GB), ram_bytes=ram)
    assert found.cache_ram_bytes == planned
    assert ("--cache-ram" in " ".join(found.notes)) is (asked is not None and planned < asked)
