"""Drives the engine core over the CUDA runner in this process, with random weights of a 7B model."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import torch

from localchat.backend_api.interface import Capabilities, LoadRequest, ModelInfo, Runner
from localchat.backend_api.special_tokens import SpecialToken
from localchat.core.engine_core import EngineCallbacks, EngineCore
from localchat.core.input_processor import InputProcessor
from localchat.core.kv_cache import PagedKVCacheManager, make_kv_cache_manager
from localchat.core.kv_cache.block_disk_tier import BlockDiskTier
from localchat.core.sequence import RequestState
from localchat.engine.events import Event, Text
from localchat.engine.request import GenerateRequest, Sampling, TokenIds
from localchat.errors import LocalchatError
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.kv_store.store import KVStore
from localchat_cuda.compile_ahead.job import CompileJob
from localchat_cuda.compile_ahead.workers import CompileAhead
from localchat_cuda.config.gguf import LayerFormats
from localchat_cuda.config.model import PAGE_TOKENS, ModelConfig
from localchat_cuda.config.reader import parse_config
from localchat_cuda.kernels.launch import traits
from localchat_cuda.kernels.sampling.rescore import Rescoring
from localchat_cuda.load import capabilities, random_weights, warm_up
from localchat_cuda.plan.memory_plan import can_bound_head, kv_token_bytes, kv_types
from localchat_cuda.runner.host_pages import HostMemory, HostPages
from localchat_cuda.runner.kv_pages import Pages
from localchat_cuda.runner.model import DeviceModel
from localchat_cuda.runner.runner import CudaRunner
from localchat_cuda.runner.sampler import SampleBatch, SampledTokens, TritonSampler
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.model_weights import with_unpacked
from localchat_cuda.weights.source import WeightSource
from scripts.bench.cuda.shapes import QWEN, STORED

GPU = torch.device("cuda", 0)


def config_of(stored: str = "") -> ModelConfig:
    """Qwen2.5-7B from its config.json, its layers stored in one of the formats of STORED."""
    raw = {**QWEN, "torch_dtype": "float16" if stored else "bfloat16"}
    return parse_config(raw | STORED[stored], "Qwen2.5-7B")


def runner_of(
    config: ModelConfig, *, slots: int, kv_tokens: int, context: int = 8192, step: int = 8192,
    graphs: bool = True, kv_type: str | None = None, unpacked: bool = True,
    head_bounds: bool | None = None, cache_ram_bytes: int = 0, saved_states: int = 8,
    source: WeightSource | None = None, formats: LayerFormats = (),
) -> CudaRunner:  # fmt: skip
    """A warm runner over random weights, or those of a source. `saved_states`: of a hybrid; `formats`: of a
    GGUF file. `head_bounds` None: as where memory is plentiful."""
    if head_bounds is None:
        head_bounds = can_bound_head(config)
    blocks = kv_tokens // PAGE_TOKENS
    plan = _plan(context, blocks, config, step, kv_type or kv_types(config)[0])
    plan = replace(plan, cache_ram_bytes=cache_ram_bytes)
    if config.recurrent is not None:
        plan = replace(plan, saved_states=saved_states)
    can = capabilities(config, LoadRequest(plan, LoadOptions(max_slots=slots)))
    job = CompileJob(config, can, traits(GPU), unpacked, head_bounds, formats)
    with CompileAhead(job, print) as ahead:
        source = source or random_weights(config, GPU)
        weights = load(config, source, GPU, head_bounds=head_bounds)
        ahead.wait()
    dtype = torch.float16 if config.dtype == "float16" else torch.bfloat16
    weights = with_unpacked(weights, dtype) if unpacked else weights
    pages = Pages(config, can, GPU, dtype)
    model = DeviceModel(config, weights, pages, kernels=GPU.type == "cuda")
    host_blocks = None
    if can.host_blocks:
        began_s = time.perf_counter()
        memory = HostMemory(GPU, pages.page_bytes, can.host_blocks)
        memory.wait()
        print(f"{cache_ram_bytes / 1e9:.1f} GB pinned in {time.perf_counter() - began_s:.2f} s")
        host_blocks = HostPages(pages, memory)
        can = replace(can, host_block_s=host_blocks.load_s(blocks))
        print(f"a block is loaded in {can.host_block_s * 1e6:.0f} us", flush=True)
    runner = CudaRunner(model, can, graphs=graphs, host_blocks=host_blocks)
    warm_up(runner)
    return runner


def _plan(context: int, blocks: int, config: ModelConfig, step: int, kv_type: str) -> MemoryPlan:
    kv = blocks * PAGE_TOKENS * kv_token_bytes(config, kv_type)
    return MemoryPlan("cuda", 0, kv, 0, 0, 0, True, context, context, kv_type, True, 0, 0, step)


class Letters:
    """A vocabulary without files: every token is a letter, none ends a text."""

    bos = eos = -1
    eog: frozenset[int] = frozenset()
    add_bos = False
    longest_piece = 1
    special_tokens: tuple[SpecialToken, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        return [ord(letter) % self.vocab_size for letter in text]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return bytes([97 + token % 26])

    def special(self, name: str) -> int:
        return -1


class _Model:
    def __init__(self, vocab_size: int) -> None:
        self.tokenizer = Letters(vocab_size)
        self.info = ModelInfo("m", "qwen2", "none", 0, 8192, vocab_size, 0, None, identity="m")


@dataclass
class Asked:
    """A request: when it was made, and when its texts came (tokens of one step together)."""

    begun_s: float
    tokens: int = 0
    times_s: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    ended_s: float = 0.0
    cached: int = 0


class Engine:
    """One engine core over a runner. `ask` queues; `settle` steps until all requests are answered."""

    def __init__(
        self, runner: Runner, vocabulary: int, *, speculation: bool = False, tiers: bool = True,
        disk: KVStore | None = None,
    ) -> None:  # fmt: skip
        """`tiers` False: nothing is kept in host memory. `disk`: keep what has an owner there."""
        self.runner = runner
        can = runner.capabilities if tiers else replace(runner.capabilities, host_blocks=0)
        self.kv_cache = make_kv_cache_manager(can, "m", 0)
        self.disk_tier: BlockDiskTier | None = None
        if disk is not None:
            assert isinstance(self.kv_cache, PagedKVCacheManager)
            self.disk_tier = BlockDiskTier(disk, "m", "m", runner, self.kv_cache)
        model = _Model(vocabulary)
        self.asked: dict[int, Asked] = {}
        self.states: list[RequestState] = []
        self.failures: list[str] = []
        self.loop = EngineCore(
            runner, model.tokenizer, self.kv_cache, EngineCallbacks(self._events, self._failed, print),
            speculation=speculation, disk_tier=self.disk_tier,
        )  # fmt: skip
        context = runner.capabilities.context_tokens
        self.input_processor = InputProcessor(model, context, {}, print)  # type: ignore[arg-type]
        self._ids = count(1)

    def _events(self, items: list[tuple[int, Event]]) -> None:
        now_s = time.perf_counter()
        for id_, event in items:
            if isinstance(event, Text):
                asked = self.asked[id_]
                asked.times_s.append(now_s)
                asked.tokens += len(event.text)
                asked.text.append(event.text)
                asked.ended_s = now_s

    def _failed(self, id_: int, error: LocalchatError) -> None:
        self.failures.append(str(error))

    def ask(self, tokens: Sequence[int], most: int, **changes: Any) -> Asked:  # noqa: ANN401
        id_ = next(self._ids)
        self.asked[id_] = asked = Asked(time.perf_counter())
        fields = {"temperature": 0.0, **changes.pop("sampling", {})}
        request = GenerateRequest(
            TokenIds(tuple(tokens)), sampling=Sampling(**fields), max_tokens=most, ignore_eos=True,
            **{"speculation": False, "salt": str(id_), **changes},
        )  # fmt: skip
        job, _ = self.input_processor.accept(id_, request)
        self.states.append(job)
        self.loop.submit(job)
        return asked

    def turn(self) -> None:
        loop = self.loop
        if loop._reading and not loop._in_flight and loop._scheduler.idle:
            loop._wait_for_command()()  # as `run` does: other threads read
        self.loop.process_commands()
        self.loop.step()

    def settle(self, until: Callable[[], bool] | None = None) -> None:
        while not self.loop.idle and not (until is not None and until()):
            self.turn()
        assert not self.failures, self.failures


class ReplaySampler(TritonSampler):
    """Does all the work of sampling, then returns a recorded text: measures drafts on random weights."""

    recorded: torch.Tensor | None = None
    """The whole text int32, prompt included; None: nothing is replaced."""

    def sample(
        self, logits: torch.Tensor, batch: SampleBatch, out: SampledTokens,
        rescoring: Rescoring | None = None,
    ) -> None:  # fmt: skip
        super().sample(logits, batch, out, rescoring)
        if self.recorded is not None:
            positions = batch.position_slice.view()
            out.tokens.copy_(torch.index_select(self.recorded, 0, positions))


def random_tokens(draw: np.random.Generator, size: int) -> tuple[int, ...]:
    """Token ids that every vocabulary here has."""
    return tuple(draw.integers(1000, 32_000, size).tolist())


def shrunk(can: Capabilities, **changes: Any) -> Capabilities:  # noqa: ANN401
    """Limits for the engine core that differ from those that the runner was made for."""
    return replace(can, **changes)
