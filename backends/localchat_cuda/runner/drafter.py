"""Drafts on the GPU: a draft model, or a model's own prediction heads, as a second runner in the same process.

A draft is a chain of that runner's steps. The first one reads what its text got since, and samples; each of
the others reads the token that the one before left on the device (LAST), so that nothing is waited for but
the last. All sequences that ask are rows of the same steps. They have the slots of the first runner, and pages
of a pool of their own: a text that was not asked for longest gives its pages up.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from localchat_cuda.runner.runner import DEPTH, CudaRunner

_ROOM = 64
"""Tokens that a text can grow by at least before its beginning is given up."""
_MEASURED = -1
"""Number of the sequence that `measure` runs."""


@dataclass(slots=True)
class _PagedText:
    """What the pages of a slot hold of a sequence."""

    slot: int
    start: int
    """Position of its first token in the sequence."""
    tokens: list[int] = field(default_factory=list)
    known: int = 0
    """Tokens that were no guesses; those after them may have to go."""
    blocks: list[int] = field(default_factory=list)
    entered: bool = False


@dataclass(slots=True)
class _Draft:
    """A draft in the making."""

    ask: DraftAsk
    text: _PagedText
    same: int
    """Tokens of the text that need no computation."""
    new_blocks: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)


class CudaDrafter:
    """See Drafter. Owns its runner."""

    together = True

    def __init__(
        self,
        runner: CudaRunner,
        table: StateTable,
        name: str,
        shared_vocab: int,
        states: LastStates | None = None,
    ) -> None:
        """`table`: of the runner that verifies. `shared_vocab`: tokens that both know. `states`: what
        prediction heads go on from; None: it is a model of its own."""
        self.runner = runner
        self.name = name
        self._table = table
        self._shared = shared_vocab
        self._states = states
        can = runner.capabilities
        self._page = can.block_tokens
        self._most = min(can.context_tokens, can.kv_tokens)
        self._free = list(range(can.kv_tokens // can.block_tokens))
        self._held: OrderedDict[int, _PagedText] = OrderedDict()
        """By sequence, least recently asked first."""
        self._leave: list[int] = []
        runner.sleeps = False  # nothing is queued behind a draft, and the GPU waits for it
        runner.prepare(steps_of_drafts(can, runner.table.scratch))
        self.token_s, self.prompt_token_s = measure(runner)

    def forget(self, seq: int) -> None:
        """Give up the pages of a sequence."""
        text = self._held.pop(seq, None)
        if text is not None:
            self._free += text.blocks
            if text.entered:
                self._leave.append(seq)
            if self._states is not None:
                self._states.spoil(seq, text.start + text.known)

    # ------------------------------------------------------------------------ before a draft

    def earliest(self, seq: int, length: int) -> int:
        held = self._held.get(seq)
        states = 0 if self._states is None else self._states.earliest(seq)
        if self._states is None and length + _ROOM <= self._most:
            return 0
        if held is not None and length + _ROOM - held.start <= self._most:
            end = held.start + held.known
            if end >= states:
                return held.start
        return max(states, length - self._most // 2)

    def ready(self, unread: Mapping[int, int]) -> bool:
        reading: list[DecodeRow] = []
        for seq, count in unread.items():
            text = self._held.get(seq)
            if text is None:
                return True  # it is read first
            end = text.known + count
            # Of its guesses, a draft model has read those that were right.
            width = count if self._states is not None else max(end - len(text.tokens), 1)
            reading.append(DecodeRow(seq, end - width, width))
        if any(row.width > WIDEST for row in reading):
            return True  # after a long pause
        following = [row._replace(start=row.start + row.width, width=1) for row in reading]
        read = self.runner.prepared(reading, masked=False)
        return self.runner.prepared(following, masked=False) and read

    # ------------------------------------------------------------------------ drafts

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        asking = {ask.seq for ask in asks}
        drafts = [self._begin(ask, asking) for ask in asks]
        made = [one for one in drafts if one is not None]
        if not made or not self._run(made):
            for one in made:
                self.forget(one.ask.seq)
            return [NO_DRAFT] * len(asks)
        for one in made:
            # The last guess was sampled, and not read.
            one.text.known = len(one.ask.tokens)
            one.text.tokens[one.same :] = [*one.ask.tokens[one.same :], *one.tokens[:-1]]
        return [NO_DRAFT if one is None else self._usable(one.tokens) for one in drafts]

    def _usable(self, tokens: list[int]) -> Draft:
        """The guesses up to one that the other model does not know, or that has no usable logits."""
        count = next(
            (i for i, one in enumerate(tokens) if not 0 <= one < self._shared), len(tokens)
        )
        return Draft(tuple(tokens[:count]), (1.0,) * count)

    def _begin(self, ask: DraftAsk, asking: set[int]) -> _Draft | None:
        """Find what is held of a text, and room for the rest; None: there is none, or its beginning is gone.

        `asking`: sequences that keep their pages.
        """
        text = self._held.get(ask.seq)
        if text is not None and text.start != ask.start:
            self.forget(ask.seq)
            text = None
        needed = -(-(len(ask.tokens) + ask.limit) // self._page)
        if text is None:
            states = self._states
            if not ask.tokens or (states is not None and ask.start < states.earliest(ask.seq)):
                return None
            text = self._held[ask.seq] = _PagedText(self._table.sequences[ask.seq].row, ask.start)
        self._held.move_to_end(ask.seq)
        more = max(needed - len(text.blocks), 0)
        others = [seq for seq in self._held if seq not in asking]
        while more > len(self._free) and others:
            self.forget(others.pop(0))
        if more > len(self._free) or len(ask.tokens) + ask.limit > self._most:
            self.forget(ask.seq)
            return None
        new_blocks = tuple(self._free.pop() for _ in range(more))
        text.blocks += new_blocks
        return _Draft(ask, text, self._same(text, ask.tokens), new_blocks)

    def _same(self, text: _PagedText, tokens: Sequence[int]) -> int:
        """Held tokens that are right. Guesses of heads are read again: by then, better states are known."""
        same = min(text.known, len(tokens) - 1)
        most = same if self._states is not None else min(len(text.tokens), len(tokens) - 1)
        while same < most and text.tokens[same] == tokens[same]:
            same += 1
        return same

    def _run(self, drafts: list[_Draft]) -> bool:
        """Run the steps of drafts; False: there was no memory for them."""
        chain = _Chain(self.runner)
        new = [one for one in drafts if not one.text.entered]
        if new or self._leave:
            leave = tuple(self._leave)
            self._leave = []
            chain.launch(StepPlan(0, enter=tuple(map(self._entry, new)), leave=leave), ())
        for one in new:
            one.text.entered = True
            if self._states is not None:
                with self.runner.on_stream():
                    self._states.offsets[one.text.slot] = one.text.start
        for one in drafts:
            self._read_all_but_a_few(one, chain)
        rows = [
            StepRow(
                one.ask.seq,
                one.text.slot,
                one.same,
                tuple(one.ask.tokens[one.same :]),
                (),
                one.new_blocks,
            )
            for one in drafts
        ]
        drafting = drafts
        guessed = 1
        while rows:
            positions = tuple(
                LogitsPosition(place, row.width - 1, row.seq) for place, row in enumerate(rows)
            )
            chain.launch(StepPlan(0, tuple(rows), positions), [one.tokens for one in drafting])
            drafting = [one for one in drafting if one.ask.limit > guessed]
            rows = [
                StepRow(one.ask.seq, one.text.slot, len(one.ask.tokens) + guessed - 1, LAST)
                for one in drafting
            ]
            guessed += 1
        return chain.finish()

    def _read_all_but_a_few(self, one: _Draft, chain: "_Chain") -> None:
        """Read a long rest of a text in steps of its own, but for what a step that decodes takes."""
        most = self.runner.capabilities.max_step_tokens
        while (left := len(one.ask.tokens) - one.same) > WIDEST:
            end = one.same + min(most, left - 1)
            tokens = tuple(one.ask.tokens[one.same : end])
            row = StepRow(one.ask.seq, one.text.slot, one.same, tokens, (), one.new_blocks)
            chain.launch(StepPlan(0, (row,)), ())
            one.text.tokens[one.same :] = tokens
            one.same = end
            one.new_blocks = ()

    def _entry(self, one: _Draft) -> Enter:
        ask = one.ask
        sampling = replace(
            ask.sampling,
            repetition_penalty=1.0,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            top_logprobs=-1,
        )
        return Enter(ask.seq, one.text.slot, (), 0, sampling, ask.start)


class _Chain:
    """Steps of one draft, as many in flight as the runner takes."""

    def __init__(self, runner: CudaRunner) -> None:
        self._runner = runner
        self._launched: deque[Sequence[list[int]]] = deque()
        self._ok = True

    def launch(self, plan: StepPlan, sinks: Sequence[list[int]]) -> None:
        """Queue a step. `sinks`: by position, where its token goes."""
        if len(self._launched) == DEPTH:
            self._collect()
        self._runner.launch(plan)
        self._launched.append(sinks)

    def finish(self) -> bool:
        """Wait for all steps; whether none of them came back short."""
        while self._launched:
            self._collect()
        return self._ok

    def _collect(self) -> None:
        result: StepResult = self._runner.collect()
        self._ok = self._ok and result.status == "ok"
        sinks = self._launched.popleft()
        for sample in result.samples:
            sinks[sample.index].append(sample.token)


def measure(runner: CudaRunner) -> tuple[float, float]:
    """Seconds of a guessed token, and of a token of a text that is read, of a warm runner.

    No sequence owns the pages that this writes."""
    can = runner.capabilities
    length = min(512, can.max_step_tokens, can.context_tokens - 8, can.kv_tokens - 8)
    blocks = tuple(range(-(-(length + 8) // can.block_tokens)))
    entry = Enter(_MEASURED, 0, (), 0, SamplingParams(temperature=0.0))
    text = StepRow(_MEASURED, 0, 0, (0,) * length, (), blocks)
    runs = [StepPlan(0, (text,), (LogitsPosition(0, length - 1, _MEASURED),), enter=(entry,))]
    runs += [StepPlan(0, (StepRow(_MEASURED, 0, 0, (0,) * length),))] * 2
    following = StepPlan(
        0, (StepRow(_MEASURED, 0, length, LAST),), (LogitsPosition(0, 0, _MEASURED),)
    )
    runs += [following] * 6
    times = []
    for plan in runs:
        begun_s = time.perf_counter()
        runner.launch(plan)
        runner.collect()
        times.append(time.perf_counter() - begun_s)
    runner.launch(StepPlan(0, leave=(_MEASURED,)))
    runner.collect()
    return min(times[4:]), min(times[1:3]) / length
