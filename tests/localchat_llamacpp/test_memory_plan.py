"""The choices for llama.cpp, on simulated machines, and the numbers beside llama.cpp's own."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from localchat.errors import DoesNotFit, UsageError
from localchat.fit.hardware import Gpu, Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan, demand
from localchat.model_files.architecture import model_shape
from localchat.model_files.gguf import Header
from localchat.model_files.open_gguf import read_header
from localchat_llamacpp.load import report
from localchat_llamacpp.native import Buffer
from localchat_llamacpp.plan.buffers import SPARE_STATES, Steps, context_cells, window_cells
from localchat_llamacpp.plan.memory_plan import plan
from tests.support.gguf_files import ARCHITECTURES, Q4_0, Size, Tensor, gemma3, llama, write_model

GB = 10**9
EIGHT_B = Size(32, 4096, 32, 8, 128, 14336, 1024, 131072, Q4_0)
LAPTOP = Machine("laptop", frozenset({"avx2"}), 4, 16 * GB, 12 * GB)
CARD = Gpu(0, "RTX 4090", 24 * GB, 21 * GB)
MAC = Machine("M2", frozenset({"asimddp"}), 8, 16 * GB, 12 * GB, unified_memory=True)


@pytest.fixture(scope="module")
def eight_b(tmp_path_factory: pytest.TempPathFactory) -> Header:
    """An 8B model in Q4_0, 4.5 GB of nothing."""
    return read_header(llama(EIGHT_B).sparse(tmp_path_factory.mktemp("models") / "8b.gguf"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Header:
    """A 12B model whose layers mostly see 1,024 tokens."""
    raw = gemma3(Size(48, 3840, 16, 8, 256, 15360, 1024, 131072, Q4_0, 1024))
    return read_header(raw.sparse(tmp_path_factory.mktemp("models") / "gemma.gguf"))


def asked(
    header: Header,
    machine: Machine = LAPTOP,
    options: LoadOptions | None = None,
    *,
    can_offload: bool = False,
) -> MemoryPlan:
    return plan(
        model_shape(header),
        options or LoadOptions(),
        machine,
        can_offload=can_offload,
    )


def tight_for(found: MemoryPlan) -> Machine:
    """A machine a little too small for `found`."""
    return replace(LAPTOP, ram_free_bytes=found.total_bytes + 16 * GB // 20 - 100_000)


def too_small_for_f16(header: Header) -> Machine:
    """A machine that holds 8,192 tokens of q8_0 and not of f16."""
    options = LoadOptions(context_tokens=8192, kv_type="f16")
    return tight_for(asked(header, tight_for(asked(header, options=options)), options))


def test_the_default_context_is_large_and_leaves_room_for_parked_prefixes(eight_b: Header) -> None:
    found = asked(eight_b)
    assert found.fits
    assert 8192 <= found.context_tokens <= found.max_context_tokens <= 131072
    assert found.context_tokens % 256 == 0
    assert found.total_bytes + found.cache_ram_bytes <= found.free_bytes
    assert found.cache_ram_bytes > GB // 2


def test_the_default_context_is_never_longer_than_trained(tmp_path: Path) -> None:
    found = asked(read_header(write_model(tmp_path / "m.gguf", size=Size(context=512))))
    assert found.context_tokens == found.max_context_tokens == 512


def test_a_context_ends_where_learned_positions_end(tmp_path: Path) -> None:
    raw = llama(Size(context=512))
    raw = replace(raw, tensors=[*raw.tensors, Tensor("position_embd.weight", (64, 512))])
    header = read_header(raw.write(tmp_path / "m.gguf"))
    found = asked(header, options=LoadOptions(context_tokens=2048))
    assert (found.context_tokens, found.max_context_tokens) == (512, 512)
    assert "at most 512 tokens" in found.notes[0] and "2,048" in found.notes[0]
    assert asked(header, options=LoadOptions(context_tokens=256)).notes == ()
    turning = read_header(llama(Size(context=512)).write(tmp_path / "rope.gguf"))
    assert (
        asked(turning, options=LoadOptions(context_tokens=2048, anyway=True)).context_tokens == 2048
    )


def test_flash_attention_is_off_on_a_cpu_until_its_scores_have_no_room(eight_b: Header) -> None:
    assert not asked(eight_b).flash_attention
    assert not asked(eight_b, options=LoadOptions(context_tokens=8192)).flash_attention
    options = LoadOptions(context_tokens=8192, kv_type="f16")
    assert asked(eight_b, tight_for(asked(eight_b, options=options)), options).flash_attention
    assert asked(eight_b, options=LoadOptions(kv_type="q8_0")).flash_attention
    assert asked(eight_b, options=LoadOptions(room_for_slots=True)).flash_attention
    assert asked(eight_b, replace(LAPTOP, gpus=(CARD,)), can_offload=True).flash_attention


def test_memory_kept_in_reserve_is_not_spent(eight_b: Header) -> None:
    assert asked(eight_b).free_bytes == 12 * GB - 16 * GB // 20


def test_a_coarser_cache_is_taken_where_the_fine_one_has_no_room(eight_b: Header) -> None:
    found = asked(eight_b, too_small_for_f16(eight_b))
    assert (found.fits, found.kv_type) == (True, "q8_0")
    assert any("q8_0" in note for note in found.notes)
    assert found.context_tokens >= 8192


def test_layers_that_this_build_cannot_put_on_a_gpu_are_said(eight_b: Header) -> None:
    for layers in (99, "all"):
        found = asked(eight_b, options=LoadOptions(gpu_layers=layers))
        assert found.gpu_layers == 0
        (note,) = found.notes
        assert "no layer goes to a GPU. `localchat doctor` says" in note
    for layers in (0, "auto"):
        assert not asked(eight_b, options=LoadOptions(gpu_layers=layers)).notes  # type: ignore[arg-type]


def test_a_context_beyond_training_is_possible_and_said(eight_b: Header) -> None:
    big = replace(LAPTOP, ram_total_bytes=100 * GB, ram_free_bytes=90 * GB)
    found = asked(eight_b, big, LoadOptions(context_tokens=200_000, anyway=True))
    assert found.context_tokens == 200_000
    assert any("trained for 131,072 tokens" in note for note in found.notes)


def test_all_layers_go_to_a_card_that_holds_them(eight_b: Header) -> None:
    found = asked(eight_b, replace(LAPTOP, gpus=(CARD,)), can_offload=True)
    assert found.gpu_layers == found.layers == 33
    assert found.gpu_bytes <= found.gpu_free_bytes == 21 * GB - 24 * GB // 20
    assert found.max_step_tokens == 512


def test_layers_stay_in_ram_where_the_card_is_small(eight_b: Header) -> None:
    small = replace(LAPTOP, gpus=(Gpu(0, "RTX 3050", 4 * GB, int(3.5 * GB)),))
    found = asked(eight_b, small, can_offload=True)
    assert 0 < found.gpu_layers < 33
    assert found.gpu_bytes <= found.gpu_free_bytes
    one_more = LoadOptions(
        context_tokens=found.context_tokens, kv_type="f16", gpu_layers=found.gpu_layers + 1
    )
    refused = asked(eight_b, small, one_more, can_offload=True)
    assert not refused.fits


def test_a_build_without_gpu_uses_none_and_says_how_to_get_one(eight_b: Header) -> None:
    machine = replace(LAPTOP, gpus=(CARD,))
    found = asked(eight_b, machine, LoadOptions())
    assert (found.gpu_layers, found.gpu_bytes) == (0, 0)
    assert any("RTX 4090" in note and "doctor --rebuild" in note for note in found.notes)
    assert asked(eight_b, machine, LoadOptions(gpu_layers="all")).gpu_layers == 0
    assert not asked(eight_b, machine, LoadOptions(gpu_layers=0)).notes


def test_a_gpu_that_cannot_be_read_is_used_only_when_asked_for(eight_b: Header) -> None:
    assert asked(eight_b, can_offload=True).gpu_layers == 0
    found = asked(eight_b, options=LoadOptions(gpu_layers=10), can_offload=True)
    assert (found.fits, found.gpu_layers) == (True, 10)
    assert any("on trust" in note for note in found.notes)


def test_unified_memory_is_one_pool(eight_b: Header) -> None:
    found = asked(eight_b, MAC, can_offload=True)
    assert found.gpu_layers == 33
    assert found.gpu_bytes == 0
    assert found.total_bytes <= found.free_bytes <= 0.75 * 16 * GB


def test_windows_are_cut_only_where_full_layers_have_no_room(gemma: Header) -> None:
    big = replace(LAPTOP, ram_total_bytes=32 * GB, ram_free_bytes=30 * GB)
    wide = asked(gemma, big, LoadOptions(context_tokens=32768))
    narrow = asked(gemma, replace(big, ram_free_bytes=18 * GB), LoadOptions(context_tokens=32768))
    assert (wide.window_only, narrow.window_only) == (False, True)
    assert narrow.kv_bytes < wide.kv_bytes
    assert narrow.kv_type == "f16"


def test_the_longest_context_counts_on_windows_that_are_cut(gemma: Header) -> None:
    machine = replace(LAPTOP, ram_total_bytes=32 * GB, ram_free_bytes=18 * GB)
    found = asked(gemma, machine)
    options = LoadOptions(context_tokens=found.max_context_tokens)
    longest = asked(gemma, machine, options)
    assert (found.window_only, longest.window_only) == (False, True)
    assert longest.fits
    assert longest.kv_type == found.kv_type


def test_parked_prefixes_get_the_ram_that_was_asked_for_or_what_is_left(eight_b: Header) -> None:
    options = LoadOptions(context_tokens=8192, kv_type="f16", cache_ram_bytes=2 * GB)
    assert asked(eight_b, options=options).cache_ram_bytes == 2 * GB
    found = asked(eight_b, options=structs.replace(options, cache_ram_bytes=7 * GB))
    assert found.fits and found.cache_ram_bytes == found.free_bytes - found.total_bytes
    assert any(note.startswith("--cache-ram is ") for note in found.notes)
    free = structs.replace(options, context_tokens=None, cache_ram_bytes=5 * GB)
    less = asked(eight_b, options=free)
    assert less.context_tokens < asked(eight_b).context_tokens
    assert less.cache_ram_bytes == 5 * GB


def test_other_programs_keep_half_of_the_ram_beside_the_model(eight_b: Header) -> None:
    found = asked(eight_b)
    least = asked(eight_b, options=LoadOptions(context_tokens=8192))
    assert found.total_bytes - least.total_bytes <= (least.free_bytes - least.total_bytes) / 2
    large = asked(eight_b, replace(LAPTOP, ram_total_bytes=96 * GB, ram_free_bytes=90 * GB))
    assert large.context_tokens == 32_768
    assert large.max_context_tokens == 131_072


def test_a_prompt_that_waits_gets_a_longer_context_if_it_fits(eight_b: Header) -> None:
    usual, known = asked(eight_b), asked(eight_b, options=LoadOptions(single_request_tokens=40_000))
    assert usual.context_tokens < 40_000 <= known.context_tokens
    short = asked(eight_b, options=LoadOptions(single_request_tokens=100))
    assert short.context_tokens == usual.context_tokens
    hopeless = asked(eight_b, options=LoadOptions(single_request_tokens=10**6))
    assert hopeless.fits and usual.context_tokens < hopeless.context_tokens <= 131_072


@pytest.mark.parametrize(("cores", "step"), [(2, 128), (4, 128), (8, 256), (32, 512)])
def test_steps_grow_with_the_cores(eight_b: Header, cores: int, step: int) -> None:
    assert asked(eight_b, replace(LAPTOP, cores=cores)).max_step_tokens == step


def test_pages_beside_repacked_weights_are_told_apart_and_not_needed(eight_b: Header) -> None:
    plain, fast = asked(eight_b, replace(LAPTOP, cpu_flags=frozenset())), asked(eight_b)
    assert plain.weights_bytes == eight_b.weights_bytes
    matrices = sum(
        t.size_bytes for t in eight_b.tensors if len(t.shape) == 2 and t.name != "token_embd.weight"
    )
    assert fast.weights_bytes == plain.weights_bytes
    assert (fast.mapped_bytes, plain.mapped_bytes) == (matrices, 0)
    amx = replace(LAPTOP, cpu_flags=frozenset({"avx2", "avx512f", "avx512_vnni", "amx_int8"}))
    assert asked(eight_b, amx).weights_bytes > fast.weights_bytes


def test_an_unknown_kv_type_is_a_usage_error(eight_b: Header) -> None:
    with pytest.raises(UsageError):
        asked(eight_b, options=LoadOptions(kv_type="q3_x"))


LOAD = """
import ctypes, json, re, sys
from localchat_llamacpp.native import library
api = library().api
text = []
heard = api.llama_log_callback(lambda level, piece, user: text.append(piece.decode("utf-8", "replace")))
api.llama_log_set(heard, None)
for path, cells, step, rows, sequences, flash, swa_full in json.load(sys.stdin):
    text.clear()
    parameters = api.llama_model_default_params()
    parameters.n_gpu_layers, parameters.use_extra_bufts = 0, False
    model = api.llama_model_load_from_file(path.encode(), parameters)
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = cells, step, step
    params.n_seq_max, params.n_outputs_max, params.kv_unified = sequences, rows, True
    params.flash_attn_type, params.swa_full, params.n_threads = flash, swa_full, 1
    context = api.llama_init_from_model(model, params)
    sizes = re.findall(r"(model|KV|RS|compute) +buffer size = +([0-9.]+) MiB", "".join(text))
    print(json.dumps({kind: sum(float(n) for k, n in sizes if k == kind) for kind, _ in sizes}))
    api.llama_free(context)
    api.llama_model_free(model)
