"""Our engine core over our runner, in this process and in the child."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localchat.backend_api.interface import LoadRequest, SamplingParams
from localchat.backend_api.sampling.reference import Draw, Sampler
from localchat.backend_api.sampling.token_counts import TokenCounts
from localchat.core.engine_core import EngineCallbacks, EngineCore
from localchat.core.input_processor import InputProcessor
from localchat.core.kv_cache import make_kv_cache_manager
from localchat.engine.events import Done, Event
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Sampling, TokenIds
from localchat.errors import LocalchatError
from localchat.fit.load_options import LoadOptions
from localchat_llamacpp.model import GgufModel
from localchat_llamacpp.native import library
from localchat_llamacpp.native_model import ContextSpec, Weights
from localchat_llamacpp.runner import LlamaCppRunner
from localchat_llamacpp.thread_count import ThreadWatch

SLOTS = 16
BACKEND = "localchat_llamacpp:LlamaCppBackend"


class ReplaySampler(Sampler):
    """Does all the work of a draw, then returns the next token of a recorded text, so that drafts can
    be measured on a random model. Every other cost is real.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.recorded: Sequence[int] = ()
        """The whole text, prompt included; empty: nothing is overruled."""

    def draw(
        self,
        row: NDArray[np.float32],
        params: SamplingParams,
        position: int,
        tally: TokenCounts | None = None,
        mask: bytes | None = None,
    ) -> Draw:
        drawn = super().draw(row, params, position, tally, mask)
        if not self.recorded:
            return drawn
        return drawn._replace(token=self.recorded[position])


class Ours:
    """The engine core and its runner, stepped in the caller's thread."""

    def __init__(self, path: Path, *, threads: int, context_tokens: int) -> None:
        self.model = GgufModel(path)
        requested = LoadOptions(
            context_tokens=context_tokens, kv_type="f16", gpu_layers=0, max_slots=SLOTS
        )
        plan = self.model.plan(requested)
        options = LoadRequest(plan, LoadOptions(threads=threads, max_slots=SLOTS))
        runner = self.model.load(options, lambda _done, _total: True, self._say)
        assert isinstance(runner, LlamaCppRunner)
        self.runner = runner
        self.threads = runner._watch.most
        self.sampler = runner._sampler = ReplaySampler(self.model.info.vocab_size)
        self.notes: list[str] = []
        self.context_spec = ContextSpec(
            context_tokens=plan.context_tokens,
            slots=SLOTS,
            step_tokens=runner.capabilities.max_step_tokens,
            kv_type=plan.kv_type,
            flash_attention=plan.flash_attention,
            threads=self.threads,
            window_only=plan.window_only,
        )
        self._input_processor = InputProcessor(self.model, plan.context_tokens, {}, self._say)
        kv_cache = make_kv_cache_manager(
            runner.capabilities, self.model.info.identity, plan.cache_ram_bytes
        )
        self._core = EngineCore(
            runner,
            self.model.tokenizer,
            kv_cache,
            EngineCallbacks(self._take, self._fail, self._say),
        )
        self._ids = count(1)
        self._ended: list[Done] = []

    @property
    def weights(self) -> Weights:
        """The weights on which a bare context may be opened."""
        return self.runner._weights

    def generate(
        self, prompts: Sequence[tuple[int, ...]], tokens: int, *, drafts: bool = False
    ) -> list[Done]:
        """Answer all prompts at once, greedily, `tokens` tokens each."""
        self._ended = []
        for prompt in prompts:
            request = greedy(prompt, tokens, speculation=drafts)
            job, _ = self._input_processor.accept(next(self._ids), request)
            self._core.submit(job)
        self._core.process_commands()
        while not self._core.idle:
            self._core.step()
        assert len(self._ended) == len(prompts), "a request got lost"
        return self._ended

    def forget_costs(self) -> None:
        """Forget the costs of steps, as after a load."""
        self._core.output_processor.step_costs._shape.clear()

    def all_threads(self) -> bool:
        """Whether all threads computed since the last call; from here on they do again."""
        watch = self.runner._watch
        if watch.threads == watch.most:
            return True
        self.runner._watch = ThreadWatch(watch.most)
        library().api.llama_set_n_threads(self.runner._context, watch.most, watch.most)
        return False

    def close(self) -> None:
        """Free everything."""
        self.runner.close()
        self.model.close()

    def _take(self, items: list[tuple[int, Event]]) -> None:
        self._ended += [event for _, event in items if isinstance(event, Done)]

    def _fail(self, _id: int, error: LocalchatError) -> None:
        raise error

    def _say(self, text: str) -> None:
        self.notes.append(text)


class ChildEngine:
    """The same request through the child process, as the front ends send it."""

    def __init__(self, path: Path, *, threads: int, context_tokens: int) -> None:
        self._options = EngineOptions(
            load=LoadOptions(
                context_tokens=context_tokens,
                kv_type="f16",
                gpu_layers=0,
                threads=threads,
                max_slots=SLOTS,
            ),
            model=path,
            backend=BACKEND,
        )
        self._engine = self._start()

    def generate(self, prompt: tuple[int, ...], tokens: int) -> Done:
        """See Ours.generate."""
        with self._engine.generate(greedy(prompt, tokens)) as stream:
            *_, last = stream
        assert isinstance(last, Done)
        return last

    def all_threads(self) -> bool:
        """See Ours.all_threads; here a new child is started."""
        fewer = any(note.startswith("Slower than usual") for note in self._notes)
        if fewer:
            self._engine.close()
            self._engine = self._start()
        return not fewer

    def close(self) -> None:
        """End the child."""
        self._engine.close()

    def _start(self) -> LocalEngine:
        self._notes: list[str] = []
        engine = LocalEngine(self._options, notify=self._notes.append)
        engine.info()
        return engine


def greedy(prompt: tuple[int, ...], tokens: int, *, speculation: bool = False) -> GenerateRequest:
    """The largest logit, and exactly `tokens` tokens."""
    return GenerateRequest(
        prompt=TokenIds(prompt),
        sampling=Sampling(temperature=0.0),
        max_tokens=tokens,
        ignore_eos=True,
        speculation=speculation,
    )
