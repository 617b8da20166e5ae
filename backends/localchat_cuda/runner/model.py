"""A loaded model on its device: weights, KV pages, and a step from token ids to logits."""

from collections.abc import Callable
from dataclasses import replace

import torch

from localchat_cuda.architectures import ARCHITECTURES, eagle3, prediction_head
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.kernels import fp8_int8
from localchat_cuda.kernels.sampling.rescore import MAX_ROWS, Rescoring
from localchat_cuda.layers.dense import DenseLayers
from localchat_cuda.layers.output_head import compute_logits
from localchat_cuda.layers.packed import PackedLayers
from localchat_cuda.ranks.collective import Collective
from localchat_cuda.runner.input_batch import ModelInputs
from localchat_cuda.runner.kv_pages import Pages
from localchat_cuda.runner.last_states import LastStates
from localchat_cuda.weights.eagle import EagleWeights
from localchat_cuda.weights.model_weights import ModelWeights
from localchat_cuda.weights.prediction_head import HeadWeights


class DeviceModel:
    """Forward pass in two parts: last states of the tokens, and logits of some of them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        pages: Pages,
        *,
        kernels: bool,
        collective: Collective | None = None,
    ) -> None:
        """`kernels`: run the kernels; otherwise their plain-torch references.

        `collective`: ranks that compute the model together, of which this is one."""
        self.config = config
        self.weights = weights
        self.pages = pages
        self.kernels = kernels
        self.collective = collective
        self._forward: Callable[..., torch.Tensor] = ARCHITECTURES[config.architecture].forward
        self.last_states: LastStates | None = None
        """Store for the states of every step, which prediction heads read."""
        self.eagle: EagleWeights | None = None
        """Head whose projection of several layers' states is stored; None: the last states are stored."""

    def hidden_states(self, inputs: ModelInputs) -> torch.Tensor:
        """Return the last states [P, hidden] of the tokens in `logits_indices`, and write KV pages."""
        store = self.last_states
        if store is None:
            return self._forward(self._layers(inputs), self.weights)
        if self.eagle is None:
            # The store needs the states of all tokens, so no row may be dropped.
            layers = self._layers(replace(inputs, logits_indices=None))
            states = self._forward(layers, self.weights)
            store.store(states, inputs.slots, inputs.positions)
            return _selected(states, inputs.logits_indices)
        ops = self._layers(inputs)
        ops.taps = self.eagle.config.taps
        states = self._forward(ops, self.weights)
        joined = torch.cat([ops.tapped[layer] for layer in ops.taps], 1)
        fused = torch.matmul(joined, self.eagle.fuse.t())
        store.store(fused, inputs.slots, inputs.positions)
        return states

    def _layers(self, inputs: ModelInputs) -> PackedLayers | DenseLayers:
        limit = self.weights.packed_rows(self.pages.device, prompts=inputs.prefill is not None)
        packed = self.kernels and inputs.ids.shape[0] <= limit
        layers = PackedLayers if packed else DenseLayers
        return layers(
            self.config, inputs, self.pages, kernels=self.kernels, collective=self.collective
        )

    def logits(self, states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits fp32 [P, vocabulary], in `out` unless None."""
        head = self.weights.head
        cap = self.config.head_cap
        if self.collective is None:
            return compute_logits(states, head, cap, kernels=self.kernels, out=out)
        # Each rank has some of the head's rows, the last one perhaps with padding.
        part = compute_logits(states, head, cap, kernels=self.kernels)
        logits = self.collective.join_columns(part)[:, : self.config.vocabulary]
        return logits if out is None else out.copy_(logits)

    @property
    def approximate_rows(self) -> int:
        """Largest number of rows of `approximate_logits`; 0: no int8 copy of the head."""
        if self.kernels and self.weights.bounded_head is not None:
            return MAX_ROWS
        return 0

    def approximate_logits(
        self, states: torch.Tensor, out: torch.Tensor
    ) -> tuple[torch.Tensor, Rescoring]:
        """Write the logits of the head's int8 copy to `out`. Return them and the data for exact ones."""
        head = self.weights.head
        copy = self.weights.bounded_head
        assert copy is not None
        assert isinstance(head, torch.Tensor)
        logits = fp8_int8.logits(states, copy.weight, out=out)
        return logits, Rescoring(states, head, copy.bounds)


class HeadModel(DeviceModel):
    """Prediction head as a separate model, which drafts from another model's states."""

    def __init__(
        self,
        config: ModelConfig,
        weights: HeadWeights | EagleWeights,
        pages: Pages,
        states: LastStates,
        *,
        kernels: bool,
    ) -> None:
        """`states`: of the model's tokens, to which the head adds those of draft tokens."""
        super().__init__(config, weights.model, pages, kernels=kernels)
        self._head = weights
        self._before = states

    def hidden_states(self, inputs: ModelInputs) -> torch.Tensor:
        before = self._before
        indices = inputs.logits_indices
        layers = DenseLayers(
            self.config, replace(inputs, logits_indices=None), self.pages, kernels=self.kernels
        )
        previous = before.before(inputs.slots, inputs.positions)
        if isinstance(self._head, HeadWeights):
            states = prediction_head.forward(layers, self._head, previous)
            next_states = states
        else:
            states, next_states = eagle3.forward(layers, self._head, previous)
        slots = inputs.slots
        positions = inputs.positions
        if indices is not None:
            # Keep the model's states of the other tokens, which the next chunk may read.
            slots = slots[indices]
            positions = positions[indices]
        before.store(_selected(next_states, indices), slots, positions, head=True)
        return _selected(states, indices)

    def logits(self, states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(self._head, HeadWeights):
            return super().logits(states, out)
        if out is None:
            out = states.new_empty(states.shape[0], self.config.vocabulary, dtype=torch.float32)
        logits = compute_logits(states, self.weights.head, kernels=self.kernels)
        return out.fill_(float("-inf")).index_copy_(1, self._head.tokens, logits)


def _selected(states: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
    return states if indices is None else states[indices]
