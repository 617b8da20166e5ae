"""An engine core stepped by hand over the CUDA runner and a tiny random checkpoint, on a CPU or a GPU."""

import itertools
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localchat.backend_api.interface import Capabilities, LoadRequest, ModelInfo
from localchat.backend_api.special_tokens import SpecialToken
from localchat.core.engine_core import EngineCallbacks, EngineCore
from localchat.core.input_processor import InputProcessor
from localchat.core.kv_cache import PagedKVCacheManager, make_kv_cache_manager
from localchat.core.kv_cache.block_disk_tier import BlockDiskTier
from localchat.engine.events import Event, PromptLogprobs, Text, TokenLogprob
from localchat.engine.request import GenerateRequest, Sampling, TokenIds
from localchat.errors import LocalchatError
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.kv_store.store import KVStore
from localchat_cuda import load_drafts
from localchat_cuda.config.reader import read_config
from localchat_cuda.plan.draft_plan import read_draft
from localchat_cuda.ranks.collective import Collective
from localchat_cuda.ranks.rank_weights import RankWeights
from localchat_cuda.ranks.ranked_runner import RankedRunner
from localchat_cuda.ranks.split import split_config
from localchat_cuda.ranks.workers import Workers
from localchat_cuda.runner.drafter import CudaDrafter
from localchat_cuda.runner.host_pages import HostMemory, HostPages
from localchat_cuda.runner.kv_pages import Pages
from localchat_cuda.runner.model import DeviceModel
from localchat_cuda.runner.runner import CudaRunner
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.source import CheckpointWeights, WeightSource
from tests.support.cache_integrity import check
from tests.support.greedy import NEARLY_GREEDY
from tests.support.tiny_models import CPU, VOCABULARY, spoil

ON_GPU = os.environ.get("TRITON_INTERPRET") == "0" and torch.cuda.is_available()
"""The same tests on a GPU, with the kernels in fp16: TRITON_INTERPRET=0 pytest tests/localchat_cuda."""
DEVICE = torch.device("cuda", 0) if ON_GPU else CPU
without_gpu = pytest.mark.skipif(ON_GPU, reason="stands in for a GPU, and one is here")
PAGE = 64
MAX_STEPS = 20_000
NEAR = 0.1 if ON_GPU else 1e-3
"""Where texts may part: the two best candidates so close."""


class Bytes:
    """A vocabulary of VOCABULARY tokens that never ends a text."""

    vocab_size = VOCABULARY
    bos = eos = -1
    eog: frozenset[int] = frozenset()
    add_bos = False
    longest_piece = 1
    special_tokens: tuple[SpecialToken, ...] = ()

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        return [byte % VOCABULARY for byte in text.encode()]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return bytes([token])

    def special(self, name: str) -> int:
        return -1


class _Model:
    """The part of an open model that the input processor uses."""

    def __init__(self) -> None:
        self.tokenizer = Bytes()
        self.info = ModelInfo("m", "tiny", "none", 0, 512, VOCABULARY, 0, None, identity="m")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the input processor uses {name}")


