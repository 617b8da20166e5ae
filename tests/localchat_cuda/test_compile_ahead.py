"""Compiling ahead, without a GPU: which kernels are met, by whom they are compiled, and what is left behind."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.runtime.jit import JitFunctionInfo

from localchat.backend_api.interface import StepPlan
from localchat.fit.hardware import ContainerLimits, read_machine
from localchat_cuda.compile_ahead import process, trace, workers
from localchat_cuda.compile_ahead.job import (
    FEW_ROWS,
    CompileJob,
    CompileShape,
    Phase,
    compile_shapes,
)
from localchat_cuda.compile_ahead.process import CompileProcess
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.reader import parse_config
from localchat_cuda.ggml_forms import FORMS, GGUF_FORMS
from localchat_cuda.kernels.launch import Traits
from localchat_cuda.ranks.split import split_config
from localchat_cuda.runner.input_batch import (
    DECODE_BUCKETS,
    MAX_DECODE_WIDTH,
    MIXED_DECODE_BUCKETS,
    PREFILL_BUCKETS,
)
from tests.support.compile_ahead_steps import (
    ENVIRONMENT,
    TINY,
    can_of,
    child,
    random_shapes,
)
from tests.support.cuda_configs import AWQ, GPTQ, QWEN25
from tests.support.float_checkpoints import CONFIGS as CODES
from tests.support.hub_configs import CONFIGS

HOPPER, AMPERE, NEWER = Traits.of((9, 0), 132), Traits.of((8, 6), 82), Traits.of((12, 0), 170)
GGUF = {"quant_method": "gguf", "mix": "Q4_K_M", "head": "Q6_K"}
LINEARS = {
    **{f"self_attn.{each}_proj": "Q4_K" for each in ("q", "k", "v", "o")},
    **{f"mlp.{each}_proj": "Q4_K" for each in ("gate", "up", "down")},
}
FORMATS = tuple(
    tuple({**LINEARS, **wider}.items())
    for wider in ({}, {"self_attn.v_proj": "Q6_K", "mlp.down_proj": "Q6_K"})
)
SURVEY = """
import collections, itertools, json, pickle, sys
from localchat_cuda.compile_ahead import trace

class Counted(trace.Claims):
    def skip(self, *, key, fn, **rest):
        self.met.setdefault((fn.module.removeprefix("localchat_cuda.kernels."), key))
        return True

jobs, found = pickle.load(sys.stdin.buffer), {}
claims = Counted("")
for name, job in jobs.items():
    claims.met = {}
    trace.only_compile(job.gpu, claims)
    # What some of the steps meet, all of them do; each kernel of a bounded head is met by few.
    every = 1 if job.head_bounds else 4
    steps = itertools.islice(trace.compile_shapes(job.capabilities), 0, None, every)
    troubles = trace.launch_all(trace.meta_runner(job), job.config.vocabulary, steps)
    assert not troubles, (name, troubles[:3])
    found[name] = collections.Counter(module for module, _ in claims.met)
print(json.dumps(found))
"""
UNMET = """
import json, pickle, random, sys
from localchat_cuda.compile_ahead import trace

class Seen(trace.Claims):
    def skip(self, *, key, fn, **rest):
        self.kept.setdefault(fn.module + fn.name + key, f"{fn.name}: {key}")
        return True

(jobs, more), found = pickle.load(sys.stdin.buffer), {}
for name, job in jobs.items():
    claims = Seen("")
    claims.kept = {}
    trace.only_compile(job.gpu, claims)
    runner, vocabulary = trace.meta_runner(job), job.config.vocabulary
    assert not trace.launch_all(runner, vocabulary, more), name
    wanted, claims.kept = claims.kept, {}
    trace.only_compile(job.gpu, claims)  # forgets what was launched before
    shapes = list(trace.compile_shapes(job.capabilities))
    random.Random(3).shuffle(shapes)  # so that most kernels are met early
    while shapes and not wanted.keys() <= claims.kept.keys():
        assert not trace.launch_all(runner, vocabulary, shapes[:16]), name
        del shapes[:16]
    found[name] = [len(wanted), [wanted[key] for key in wanted if key not in claims.kept]]
