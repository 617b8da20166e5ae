"""Drafts of a Gemma 4 assistant, which reads the KV pages of its model.

A draft is a chain of steps with one token per sequence, as a prediction head's (drafter.py). An assistant has
no keys and values, so it reads only the last token of a text, and nothing has to be evicted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from localchat.backend_api.drafter import NO_DRAFT, Draft, DraftAsk
from localchat.backend_api.interface import Enter, StepPlan, StepRow
from localchat.backend_api.prepared_steps import DecodeRow
from localchat_cuda.architectures import gemma4_assistant
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.kernels.attention.reference import AttentionBatch
from localchat_cuda.layers.dense import DenseLayers
from localchat_cuda.layers.output_head import compute_logits
from localchat_cuda.runner.common_steps import steps_of_drafts
from localchat_cuda.runner.device_state import StateTable
from localchat_cuda.runner.drafter import Chain, measure_token, usable_draft
from localchat_cuda.runner.input_batch import ModelInputs
from localchat_cuda.runner.kv_pages import Pages
from localchat_cuda.runner.last_states import LastStates
from localchat_cuda.runner.model import DeviceModel
from localchat_cuda.runner.runner import CudaRunner
from localchat_cuda.weights.assistant import AssistantWeights


class AssistantModel(DeviceModel):
    """The assistant as a model of its own. Its steps have one token per sequence."""

    def __init__(
        self,
        config: ModelConfig,
        weights: AssistantWeights,
        pages: Pages,
        states: LastStates,
        table: StateTable,
        active: int,
        *,
        kernels: bool,
    ) -> None:
        """`pages`, `states`, `table`: of the model that verifies. `active`: see AssistantConfig."""
        super().__init__(config, weights.model, pages, kernels=kernels)
        self._weights = weights
        self._states = states
        self._table = table
        self._active = active
        self.anchors = torch.ones(table.slots + 1, dtype=torch.int32, device=pages.device)
        """Position of the last token of each slot's text. Only the tokens before it have keys and values."""

    def hidden_states(self, inputs: ModelInputs) -> torch.Tensor:
        previous = self._states.before(inputs.slots, inputs.positions)
        ops = DenseLayers(self.config, self._anchored(inputs), self.pages, kernels=self.kernels)
        states, next_states = gemma4_assistant.forward(ops, self._weights, previous)
        self._states.store(next_states, inputs.slots, inputs.positions, head=True)
        if inputs.logits_indices is None:
            return states
        return states[inputs.logits_indices]

    def _anchored(self, inputs: ModelInputs) -> ModelInputs:
        """Return the step with queries at the end of texts, over the model's pages."""
        decode = inputs.decode and self._anchored_batch(inputs.decode)
        return replace(
            inputs,
            positions=self.anchors[inputs.slots.long()],
            block_tables=self._table.block_tables,
            window_tables=self._table.window_tables,
            logits_indices=None,
            batch=self._anchored_batch(inputs.batch),
            decode=decode,
        )

    def _anchored_batch(self, batch: AttentionBatch) -> AttentionBatch:
        lengths = self.anchors[batch.slots.long()]
        return batch._replace(lengths=lengths, tables=self._table.block_tables)

    def logits(self, states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits fp32 [P, vocabulary]. With centroids, tokens of inactive groups have -inf."""
        head = self.weights.head
        centroids = self._weights.centroids
        ordering = self._weights.ordering
        if centroids is None or ordering is None:
            return compute_logits(states, head, kernels=self.kernels, out=out)
        assert isinstance(head, torch.Tensor)
        if out is None:
            out = states.new_empty(states.shape[0], self.config.vocabulary, dtype=torch.float32)
        groups = torch.matmul(states, centroids.t()).topk(self._active, 1).indices
        tokens = ordering[groups].flatten(1)
        logits = torch.matmul(head[tokens], states[:, :, None])[:, :, 0]
        return out.fill_(float("-inf")).scatter_(1, tokens, logits.float())


class AssistantDrafter:
    """See Drafter. It owns its runner."""

    together = True
    active = True
    prompt_token_s = 0.0
    name = "the model's assistant"

    def __init__(
        self, runner: CudaRunner, model: AssistantModel, table: StateTable, states: LastStates
    ) -> None:
        """`model`: of the runner. `table`, `states`: of the model that verifies."""
        self.runner = runner
        self._model = model
        self._table = table
        self._states = states
        self._entered: set[int] = set()
        self._leave: list[int] = []
        # The GPU waits for a draft, because no step is queued behind it.
        runner.sleeps = False
        runner.prepare(steps_of_drafts(runner.capabilities, runner.table.scratch, widths=(1,)))
        self.token_s = measure_token(runner)

    def forget(self, seq: int) -> None:
        """Remove a sequence that left or starts again."""
        if seq in self._entered:
            self._entered.remove(seq)
            self._leave.append(seq)

    def earliest(self, seq: int, length: int) -> int:
        return max(length - 1, self._states.earliest(seq))

    def ready(self, unread: Mapping[int, int]) -> bool:
        entered = [seq for seq in unread if seq in self._entered]
        rows = [DecodeRow(seq, self._states.end(seq), 1) for seq in entered]
        return not rows or self.runner.prepared(rows, masked=False)

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        drafts: dict[int, list[int]] = {ask.seq: [] for ask in asks if self._can_draft(ask)}
        asking = [ask for ask in asks if ask.seq in drafts]
        if not asking or not self._run(asking, drafts):
            return [NO_DRAFT] * len(asks)
        vocabulary = self.runner.model.config.vocabulary
        return [usable_draft(drafts.get(ask.seq, []), vocabulary) for ask in asks]

    def _can_draft(self, ask: DraftAsk) -> bool:
        """Return True if the previous token's state is stored and the draft fits."""
        position = _last_position(ask)
        context = self.runner.capabilities.context_tokens
        is_known = bool(ask.tokens) and position >= self._states.earliest(ask.seq)
        return is_known and position + ask.limit < context

    def _run(self, asks: Sequence[DraftAsk], drafts: Mapping[int, list[int]]) -> bool:
        """Run the steps and add their tokens to `drafts`. Return False if memory ran out."""
        chain = Chain(self.runner)
        slots = {ask.seq: self._table.sequences[ask.seq].row for ask in asks}
        new = [
            Enter(ask.seq, slots[ask.seq], (), 0, ask.sampling.for_drafts(top_logprobs=-1))
            for ask in asks
            if ask.seq not in self._entered
        ]
        if new or self._leave:
            chain.launch(StepPlan(0, enter=tuple(new), leave=tuple(self._leave)), ())
            self._leave = []
            self._entered.update(entry.seq for entry in new)
        with self.runner.on_stream():
            for ask in asks:
                self._model.anchors[slots[ask.seq]] = _last_position(ask)
        rows = [
            StepRow(ask.seq, slots[ask.seq], _last_position(ask), (ask.tokens[-1],)) for ask in asks
        ]
        chain.sample(rows, [ask.limit for ask in asks], [drafts[ask.seq] for ask in asks])
        return chain.finish()


def _last_position(ask: DraftAsk) -> int:
    return ask.start + len(ask.tokens) - 1