def tiny_runner(
    folder: Path,
    *,
    blocks: int = 40,
    slots: int = 8,
    context: int = 256,
    step: int = 64,
    dtype: torch.dtype = torch.float16 if ON_GPU else torch.float32,
    device: torch.device = DEVICE,
    kernels: bool = ON_GPU,
    graphs: bool = True,
    fp8_kv: bool = False,
    head_bounds: bool = False,
    host_blocks: int = 0,
    saved_states: int = 6,
    state_interval: int = 0,
    window_blocks: int = 0,
    collective: Collective | None = None,
    workers: Workers | None = None,
    host_file: int = -1,
) -> CudaRunner:
    """A runner over a checkpoint folder, with unwritten pages that spoil whatever reads them. With
    `window_blocks` windowed layers have pages of their own, the last of which nobody writes. `collective`: the
    runner is one rank of several, and with `workers` it is the first, whose host blocks are in `host_file`."""
    config = read_config(folder)
    source: WeightSource = CheckpointWeights(folder, device)
    rank = 0
    if collective is not None:
        whole = config
        rank = collective.rank
        config = split_config(whole, collective.ranks, folder.name)
        source = RankWeights(CheckpointWeights(folder, device), whole, config, rank)
    weights = load(config, source, device, dtype=dtype, head_bounds=head_bounds)
    hybrid = config.recurrent is not None
    can = Capabilities(
        context_tokens=context,
        kv_tokens=blocks * PAGE,
        max_slots=slots,
        max_rows=slots,
        max_step_tokens=step,
        depth=2,
        block_tokens=PAGE,
        window_tokens=max((0, *config.windows)) if window_blocks else 0,
        window_blocks=window_blocks,
        host_blocks=host_blocks,
        kv_type="fp8" if fp8_kv else str(dtype),
        step_target_s=0.1,
        rewind="checkpoint" if hybrid else "any",
        state_bytes=config.state_bytes,
        saved_states=saved_states if hybrid else 0,
        state_interval_tokens=state_interval if hybrid else 0,
    )
    more_windows = replace(can, window_blocks=window_blocks and window_blocks + 1)
    pages = Pages(config, more_windows, device, dtype)
    spoil(pages)
    can = replace(can, bytes_per_token=pages.page_bytes * config.ranks // PAGE)
    model = DeviceModel(config, weights, pages, kernels=kernels, collective=collective)
    host = None
    if host_blocks:
        memory = HostMemory(device, pages.page_bytes * config.ranks, host_blocks, host_file)
        memory.wait()
        host = HostPages(pages, memory, rank)
    if workers is not None:
        return RankedRunner(
            model, can, workers, graphs=graphs, graph_bytes=1 << 62, host_blocks=host
        )
    return CudaRunner(model, can, graphs=graphs, host_blocks=host)


def attach_draft_model(runner: CudaRunner, folder: Path, **how: Any) -> None:
    """Let the checkpoint in another folder draft for a runner; the rest as in `tiny_runner`."""
    how = {"slots": runner.capabilities.max_slots, "context": 256, **how}
    own = tiny_runner(folder, **how)
    runner.attach(CudaDrafter(own, runner.table, "the draft model", VOCABULARY))


def attach_own_head(runner: CudaRunner, folder: Path) -> None:
    """Let the prediction head in a runner's folder draft for it."""
    can, config = runner.capabilities, read_config(folder)
    plan = MemoryPlan(
        "cuda", 0, 0, 0, 0, 0, True, can.context_tokens, can.context_tokens, "f16", True, 0, 0, 64
    )  # fmt: skip
    request = LoadRequest(plan, LoadOptions(max_slots=can.max_slots))
    load_drafts.attach_head(runner, config, CheckpointWeights(folder, runner.device), request)


def attach_reader_of_states(runner: CudaRunner, folder: Path) -> None:
    """Let the EAGLE-3 head or assistant in a folder draft for a runner."""
    can = runner.capabilities
    draft = read_draft(str(folder), runner.model.config, gpu=ON_GPU)
    plan = MemoryPlan(
        "cuda", 0, 0, 0, 0, 0, True, can.context_tokens, can.context_tokens, "f16", True, 0, 0, 64
    )  # fmt: skip
    request = LoadRequest(plan, LoadOptions(max_slots=can.max_slots, draft=str(folder)))
    load_drafts.attach_reader_of_states(runner, draft, request)


def draft_always(loop: "TinyLoop", count: int = 3) -> None:
    """Let drafts cost no text anything, so that there always are some: a tiny model's own time says nothing."""
    model = loop.core._draft_model
    assert model is not None
    model.token_s = model.prompt_token_s = 0.0
    model.observe = lambda *_, **__: 0.0  # type: ignore[method-assign]
    model.chances = lambda limit: [1.0] * min(limit, count)  # type: ignore[method-assign]
    model.settle = lambda saved: None  # type: ignore[method-assign]
    model.pause = lambda: None  # type: ignore[method-assign]
    model._pause_left = 0
    model.drafter.ready = lambda unread: True  # type: ignore[method-assign]
    planner = loop.core._draft_planner
    planner._patience = lambda *_: math.inf  # type: ignore[method-assign]
    planner._affordable = lambda *_: True  # type: ignore[method-assign]


@dataclass
class Received:
    """Events of one request."""

    events: list[Event] = field(default_factory=list)
    error: LocalchatError | None = None

    def tokens(self, choice: int = 0) -> list[int]:
        return [entry.token for entry in self.logprobs(choice)]

    def logprobs(self, choice: int = 0) -> list[TokenLogprob]:
        texts = [one for one in self.events if isinstance(one, Text) and one.choice == choice]
        return [entry for one in texts for entry in one.logprobs]

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        return [e for one in self.events if isinstance(one, PromptLogprobs) for e in one.tokens]


def assert_same(one: Received, other: Received) -> None:
    """Equal texts, or parted where the two best candidates were as good."""
    assert other.error is None
    for mine, theirs in zip(one.logprobs(), other.logprobs(), strict=True):
        if mine.token != theirs.token:
            assert mine.top[0][2] - mine.top[1][2] < NEAR
            return


def _ignore(*measured: float) -> None:
    """Learn nothing from a step."""


class TinyLoop:
    """One engine core over one runner, its KV cache checked whenever it is idle."""

    def __init__(
        self, runner: CudaRunner, *, speculation: bool = True, disk: KVStore | None = None
    ) -> None:
        """Steps seem to cost the same on every machine: whether drafts pay depends on no clock."""
        self.runner = runner
        self.disk_tier: BlockDiskTier | None = None
        self.kv_cache = make_kv_cache_manager(runner.capabilities, "m", 0)
        if disk is not None:
            assert isinstance(self.kv_cache, PagedKVCacheManager)
            self.disk_tier = BlockDiskTier(disk, "m", "m", runner, self.kv_cache, min_tokens=64)
        self.sent: list[str] = []
        self.received: dict[int, Received] = {}
        self.core = EngineCore(
            runner, Bytes(), self.kv_cache, EngineCallbacks(self._events, self._failure, self.sent.append),
            speculation=speculation, disk_tier=self.disk_tier,
        )  # fmt: skip
        costs = self.core._step_costs
        costs.observe(1, 1.0)
        for learn in ("observe", "observe_wait", "observe_pause"):
            setattr(costs, learn, _ignore)
        context = runner.capabilities.context_tokens
        self.input_processor = InputProcessor(_Model(), context, {}, self.sent.append)  # type: ignore[arg-type]
        self._ids = itertools.count(1)

    def _events(self, items: list[tuple[int, Event]]) -> None:
        for id_, event in items:
            self.received[id_].events.append(event)

    def _failure(self, id_: int, error: LocalchatError) -> None:
        self.received[id_].error = error

    def ask(self, request: GenerateRequest) -> int:
        id_ = next(self._ids)
        request_state, accepted = self.input_processor.accept(id_, request)
        self.received[id_] = Received([accepted])
        self.core.submit(request_state)
        return id_

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.core.process_commands()
            self.core.step()

    def run_until_idle(self) -> None:
        """Step until all is done; nothing may be left over."""
        for _ in range(MAX_STEPS):
            if self.core.idle:
                break
            self.step()
            # Threads that read the disk, or run other ranks, need the interpreter.
            time.sleep(0)
        else:
            raise AssertionError("the engine core does not become idle")
        self.step()
        check(self.kv_cache)
        assert self.kv_cache.usage().live == 0
        assert not self.runner.table.sequences, "the runner still knows a sequence"
        assert not self.core.output_processor.requests

    def say(self, request: GenerateRequest) -> Received:
        id_ = self.ask(request)
        self.run_until_idle()
        received = self.received[id_]
        assert received.error is None, received.error
        return received


def request(prompt: Iterable[int], **changes: Any) -> GenerateRequest:
    """Token ids in, greedy unless a temperature is given, with log probabilities."""
    fields = set(Sampling.__struct_fields__)
    sampling = {name: changes.pop(name) for name in list(changes) if name in fields}
    sampling.setdefault("temperature", NEARLY_GREEDY)
    chosen = {"max_tokens": 24, "logprobs": 2, "speculation": False, **changes}
    return GenerateRequest(
        TokenIds(tuple(prompt)), loop_guard=False, sampling=Sampling(**sampling), **chosen
    )