"""


def test_the_plan_agrees_with_what_llama_cpp_takes(tmp_path: Path) -> None:
    shape = Size(
        layers=6, width=256, heads=8, feed_forward=768, vocab=4096, context=4096, window=128
    )
    cases, loads = [], []
    for name in sorted(ARCHITECTURES):
        header = read_header(write_model(tmp_path / f"{name}.gguf", name, shape))
        for context, flash in ((600, 0), (4096, 0), (4096, -1)):
            options = LoadOptions(context_tokens=context, kv_type="f16", gpu_layers=0)
            # A machine without room for the scores takes flash attention.
            found = asked(header, LAPTOP, options)
            if flash:
                found = asked(header, tight_for(found), options)
            spare = SPARE_STATES if model_shape(header).recurrent else 0
            steps = Steps(options.max_slots + spare, found.max_step_tokens)
            cells = context_cells(context)
            cases.append((name, found))
            loads.append(
                [
                    str(header.parts[0]),
                    cells,
                    steps.tokens,
                    steps.output_rows,
                    steps.sequences,
                    flash,
                    True,
                ]
            )
    answer = subprocess.run(
        [sys.executable, "-c", LOAD],
        input=json.dumps(loads),
        capture_output=True,
        text=True,
        check=True,
    )
    for (name, found), line in zip(cases, answer.stdout.splitlines(), strict=True):
        real = {kind: mib * 2**20 for kind, mib in json.loads(line).items()}
        kv = real.get("KV", 0.0) + real.get("RS", 0.0)
        # The log rounds to a hundredth of a MiB.
        assert found.weights_bytes == pytest.approx(real["model"], rel=0.01, abs=20_000), name
        assert found.kv_bytes == pytest.approx(kv, rel=0.01, abs=20_000), name
        total = found.weights_bytes + found.kv_bytes + found.compute_bytes
        assert total == pytest.approx(real["model"] + kv + real["compute"], rel=0.05), name


def test_cut_windows_have_cells_for_every_sequence(gemma: Header) -> None:
    shape = model_shape(gemma)
    assert window_cells(shape, 33024, Steps(16, 128)) == 17664
    assert window_cells(shape, 4096, Steps(16, 128)) == 4096


def test_weights_that_are_copied_in_another_order_are_needed_once(eight_b: Header) -> None:
    """The system drops the file's pages: 8 GB hold a model of 4 GB with 8,192 tokens, repacked or not."""
    tight = replace(LAPTOP, ram_total_bytes=8 * GB, ram_free_bytes=6 * GB)
    assert asked(eight_b, tight).fits
    assert asked(eight_b, replace(tight, cpu_flags=frozenset())).fits
    refused = asked(eight_b, replace(tight, ram_free_bytes=4 * GB))
    assert not refused.fits


