"""An engine core over a runner on a clock of its own: steps take what a table says, as does the host's work.

No machine's load is in its figures, and the texts that its sequences write are given.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from localchat.backend_api.interface import (
    Capabilities,
    MemoryReport,
    Sample,
    StepPlan,
    StepResult,
    Widths,
)
from localchat.backend_api.prepared_steps import DecodeRow
from localchat.core import engine_core
from localchat.core.engine_core import EngineCallbacks, EngineCore
from localchat.core.input_processor import InputProcessor
from localchat.core.kv_cache import make_kv_cache_manager
from localchat.engine.events import Event, Text
from localchat.engine.request import GenerateRequest, Sampling, TokenIds
from localchat.errors import LocalchatError
from tests.support.greedy import NEARLY_GREEDY
from tests.support.scripted_backend import Script, ScriptedModel


class Machine(NamedTuple):
    """What steps take on a machine, in milliseconds."""

    capabilities: Capabilities
    decode_ms: Mapping[int, float]
    """Of a step by its rows; between these as much as `pads` says."""
    pads: bool
    """Rows are padded to those of the table; otherwise the time between two is in proportion."""
    prompt_ms: float
    prompt_token_ms: float
    launch_ms: float
    launch_row_ms: float
    result_row_ms: float
    eager_ms: float = 0.0
    """The host's time for a step with drafts that was not prepared, kernel by kernel."""

    def taken_ms(self, prompts: int, decoding: int) -> float:
        """Time of a step with so many tokens of prompts and of decode rows."""
        if prompts:
            return self.prompt_ms + self.prompt_token_ms * (prompts + decoding)
        if not decoding:
            return 0.0
        rows = list(self.decode_ms)
        above = bisect_left(rows, decoding)
        high = self.decode_ms[rows[above]]
        if self.pads or rows[above] == decoding:
            return high
        low = self.decode_ms[rows[above - 1]]
        part = (decoding - rows[above - 1]) / (rows[above] - rows[above - 1])
        return low + (high - low) * part


_GPU_MS = {1: 1.4, 2: 1.5, 4: 1.6, 8: 1.9, 16: 2.2, 32: 2.9, 64: 4.1, 128: 6.3, 256: 9.5}
_CPU_MS = {1: 30, 2: 37, 4: 51, 8: 90, 16: 144, 32: 280, 64: 510, 128: 990, 256: 1950}
CPU = Machine(
    Capabilities(
        context_tokens=4096, kv_tokens=1 << 18, max_slots=128, max_rows=128, max_step_tokens=512,
        block_tokens=16, bytes_per_token=1, row_cost=0.5,
    ),
    _CPU_MS, pads=False, prompt_ms=0.0, prompt_token_ms=7.6, launch_ms=0.1, launch_row_ms=0.01,
    result_row_ms=0.05,
)  # fmt: skip
"""About a model of half a gigabyte with llama.cpp on two cores: of many rows each costs half of one alone."""
GPU = Machine(
    replace(
        CPU.capabilities, max_step_tokens=4096, depth=2, step_target_s=0.2, shared_step_target_s=0.021,
        draft_rows=8, draft_step_tokens=64, prepares_steps=True, row_cost=0.15,
        widths=Widths(decode=tuple(_GPU_MS)),
    ),
    _GPU_MS, pads=True, prompt_ms=2.0, prompt_token_ms=0.021, launch_ms=0.4, launch_row_ms=0.008,
    result_row_ms=0.02, eager_ms=25.0,
)  # fmt: skip
"""About a 7B model in 4 bits on one H200."""
_PROMPT_WIDTH = 33
"""Rows as wide as this are prompts; one is computed with up to 31 drafts."""
Texts = Sequence[tuple[list[int], list[int]]]
"""Prompt and answer of each request."""


class Outcome(NamedTuple):
    """What the requests saw."""

    tokens_per_s: float
    first_s: list[float]
    """Time to the first token of each."""
    gaps_s: list[float]
    """Between the tokens of one answer, in ascending order."""