print(json.dumps(found))
"""
READ = """
import collections, json, pickle, sys
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import compiler
from localchat_cuda.compile_ahead import trace

class Read(trace.Claims):
    def skip(self, *, key, fn, **rest):
        own = fn.module.startswith(f"localchat_cuda.kernels.{package}.")
        if not (own or fn.name == "_prepare_kernel") or (fn.name, key) in read:
            return True
        read.add((fn.name, key))
        return False

def first_stage(self, stages, options, language, capability=None):
    stages["ttir"] = lambda module, metadata: module

CUDABackend.add_stages, compiler.CompiledKernel = first_stage, lambda source, *rest: None
(job, package, few), read = pickle.load(sys.stdin.buffer), set()
trace.only_compile(job.gpu, Read(""))
# Steps that differ in their histories alone need the same kernels, except for attention.
shapes = {
    tuple(row[1:] for row in shape.rows) + shape[1:]: shape
    for shape in trace.compile_shapes(job.capabilities)
    if not (few and 4 != sum(width for _, width, _ in shape.rows) <= 64)}
failed = trace.launch_all(trace.meta_runner(job), job.config.vocabulary, shapes.values())
print(json.dumps([collections.Counter(name for name, _ in read), [str(error) for error in failed[:3]]]))
"""


def job_of(raw: dict[str, Any], gpu: Traits, **wishes: Any) -> CompileJob:
    config = parse_config(raw, "it")
    return CompileJob(config, can_of(config, **wishes), gpu)


def met(jobs: dict[str, CompileJob]) -> dict[str, dict[str, int]]:
    """By script, how many kernels of which module steps need; none is compiled."""
    found: dict[str, dict[str, int]] = json.loads(child(["-c", SURVEY], jobs))
    return found


# ---------------------------------------------------------------------------- what is met


@pytest.fixture(scope="module")
def by_format() -> dict[str, dict[str, int]]:
    def stored(**how: Any) -> dict[str, Any]:
        return {**QWEN25, "quantization_config": how}

    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    floating = job_of(QWEN25, HOPPER)
    return met({
        "awq": job_of(stored(**AWQ), HOPPER),
        "awq after hopper": job_of(stored(**AWQ), NEWER),
        "scattered": job_of(stored(**{**GPTQ, "desc_act": True}), HOPPER),
        "fp8": job_of(stored(**fp8), HOPPER),
        "fp8 before": job_of(stored(**fp8), AMPERE),
        "bf16": floating,
        "bounded": floating._replace(head_bounds=True),
        "coded": job_of(QWEN25, HOPPER, kv_type="fp8"),
        "gguf": job_of(stored(**GGUF), HOPPER)._replace(formats=FORMATS),
        "int8": job_of(stored(**{**GPTQ, "bits": 8}), HOPPER),
        "experts": job_of(CONFIGS["qwen3:30b-a3b"][0], HOPPER),
        "experts awq": job_of({**CONFIGS["mixtral:8x7b"][0], "quantization_config": AWQ}, NEWER),
        "mxfp4": job_of(CONFIGS["gpt-oss:20b"][0], HOPPER),
    })  # fmt: skip


def test_every_kernel_variant_of_a_gemm_is_met(by_format: dict[str, dict[str, int]]) -> None:
    gemms = {f"int4.gemm_{name}" for name in ("few", "tiled", "dequant")}
    hopper = {"int4.gemm_hopper", "attention.prefill_hopper"}
    assert gemms | hopper <= by_format["awq"].keys()
    assert gemms | {"attention.prefill"} <= by_format["awq after hopper"].keys()
    assert not hopper & by_format["awq after hopper"].keys()
    small = {f"fp8_int8.{name}" for name in ("gemv", "gemm_small", "gemm_tiled")}
    assert small | {"fp8_int8.gemm_fp8"} <= by_format["fp8"].keys()
    assert small | {"fp8_int8.gemm_dequant"} <= by_format["fp8 before"].keys()
    assert {"skinny_gemm", "activation", "rms_norm"} <= by_format["bf16"].keys()
    assert not any(name.startswith(("int4.gemm", "fp8_int8")) for name in by_format["bf16"])
    assert {"skinny_gemm", "fp8_int8.gemv", "fp8_int8.gemm_small"} <= by_format["bounded"].keys()
    # The bound with penalties, with masks and without; the floor; a row count of 1, 2, 4 and 8.
    assert by_format["bounded"]["sampling.rescore"] >= 8
    assert "sampling.rescore" not in by_format["bf16"]
    # Of one row alone, of pairs that find their expert themselves, and of blocks of several sizes.
    assert by_format["experts"]["experts.choice"] >= 4
    assert by_format["experts"]["experts.gemm_float"] >= 12
    # Of two kinds of layers: both formats of v and down, and the head's.
    assert by_format["gguf"]["ggml.gemm_int8"] >= 2 * 7
    assert {"ggml.gemm_tiles", "int4.activations", "rms_norm"} <= by_format["gguf"].keys()
    assert not {"skinny_gemm", "int4.gemm_few"} & by_format["gguf"].keys()
    assert "ggml.gemm_int8" in by_format["int8"]
    kinds = {f"experts.gemm_int4_{kind}" for kind in ("few", "many")}
    for form in ("experts awq", "mxfp4"):
        assert kinds | {"experts.choice"} <= by_format[form].keys()


def test_kernels_between_gemms_are_met(by_format: dict[str, dict[str, int]]) -> None:
    for name, kernels in by_format.items():
        assert {"rope", "attention.decode", "sampling.sample"} <= kernels.keys(), name
        assert kernels["rope"] >= 3, name
    activations = "int4.activations"
    assert by_format["scattered"][activations] > by_format["awq"][activations]
    assert "attention.kv_fp8_dequant" in by_format["coded"]
    assert all(sum(kernels.values()) < 200 for kernels in by_format.values())


def test_every_architecture_can_be_compiled_ahead() -> None:
    raws = {raw["architectures"][0]: raw for raw, _ in CONFIGS.values()}
    found = met({name: job_of(raw, HOPPER, slots=1) for name, raw in raws.items()})
    assert len(found) > 5
    everywhere = {"attention.decode", "sampling.sample"}
    assert all(everywhere <= kernels.keys() for kernels in found.values())
    latents = {"DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM"}
    assert {name for name, kernels in found.items() if "latent" in kernels} == latents
    assert {name for name, kernels in found.items() if "rope" not in kernels} == latents
    assert all({"attention.prefill", "experts.choice"} <= found[name].keys() for name in latents)


def test_kernels_take_the_shapes_of_one_of_several_gpus() -> None:
    whole = {name: parse_config(raw, name) for name, (raw, _) in CONFIGS.items()}
    whole["awq"] = parse_config({**QWEN25, "quantization_config": AWQ}, "it")
    jobs = {}
    for name in ("awq", "deepseek-v2-lite"):
        part = split_config(whole[name], 2, name)
        jobs[name] = CompileJob(part, can_of(part, slots=1), HOPPER)
    assert all("sampling.sample" in kernels for kernels in met(jobs).values())


def test_a_layer_of_each_kind_is_kept_and_the_last_stays_the_last() -> None:
    config = parse_config(QWEN25, "it")
    assert trace.one_layer_per_kind(config).layers == 2
    windowed = trace.one_layer_per_kind(
        ModelConfig(**{
            **{field: getattr(config, field) for field in config.__dataclass_fields__},
            "windows": (512,) * 5 + (0,) + (512,) * 5 + (0,) * 17,
        })
    )  # fmt: skip
    assert windowed.windows == (512, 0, 0)


def test_compiled_shapes_stay_within_the_capabilities() -> None:
    config = parse_config(QWEN25, "it")
    for slots, context in ((1, 64), (4, 200), (128, 8192), (300, 40_000)):
        can = can_of(config, slots=slots, context=context)
        widths = set()
        for shape in compile_shapes(can):
            assert 1 <= len(shape.rows) <= can.max_slots
            assert sum(width for _, width, _ in shape.rows) <= max(
                can.max_step_tokens, DECODE_BUCKETS[-1]
            )
            assert sum(start + width for start, width, _ in shape.rows) <= can.kv_tokens
            assert all(start >= 0 and start + width < context for start, width, _ in shape.rows)
            widths |= {width for _, width, _ in shape.rows}
        assert widths >= {size for size in PREFILL_BUCKETS if MAX_DECODE_WIDTH < size < context}
    assert max(MIXED_DECODE_BUCKETS) <= 300


def test_steps_of_any_kind_need_no_other_kernels() -> None:
    stored: dict[str, dict[str, Any]] = {
        "7B": QWEN25,
        "experts": CONFIGS["qwen3:30b-a3b"][0],
        "hybrid": CONFIGS["qwen3.5:9b"][0],
        "latents": CONFIGS["glm-4.7-flash"][0],
        "convolutions": CONFIGS["lfm2:1.2b"][0],
    }
    jobs = {
        name: job_of({**raw, "quantization_config": AWQ}, HOPPER) for name, raw in stored.items()
    }
    mamba = CONFIGS["nemotron-3-nano:30b-a3b"][0]
    jobs["mamba"] = job_of({**mamba, "quantization_config": None}, HOPPER)
    gguf = job_of({**QWEN25, "quantization_config": GGUF}, HOPPER)
    jobs["gguf"] = gguf._replace(formats=FORMATS)
    # One process for all: its imports take longer than the steps of a model.
    found = json.loads(child(["-c", UNMET], (jobs, random_shapes(120))))
    assert found.keys() == jobs.keys()
    for name, (kernels, missed) in found.items():
        assert kernels > 50, name
        assert not missed, name


def test_triton_reads_the_kernels_of_every_format(tmp_path: Path) -> None:
    """The interpreter runs Python and takes what Triton's front end refuses; its other stages take minutes."""
    raw = {**TINY, "intermediate_size": 256}
    formats = tuple(tuple((name, type_) for name in LINEARS) for type_ in GGUF_FORMS)
    gguf = job_of({**raw, "quantization_config": GGUF}, HOPPER, slots=8, context=600)
    # The formats that no GGUF file has: 8 bits with zeros, and NVFP4.
    with_zeros = {**GPTQ, "bits": 8, "sym": False}
    int8 = job_of({**raw, "quantization_config": with_zeros}, HOPPER, slots=8, context=600)
    nvfp4 = job_of({**raw, "quantization_config": CODES["nvfp4"]}, HOPPER, slots=8, context=600)
    read = Counter[str]()
    # Numbers of rows add branches that are the same in all formats: one format is read with all of them.
    for job, few in ((gguf._replace(formats=formats), True), (int8, False), (nvfp4, False)):
        counts, failed = json.loads(child(["-c", READ], (job, "ggml", few), tmp_path))
        assert not failed
        read.update(counts)
    assert read["_few_kernel"] >= 2 * len(FORMS)  # after a norm and not
    assert read["_tiles_kernel"] >= len(FORMS)
    assert read["_dequantize_kernel"] >= len(FORMS)
    assert read["_prepare_kernel"] > 4