def test_a_model_that_does_not_fit_is_loaded_anyway_but_never_over_the_users_own_limits(
    eight_b: Header,
) -> None:
    tight = replace(LAPTOP, ram_total_bytes=8 * GB, ram_free_bytes=2 * GB)
    found = asked(eight_b, tight, LoadOptions(anyway=True))
    assert demand(found, "it").context_tokens == 2048
    assert found.total_bytes > found.free_bytes == 2 * GB
    assert found.reserve_bytes == 0
    assert "the system may end the model" in found.notes[-1]
    assert asked(eight_b, tight, LoadOptions(anyway=True, context_tokens=512)).context_tokens == 512
    limited = LoadOptions(anyway=True, context_tokens=8192, kv_limit_bytes=1000)
    roomy = replace(LAPTOP, ram_total_bytes=64 * GB, ram_free_bytes=60 * GB)
    with pytest.raises(DoesNotFit, match="--kv-gb allows"):
        demand(asked(eight_b, roomy, limited), "it")
    almost = replace(
        tight, ram_free_bytes=asked(eight_b, roomy, LoadOptions(context_tokens=4096)).total_bytes
    )
    assert not asked(eight_b, almost, LoadOptions(context_tokens=4096)).fits
    exact = asked(eight_b, almost, LoadOptions(context_tokens=4096, anyway=True))
    assert exact.fits
    assert not exact.notes