class TimedRunner:
    """Runs plans on its own clock."""

    def __init__(self, machine: Machine) -> None:
        self.capabilities, self._machine = machine.capabilities, machine
        self.texts: dict[int, list[int]] = {}
        """Prompt and answer by number of the sequence."""
        self.now_s = self._free_s = 0.0
        self.plans: list[StepPlan] = []
        self.prepares = True
        """Whether steps with drafts are prepared in the end."""
        self._prepared: set[tuple[int, int]] = set()
        self._wanted: set[tuple[int, int]] = set()
        self._pending: deque[tuple[StepPlan, float, float]] = deque()

    def perf_counter(self) -> float:
        return self.now_s

    def prepared(self, rows: Sequence[DecodeRow], *, masked: bool) -> bool:
        kind = self._kind([row.width for row in rows])
        self._wanted.add(kind)
        return kind in self._prepared

    def ready_rows(self, sequences: int) -> int:
        return self.capabilities.max_rows

    def _kind(self, widths: Sequence[int]) -> tuple[int, int]:
        """Rows of a step, padding among them, and its sequences."""
        rows = list(self._machine.decode_ms)
        return rows[bisect_left(rows, sum(widths))], 1 << (len(widths) - 1).bit_length()

    def warm_up_next(self) -> bool:
        if not self.prepares or not self._wanted:
            return False
        self._prepared.add(self._wanted.pop())
        return True

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        machine = self._machine
        self.now_s += (machine.launch_ms + machine.launch_row_ms * len(plan.rows)) / 1e3
        if any(row.drafts for row in plan.rows):
            kind = self._kind([row.width for row in plan.rows])
            self.now_s += 0.0 if kind in self._prepared else machine.eager_ms / 1e3
        prompts = sum(row.width for row in plan.rows if row.width >= _PROMPT_WIDTH)
        decoding = sum(row.width for row in plan.rows) - prompts
        taken_s = machine.taken_ms(prompts, decoding) / 1e3
        self._free_s = max(self.now_s, self._free_s) + taken_s
        self._pending.append((plan, taken_s, self._free_s))

    def collect(self) -> StepResult:
        plan, taken_s, end_s = self._pending.popleft()
        self.now_s = max(self.now_s, end_s) + self._machine.result_row_ms * len(plan.rows) / 1e3
        samples: list[Sample] = []
        rejected = -1
        for number, target in enumerate(plan.positions):
            if target.row == rejected:
                continue
            row = plan.rows[target.row]
            token = self.texts[row.seq][row.start + target.offset + 1]
            samples.append(Sample(number, token))
            draft = target.offset - (row.width - len(row.drafts)) + 1
            if 0 <= draft < len(row.drafts) and row.drafts[draft] != token:
                rejected = target.row
        widths = tuple(row.width for row in plan.rows)
        return StepResult(plan.number, tuple(samples), widths, elapsed_s=taken_s)

    def abort(self) -> None:
        """Nothing takes long here."""

    def memory(self) -> MemoryReport:
        return MemoryReport(0, 0, 0, 0)

    def close(self) -> None:
        """Nothing to give back."""


class TimedCore:
    """Answers requests, and measures them by the runner's clock."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, machine: Machine = GPU, *, speculation: bool = True
    ) -> None:
        can = machine.capabilities
        self.runner = TimedRunner(machine)
        monkeypatch.setattr(engine_core, "time", self.runner)
        model = ScriptedModel(Path(__file__), Script(context_tokens=can.context_tokens))
        self._input_processor = InputProcessor(model, can.context_tokens, {}, print)
        self._core = EngineCore(
            self.runner,
            model.tokenizer,
            make_kv_cache_manager(can, "timed", 0),
            EngineCallbacks(self._events, self._failed, print),
            speculation=speculation,
        )
        self._said_s: dict[int, list[float]] = {}
        self._next_id = 1

    def _events(self, items: list[tuple[int, Event]]) -> None:
        for id_, event in items:
            if isinstance(event, Text):
                self._said_s.setdefault(id_, []).extend([self.runner.now_s] * len(event.text))

    def _failed(self, _id: int, error: LocalchatError) -> None:
        raise error

    def answer(self, texts: Texts, *, apart_s: float = 0.001, seed: int | None = None) -> Outcome:
        """Ask for all texts, a millisecond apart. Tokens must be letters of ASCII."""
        began_s, core = self.runner.now_s, self._core
        due = deque[tuple[float, int, GenerateRequest, list[int]]]()
        for number, (prompt, answer) in enumerate(texts):
            request = GenerateRequest(
                TokenIds(tuple(prompt)), Sampling(temperature=NEARLY_GREEDY, seed=seed), max_tokens=len(answer),
                ignore_eos=True, salt=str(self._next_id),
            )  # fmt: skip
            due.append((began_s + number * apart_s, self._next_id, request, [*prompt, *answer]))
            self._next_id += 1
        asked_s = {id_: at_s for at_s, id_, _, _ in due}
        while due or not core.idle:
            if core.idle:
                self.runner.now_s = max(self.runner.now_s, due[0][0])
            while due and due[0][0] <= self.runner.now_s:
                _, id_, request, text = due.popleft()
                state, _ = self._input_processor.accept(id_, request)
                self.runner.texts[state.sequences[0].number] = text
                core.submit(state)
            core.process_commands()
            core.step()
        while self.runner.warm_up_next():
            pass
        said = {id_: self._said_s[id_] for id_ in asked_s}
        return Outcome(
            sum(map(len, said.values())) / (self.runner.now_s - began_s),
            [said[id_][0] - at_s for id_, at_s in asked_s.items()],
            sorted(b - a for each in said.values() for a, b in pairwise(each)),
        )