def test_triton_reads_the_kernels_of_mxfp8(tmp_path: Path) -> None:
    raw = {**TINY, "quantization_config": CODES["mxfp8"]}
    job = job_of(raw, HOPPER, slots=20, context=300)
    read, failed = json.loads(child(["-c", READ], (job, "fp8_int8", False), tmp_path))
    assert not failed
    for kernel in ("_gemv_kernel", "_small_kernel", "_tiled_kernel", "_dequantize_kernel"):
        assert read.get(kernel), kernel


@pytest.mark.parametrize("stored", [{}, {"quantization_config": AWQ}], ids=["bf16", "awq"])
def test_triton_reads_the_kernels_of_experts(stored: dict[str, Any], tmp_path: Path) -> None:
    raw = {**CONFIGS["qwen1.5-moe:14b-a2.7b"][0], "num_hidden_layers": 2, **stored}
    job = job_of(raw, HOPPER, slots=9, context=300)
    read, failed = json.loads(child(["-c", READ], (job, "experts", False), tmp_path))
    assert not failed
    assert read["_few_logits_kernel"] >= 4  # 1, 2, 4 and 8 rows


# ---------------------------------------------------------------------------- who compiles


def test_a_kernel_is_compiled_by_whoever_claims_it_first(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    job = job_of(TINY, AMPERE, slots=1, context=16)
    job = job._replace(claims=str(tmp_path / "claims"), processes=2)
    command = ["-m", "localchat_cuda.compile_ahead"]
    for _ in range(2):
        lines = child(command, job, tmp_path / "cache").split()
        assert lines == [phase.name for phase in Phase]
        compiled = [path.name for path in (tmp_path / "cache").rglob("*.cubin")]
        assert len(compiled) == len(list((tmp_path / "claims").iterdir())) > 5
    wanted = {"_fused_kernel.cubin", "_merge_kernel.cubin", "_one_row_kernel.cubin"}
    assert wanted <= set(compiled)


HASHED = """
import json
from triton.runtime.jit import JITFunction
from localchat_cuda.runner import runner
from localchat_cuda.kernels.attention import decode as decode_attention, kv_fp8
from localchat_cuda.compile_ahead import triton_cache

order = []
JITFunction.cache_key = property(lambda self: order.append(id(self)))
triton_cache.hash_bottom_up()
asked = [order.index(id(each)) for each in (decode_attention._decode_kernel, kv_fp8.decode)]
print(json.dumps([*asked, len(order), len(set(order))]))
"""


def test_what_a_kernel_calls_is_hashed_before_it() -> None:
    """Else Triton 3.6 gives it another key in each order of launches."""
    kernel, called, hashed, functions = json.loads(child(["-c", HASHED], None))
    assert called < kernel
    assert hashed == functions > 100


def test_nothing_is_compiled_after_the_parent_process_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claims, kernel = trace.Claims(""), JitFunctionInfo("module", "kernel", None)
    assert claims.skip(key="a", fn=kernel) is False
    assert claims.count == 1
    monkeypatch.setattr(os, "getppid", lambda: claims._parent_pid + 1)
    with pytest.raises(SystemExit):
        claims.skip(key="b", fn=kernel)


@pytest.mark.parametrize(
    ("allowed", "limit", "free_gb", "wanted"),
    [(16, 0.0, 100, 16), (16, 2.5, 100, 2), (16, 0.5, 100, 1), (16, 0.0, 6, 3), (64, 0.0, 500, 24)],
)
def test_compiling_keeps_to_what_a_container_may_take(
    allowed: int, limit: float, free_gb: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(read_machine(), ram_free_bytes=free_gb * 10**9)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)))
    monkeypatch.setattr(workers, "read_limits", lambda: ContainerLimits(cpus=limit))
    monkeypatch.setattr(workers, "read_machine", lambda: machine)
    assert workers._process_count() == wanted


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Traits:
    """A GPU that is not here, and a cache of its own."""
    monkeypatch.setattr(workers, "_process_count", lambda: 2)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    return HOPPER