def test_several_cards_lose_room_at_their_borders(eight_b: Header) -> None:
    """A layer is on one card, and each card needs a scratch buffer and a context of its own."""
    one = replace(LAPTOP, gpus=(replace(CARD, total_bytes=16 * GB, free_bytes=6 * GB),))
    half = Gpu(0, "card", 8 * GB, 3 * GB)
    two = replace(LAPTOP, gpus=(half, replace(half, index=1)))
    options = LoadOptions(context_tokens=4096)
    whole, parted = (asked(eight_b, machine, options, can_offload=True) for machine in (one, two))
    assert whole.gpu_layers == whole.layers
    assert 0 < parted.gpu_layers < whole.gpu_layers
    assert parted.gpu_bytes <= 6 * GB


def test_a_required_gpu_is_not_replaced_by_the_cpu(eight_b: Header) -> None:
    options = LoadOptions(require_gpu=True)
    with_card = replace(LAPTOP, gpus=(CARD,))
    cases = (
        (with_card, options, False, "built for the CPU alone"),
        (LAPTOP, options, True, "none was found"),
        (
            replace(LAPTOP, gpus=(replace(CARD, free_bytes=GB),)),
            options,
            True,
            "not even one layer",
        ),
        (with_card, structs.replace(options, gpu_layers=0), True, "--gpu-layers is 0"),
    )
    for machine, asked_for, can_offload, told in cases:
        found = asked(eight_b, machine, asked_for, can_offload=can_offload)
        assert not found.fits
        assert told in found.missing
        with pytest.raises(DoesNotFit, match="is not loaded: a GPU is required"):
            demand(found, "it")
    for machine in (with_card, MAC):
        assert asked(eight_b, machine, options, can_offload=True).fits


