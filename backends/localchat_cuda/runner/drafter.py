"""Drafts on the GPU: a draft model or a prediction head as a second runner in the same process.

A draft is a chain of steps of that runner. The first step reads the tokens since the last draft, and samples.
Each other step reads the token that the previous one left on the device (LAST), so that the host waits only for
the last step. All sequences that request drafts are rows of the same steps. They use the slots of the first
runner, and pages of their own pool. The least recently used sequence loses its pages.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from localchat.backend_api.drafter import NO_DRAFT, Draft, DraftAsk
from localchat.backend_api.interface import (
    LAST,
    Enter,
    LogitsPosition,
    SamplingParams,
    StepPlan,
    StepResult,
    StepRow,
)
from localchat.backend_api.prepared_steps import DecodeRow
from localchat_cuda.kernels.attention.decode import WIDEST
from localchat_cuda.runner.common_steps import steps_of_drafts
from localchat_cuda.runner.device_state import StateTable
from localchat_cuda.runner.last_states import LastStates
from localchat_cuda.runner.runner import CudaRunner
from localchat_cuda.runner.step_output import DEPTH

_ROOM = 64
"""Minimum of tokens by which a text can grow before its start is dropped."""
_MEASURED = -1
"""Sequence that `measure` runs."""


@dataclass(slots=True)
class _PagedText:
    """Text of a sequence in the pages of a slot."""

    slot: int
    start: int
    """Position of the first token in the sequence."""
    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    """Tokens of the text that are not drafts. Tokens after them may be rejected."""
    blocks: list[int] = field(default_factory=list)
    entered: bool = False


@dataclass(slots=True)
class _Draft:
    """Unfinished draft."""

    ask: DraftAsk
    text: _PagedText
    same: int
    """Tokens of the text whose KV is cached."""
    new_blocks: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)


class CudaDrafter:
    """See Drafter. It owns its runner."""

    together = True
    active = True

    def __init__(
        self,
        runner: CudaRunner,
        table: StateTable,
        name: str,
        shared_vocab: int,
        states: LastStates | None = None,
    ) -> None:
        """`table`: of the runner that verifies. `shared_vocab`: tokens that both models have.

        `states`: last states, from which prediction heads draft; None: the drafter is a separate model."""
        self.runner = runner
        self.name = name
        self._table = table
        self._shared = shared_vocab
        self._states = states
        caps = runner.capabilities
        self._page = caps.block_tokens
        self._max_tokens = min(caps.context_tokens, caps.kv_tokens)
        self._free = list(range(caps.kv_tokens // caps.block_tokens))
        self._texts: OrderedDict[int, _PagedText] = OrderedDict()
        """Texts by sequence, the least recently used first."""
        self._leave: list[int] = []
        # The GPU waits for a draft, because no step is queued behind it.
        runner.sleeps = False
        runner.prepare(steps_of_drafts(caps, runner.table.scratch))
        self.token_s, self.prompt_token_s = measure(runner)

    def forget(self, seq: int) -> None:
        """Free the pages of a sequence."""
        text = self._texts.pop(seq, None)
        if text is not None:
            self._free += text.blocks
            if text.entered:
                self._leave.append(seq)
            if self._states is not None:
                self._states.spoil(seq, text.start + text.accepted)

    def earliest(self, seq: int, length: int) -> int:
        first_state = 0
        if self._states is not None:
            first_state = self._states.earliest(seq)
        elif length + _ROOM <= self._max_tokens:
            return 0
        text = self._texts.get(seq)
        if text is not None and length + _ROOM - text.start <= self._max_tokens:
            end = text.start + text.accepted
            if end >= first_state:
                return text.start
        return max(first_state, length - self._max_tokens // 2)

    def ready(self, unread: Mapping[int, int]) -> bool:
        reading: list[DecodeRow] = []
        for seq, count in unread.items():
            text = self._texts.get(seq)
            if text is None:
                # Its text is read first, in steps of its own.
                return True
            end = text.accepted + count
            width = count
            if self._states is None:
                # The draft model's KV already covers the accepted draft tokens.
                width = max(end - len(text.tokens), 1)
            reading.append(DecodeRow(seq, end - width, width))
        if any(row.width > WIDEST for row in reading):
            # After a long pause, the text is read in steps of its own.
            return True
        following = [row._replace(start=row.start + row.width, width=1) for row in reading]
        read = self.runner.prepared(reading, masked=False)
        return self.runner.prepared(following, masked=False) and read

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        requesting = {ask.seq for ask in asks}
        all_drafts = [self._begin(ask, requesting) for ask in asks]
        drafts = [draft for draft in all_drafts if draft is not None]
        if not drafts or not self._run(drafts):
            for draft in drafts:
                self.forget(draft.ask.seq)
            return [NO_DRAFT] * len(asks)
        for draft in drafts:
            draft.text.accepted = len(draft.ask.tokens)
            # The last draft token was sampled, but not read.
            new_tokens = [*draft.ask.tokens[draft.same :], *draft.tokens[:-1]]
            draft.text.tokens[draft.same :] = new_tokens
        return [
            NO_DRAFT if draft is None else usable_draft(draft.tokens, self._shared)
            for draft in all_drafts
        ]

    def _begin(self, ask: DraftAsk, requesting: set[int]) -> _Draft | None:
        """Allocate pages for a draft. None if the pool is full, or the start of the text is missing.

        `requesting`: sequences that keep their pages."""
        text = self._texts.get(ask.seq)
        if text is not None and text.start != ask.start:
            self.forget(ask.seq)
            text = None
        if text is None:
            states = self._states
            if not ask.tokens or (states is not None and ask.start < states.earliest(ask.seq)):
                return None
            text = self._texts[ask.seq] = _PagedText(self._table.sequences[ask.seq].row, ask.start)
        self._texts.move_to_end(ask.seq)
        blocks = -(-(len(ask.tokens) + ask.limit) // self._page)
        missing = max(blocks - len(text.blocks), 0)
        # Evict the least recently used texts first.
        others = [seq for seq in self._texts if seq not in requesting]
        while missing > len(self._free) and others:
            self.forget(others.pop(0))
        if missing > len(self._free) or len(ask.tokens) + ask.limit > self._max_tokens:
            self.forget(ask.seq)
            return None
        new_blocks = tuple(self._free.pop() for _ in range(missing))
        text.blocks += new_blocks
        return _Draft(ask, text, self._same(text, ask.tokens), new_blocks)

    def _same(self, text: _PagedText, tokens: Sequence[int]) -> int:
        """Return how many tokens of a text are cached."""
        same = min(text.accepted, len(tokens) - 1)
        if self._states is not None:
            # Heads read accepted draft tokens again, with the states of the model.
            return same
        limit = min(len(text.tokens), len(tokens) - 1)
        while same < limit and text.tokens[same] == tokens[same]:
            same += 1
        return same

    def _run(self, drafts: list[_Draft]) -> bool:
        """Run the steps of drafts. Return False if memory ran out."""
        chain = Chain(self.runner)
        new = [draft for draft in drafts if not draft.text.entered]
        if new or self._leave:
            leave = tuple(self._leave)
            self._leave = []
            chain.launch(StepPlan(0, enter=tuple(map(self._entry, new)), leave=leave), ())
        for draft in new:
            draft.text.entered = True
            if self._states is not None:
                with self.runner.on_stream():
                    self._states.offsets[draft.text.slot] = draft.text.start
        for draft in drafts:
            self._read_long_text(draft, chain)
        rows = [
            StepRow(
                draft.ask.seq,
                draft.text.slot,
                draft.same,
                tuple(draft.ask.tokens[draft.same :]),
                (),
                draft.new_blocks,
            )
            for draft in drafts
        ]
        limits = [draft.ask.limit for draft in drafts]
        chain.sample(rows, limits, [draft.tokens for draft in drafts])
        return chain.finish()

    def _read_long_text(self, draft: _Draft, chain: "Chain") -> None:
        """Read a long uncached text in steps of its own, except for its last tokens."""
        max_step_tokens = self.runner.capabilities.max_step_tokens
        while (unread := len(draft.ask.tokens) - draft.same) > WIDEST:
            end = draft.same + min(max_step_tokens, unread - 1)
            tokens = tuple(draft.ask.tokens[draft.same : end])
            row = StepRow(draft.ask.seq, draft.text.slot, draft.same, tokens, (), draft.new_blocks)
            chain.launch(StepPlan(0, (row,)), ())
            draft.text.tokens[draft.same :] = tokens
            draft.same = end
            draft.new_blocks = ()

    def _entry(self, draft: _Draft) -> Enter:
        ask = draft.ask
        sampling = ask.sampling.for_drafts(top_logprobs=-1)
        return Enter(ask.seq, draft.text.slot, (), 0, sampling, ask.start)


class Chain:
    """Steps of one draft, with as many in flight as the runner allows."""

    def __init__(self, runner: CudaRunner) -> None:
        self._runner = runner
        self._launched: deque[Sequence[list[int]]] = deque()
        self._ok = True

    def launch(self, plan: StepPlan, sinks: Sequence[list[int]]) -> None:
        """Queue a step. `sinks`: list that receives the token of each position."""
        if len(self._launched) == DEPTH:
            self._collect()
        self._runner.launch(plan)
        self._launched.append(sinks)

    def sample(
        self, rows: Sequence[StepRow], limits: Sequence[int], sinks: Sequence[list[int]]
    ) -> None:
        """Queue steps that sample tokens after each row.

        `limits`: largest number of tokens per row. `sinks`: list that receives the tokens of each row."""
        drafting = list(zip(rows, limits, sinks, strict=True))
        count = 0
        while drafting:
            positions = tuple(
                LogitsPosition(index, row.width - 1, row.seq)
                for index, (row, _, _) in enumerate(drafting)
            )
            step_rows = tuple(row for row, _, _ in drafting)
            self.launch(StepPlan(0, step_rows, positions), [sink for _, _, sink in drafting])
            count += 1
            drafting = [
                (StepRow(row.seq, row.slot, row.start + row.width, LAST), limit, sink)
                for row, limit, sink in drafting
                if limit > count
            ]

    def finish(self) -> bool:
        """Wait for all steps, and return True if all of them succeeded."""
        while self._launched:
            self._collect()
        return self._ok

    def _collect(self) -> None:
        result: StepResult = self._runner.collect()
        self._ok = self._ok and result.status == "ok"
        sinks = self._launched.popleft()
        for sample in result.samples:
            sinks[sample.index].append(sample.token)


def usable_draft(tokens: list[int], vocabulary: int) -> Draft:
    """Return the draft tokens before one outside the model's vocabulary, or without usable logits."""
    unusable = (n for n, token in enumerate(tokens) if not 0 <= token < vocabulary)
    count = next(unusable, len(tokens))
    return Draft(tuple(tokens[:count]), (1.0,) * count)