def run_instead(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(process, "_COMMAND", (sys.executable, "-c", program))


def status(one: workers.CompileAhead) -> int | None:
    """Exit status of the processes; None while they run."""
    assert one._process._process is not None
    return one._process._process.poll()


READS = """
import os, sys
assert sys.stdin.buffer.read()
open({!r} + str(os.getpid()), "w")
print("ONE_ROW\\nSHORT_PROMPT\\nFEW_ROWS\\nALL")
"""


def test_a_compiled_model_is_not_compiled_again(
    gpu: Traits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_instead(monkeypatch, READS.format(str(tmp_path / "ran-")))
    config, said = parse_config(TINY, "it"), list[str]()
    for context in (8192, 8192, 4096):
        with workers.CompileAhead(
            CompileJob(config, can_of(config, context=context), gpu), said.append
        ) as one:
            one.wait()
    assert len(said) == 2
    assert "kernels with 2 processes" in said[0]
    assert len(list(tmp_path.glob("ran-*"))) == 2
    assert len(list(tmp_path.glob("localchat-*"))) == 2 * len(Phase)


def test_failed_processes_are_started_again_next_time(
    gpu: Traits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_instead(monkeypatch, "import sys; sys.exit(3)")
    config, said = parse_config(TINY, "it"), list[str]()
    for _ in range(2):
        with workers.CompileAhead(CompileJob(config, can_of(config), gpu), said.append) as one:
            one.wait()
    assert len(said) == 2
    assert not list(tmp_path.glob("localchat-*"))


def test_a_load_that_fails_ends_its_processes(gpu: Traits, monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, "import time; time.sleep(600)")
    config = parse_config(TINY, "it")
    with (
        pytest.raises(ValueError, match="no room"),
        workers.CompileAhead(CompileJob(config, can_of(config), gpu), lambda text: None) as one,
    ):
        raise ValueError("no room")
    assert status(one) == -signal.SIGKILL


PHASES = """
import os, sys, time
sys.stdin.buffer.read()
open({0!r} + str(os.getpid()), "w")
print("ONE_ROW", flush=True)
while not os.path.exists({1!r}): time.sleep(0.01)
print("SHORT_PROMPT\\nFEW_ROWS\\nALL", flush=True)
"""


def test_a_load_goes_on_once_the_first_phase_is_compiled(
    gpu: Traits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_instead(monkeypatch, PHASES.format(str(tmp_path / "ran-"), str(tmp_path / "go")))
    config = parse_config(TINY, "it")
    with workers.CompileAhead(CompileJob(config, can_of(config), gpu), lambda text: None) as one:
        one.wait(Phase.ONE_ROW)
    assert not one.finished()
    assert status(one) is None
    (tmp_path / "go").touch()
    one.wait(Phase.FEW_ROWS)
    one.wait()
    assert one.finished()
    assert len(list(tmp_path.glob("localchat-*"))) == len(Phase)


def test_stopped_processes_are_started_again_only_when_they_are_needed(
    gpu: Traits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_instead(monkeypatch, PHASES.format(str(tmp_path / "ran-"), str(tmp_path / "go")))
    config = parse_config(TINY, "it")
    with workers.CompileAhead(CompileJob(config, can_of(config), gpu), lambda text: None) as one:
        one.wait(Phase.ONE_ROW)
    one.stop()
    one.stop()
    assert one.finished()
    (record,) = tmp_path.glob("localchat-*")
    assert record.name.endswith(f"-{Phase.ONE_ROW.value}")
    said = list[str]()
    (tmp_path / "go").touch()
    with workers.CompileAhead(CompileJob(config, can_of(config), gpu), said.append) as later:
        later.wait(Phase.ONE_ROW)
    assert later._process._process is None
    assert not said
    later.wait(Phase.FEW_ROWS)
    later.wait()
    assert len(said) == 1
    assert len(list(tmp_path.glob("ran-*"))) == 2
    assert len(list(tmp_path.glob("localchat-*"))) == len(Phase)


def test_what_no_step_needed_is_not_compiled_by_a_program_that_soon_ends(
    gpu: Traits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_instead(monkeypatch, READS.format(str(tmp_path / "ran-")))
    config = parse_config(TINY, "it")
    one = workers.CompileAhead(CompileJob(config, can_of(config), gpu), lambda text: None)
    one.wait()
    one._record(Phase.ALL).unlink()
    later = workers.CompileAhead(CompileJob(config, can_of(config), gpu), lambda text: None)
    later.wait(Phase.ONE_ROW)
    later.stop()
    assert later.finished()
    assert len(list(tmp_path.glob("ran-*"))) == 1


def test_one_user_needs_no_kernels_of_later_phases() -> None:
    shapes = list(compile_shapes(can_of(parse_config(QWEN25, "it"))))
    by_phase = {phase: [one for one in shapes if one.phase is phase] for phase in Phase}
    alone, short, few, rest = by_phase.values()
    assert {len(one.rows) for one in (*alone, *short)} == {1}
    assert {one.rows[0][1] for one in alone} >= {1, 64, 512, 4096}
    assert {one.rows[0][1] for one in short} == {4, 8, 16}
    assert not any(drafts for one in (*alone, *short) for _, _, drafts in one.rows)
    assert {len(one.rows) for one in few} <= set(range(1, FEW_ROWS + 1))
    assert min(len(one.rows) for one in rest) > FEW_ROWS


def test_the_load_goes_on_if_processes_cannot_be_started(
    gpu: Traits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def popen(*command: Any, **how: Any) -> Any:
        raise OSError(errno.ENOMEM, "No room")

    monkeypatch.setattr(subprocess, "Popen", popen)
    config, said = parse_config(TINY, "it"), list[str]()
    with (
        CompileProcess(tmp_path / "model") as early,
        workers.CompileAhead(
            CompileJob(config, can_of(config), gpu), said.append, process=early
        ) as one,
    ):
        one.wait()
    assert len(said) == 1 and "on first use: No room" in said[0]
    assert not list(tmp_path.glob("localchat-*"))


def test_a_compiler_that_cannot_be_started_ends_no_walk() -> None:
    def launch(plan: StepPlan) -> None:
        if plan.rows:
            raise OSError(errno.EAGAIN, "No process")

    runner = SimpleNamespace(launch=launch, discard_pending=lambda: None)
    assert len(trace.launch_all(runner, 9, [CompileShape(((0, 1, 0),))] * 2)) == 2  # type: ignore[arg-type]


def test_steps_that_did_not_fit_a_small_cache_are_compiled_for_a_larger_one(
    gpu: Traits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_instead(monkeypatch, READS.format(str(tmp_path / "ran-")))
    config, said = parse_config(TINY, "it"), list[str]()
    can, counts = can_of(config), list[int]()
    for tokens in (8192, 9000, 10**6, 2 * 10**6):
        held = replace(can, kv_tokens=tokens)
        with workers.CompileAhead(CompileJob(config, held, gpu), said.append) as one:
            one.wait()
        counts.append(len(said))
    steps = [len(list(compile_shapes(replace(can, kv_tokens=n)))) for n in (8192, 9000, 10**6)]
    assert steps[0] < steps[2]
    assert counts == [1, 1 + (steps[1] > steps[0]), counts[1] + 1, counts[1] + 1]


def test_on_a_cpu_nothing_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_digest", None)
    said = list[str]()
    with workers.CompileAhead(None, said.append) as one:
        one.wait()
    assert not said
    assert one._process._process is None


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Triton's cache of the early process."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_model_that_was_never_loaded_starts_its_process_early(
    gpu: Traits, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_instead(monkeypatch, READS.format(str(cache / "ran-")))
    config, said = parse_config(TINY, "it"), list[str]()
    started = list[bool]()
    for name in ("model", "model", "other"):
        with CompileProcess(cache / name) as early:
            started.append(early._process is not None)
            with workers.CompileAhead(
                CompileJob(config, can_of(config), gpu), said.append, process=early
            ) as one:
                one.wait()
    # The last one needs the kernels of the first.
    assert started == [True, False, True]
    assert len(said) == 1
    assert len(list(cache.glob("ran-*"))) == 1
    assert early._process is not None
    assert early._process.returncode == -signal.SIGKILL


def test_an_early_process_ends_with_a_load_that_fails(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_instead(monkeypatch, "import time; time.sleep(600)")
    with pytest.raises(ValueError, match="no room"), CompileProcess(cache / "model") as early:
        raise ValueError("no room")
    assert early._process is not None
    assert early._process.returncode == -signal.SIGKILL


def test_an_early_process_finds_tritons_cache_without_triton(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert process._cache_folder() == tmp_path / ".triton/cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert process._cache_folder() == tmp_path / "cache"


def test_a_process_without_a_job_ends() -> None:
    ended = subprocess.run(
        process._COMMAND,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, b"")