def test_beside_a_card_the_weights_in_ram_stay_as_the_file_has_them(eight_b: Header) -> None:
    """llama.cpp prefers RAM that the card reads to another order for the CPU."""
    with_card = replace(LAPTOP, gpus=(CARD,))
    alone = asked(eight_b, with_card, LoadOptions(gpu_layers=0), can_offload=True)
    some = asked(eight_b, with_card, LoadOptions(gpu_layers=10), can_offload=True)
    assert alone.mapped_bytes > 0
    assert (some.gpu_layers, some.mapped_bytes) == (10, 0)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("buffers", "weights"),
    [
        # alone in RAM, some of it copied in another order: both are held
        ([("CPU_Mapped", 1000), ("CPU_REPACK", 600)], 1600),
        # the mapped range reaches over what went to the card
        ([("CPU_Mapped", 1000), ("CUDA0", 700)], 1000),
        ([("CPU_Mapped", 400), ("CUDA0", 700)], 1000),
        ([("CPU_Mapped", 300), ("CUDA0", 350), ("CUDA1", 350)], 1000),
        ([("CPU_Mapped", 250), ("MTL0_Mapped", 750)], 1000),
        ([("CPU", 400), ("Vulkan0", 600), ("Vulkan_Host", 10)], 1010),
    ],
)
def test_weights_on_a_card_are_not_counted_twice(
    buffers: list[tuple[str, int]], weights: int
) -> None:
    told = [Buffer(device, "model", size * MIB) for device, size in buffers]
    found = report([*told, Buffer("CUDA0", "KV", 5 * MIB)], 1000 * MIB)
    assert (found.weights_bytes, found.kv_bytes) == (weights * MIB, 5 * MIB)