def measure(runner: CudaRunner) -> tuple[float, float]:
    """Measure the seconds per draft token and per prompt token of a warm runner.

    This writes only to pages without an owner."""
    caps = runner.capabilities
    length = min(512, caps.max_step_tokens, caps.context_tokens - 8, caps.kv_tokens - 8)
    blocks = tuple(range(-(-(length + 8) // caps.block_tokens)))
    entry = Enter(_MEASURED, 0, (), 0, SamplingParams(temperature=0.0))
    text = StepRow(_MEASURED, 0, 0, (0,) * length, (), blocks)
    runs = [StepPlan(0, (text,), (LogitsPosition(0, length - 1, _MEASURED),), enter=(entry,))]
    runs += [StepPlan(0, (StepRow(_MEASURED, 0, 0, (0,) * length),))] * 2
    following = StepPlan(
        0, (StepRow(_MEASURED, 0, length, LAST),), (LogitsPosition(0, 0, _MEASURED),)
    )
    runs += [following] * 6
    times = _times(runner, runs)
    return min(times[4:]), min(times[1:3]) / length


def measure_token(runner: CudaRunner) -> float:
    """Measure the seconds per draft token of a runner that writes no pages."""
    entry = Enter(_MEASURED, 0, (), 0, SamplingParams(temperature=0.0))
    following = StepPlan(0, (StepRow(_MEASURED, 0, 1, LAST),), (LogitsPosition(0, 0, _MEASURED),))
    times = _times(runner, [StepPlan(0, enter=(entry,))] + [following] * 7)
    return min(times[4:])


def _times(runner: CudaRunner, plans: Sequence[StepPlan]) -> list[float]:
    """Run plans of the sequence _MEASURED, and return the seconds of each."""
    times = []
    for plan in plans:
        begun_s = time.perf_counter()
        runner.launch(plan)
        runner.collect()
        times.append(time.perf_counter() - begun_s)
    runner.launch(StepPlan(0, leave=(_MEASURED,)))
    runner.collect()
    return times
