"""A loaded model on its device: weights, KV pages, and a step from token ids to logits."""

from dataclasses import replace
from typing import NamedTuple

import torch

from localchat_cuda.architectures import ARCHITECTURES, eagle3, prediction_head
from localchat_cuda.config.eagle import EagleConfig
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.kernels import fp8_int8
from localchat_cuda.kernels.sampling.rescore import MAX_ROWS, Rescoring
from localchat_cuda.layers.dense import DenseLayers
from localchat_cuda.layers.output_head import compute_logits
from localchat_cuda.layers.packed import PackedLayers
from localchat_cuda.runner.kv_pages import ModelInputs, Pages
from localchat_cuda.runner.last_states import LastStates
from localchat_cuda.weights.eagle import EagleWeights
from localchat_cuda.weights.model_weights import ModelWeights
from localchat_cuda.weights.prediction_head import HeadWeights


class Fusion(NamedTuple):
    """How states of several layers of a model become one."""

    taps: tuple[int, ...]
    """The layers before which they are read."""
    weight: torch.Tensor
    """[hidden, taps * hidden]."""


class DeviceModel:
    """The forward pass, in two parts: last states of the tokens, and logits of some of them."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, pages: Pages, *, kernels: bool
    ) -> None:
        """`kernels`: run the kernels, else their plain-torch references."""
        self.config = config
        self.weights = weights
        self.pages = pages
        self.kernels = kernels
        self._forward = ARCHITECTURES[config.architecture].forward
        self.last_states: LastStates | None = None
        """Where the states of every step go, for prediction heads."""
        self.fusion: Fusion | None = None
        """The states that go there; None: the last ones."""

    def hidden_states(self, inputs: ModelInputs) -> torch.Tensor:
        """Last states [P, hidden] of the tokens in `logits_indices`; writes keys and values to the pages."""
        kept = self.last_states
        fusion = self.fusion
        ops = self._layers(
            inputs if kept is None or fusion else replace(inputs, logits_indices=None)
        )
        if fusion is not None:
            ops.taps = fusion.taps
        states: torch.Tensor = self._forward(ops, self.weights)
        if kept is None:
            return states
        if fusion is None:
            kept.store(states, inputs.slots, inputs.positions)
            return _selected(states, inputs.logits_indices)
        joined = torch.cat([ops.tapped[layer] for layer in fusion.taps], 1)
        kept.store(torch.matmul(joined, fusion.weight.t()), inputs.slots, inputs.positions)
        return states

    def _layers(self, inputs: ModelInputs) -> PackedLayers | DenseLayers:
        packed = inputs.ids.shape[0] <= self.weights.packed_rows(self.pages.device)
        layers = PackedLayers if packed else DenseLayers
        return layers(self.config, inputs, self.pages, kernels=self.kernels)

    def logits(self, states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits fp32 [P, vocabulary], in `out` if it is given."""
        head = self.weights.head
        cap = self.config.head_cap
        return compute_logits(states, head, cap, kernels=self.kernels, out=out)

    @property
    def approximate_rows(self) -> int:
        """Most rows of `approximate_logits`; 0: there is no int8 copy of the head."""
        if self.kernels and self.weights.bounded_head is not None:
            return MAX_ROWS
        return 0

    def approximate_logits(
        self, states: torch.Tensor, out: torch.Tensor
    ) -> tuple[torch.Tensor, Rescoring]:
        """Logits fp32 [P, vocabulary] of the head's int8 copy, in `out`; and what exact ones are made from."""
        head = self.weights.head
        copy = self.weights.bounded_head
        assert copy is not None
        assert isinstance(head, torch.Tensor)
        logits = fp8_int8.logits(states, copy.weight, out=out)
        return logits, Rescoring(states, head, copy.bounds)


class HeadModel(DeviceModel):
    """A head of another model as a model of its own, which guesses from that one's states."""

    def __init__(
        self,
        config: ModelConfig,
        weights: HeadWeights | EagleWeights,
        pages: Pages,
        states: LastStates,
        *,
        kernels: bool,
        eagle: EagleConfig | None = None,
    ) -> None:
        """`states`: of the model's tokens, and where those of guesses go. `eagle`: of EagleWeights."""
        super().__init__(config, weights.model, pages, kernels=kernels)
        self._head = weights
        self._before = states
        self._eagle = eagle

    def hidden_states(self, inputs: ModelInputs) -> torch.Tensor:
        before = self._before
        indices = inputs.logits_indices
        layers = DenseLayers(
            self.config, replace(inputs, logits_indices=None), self.pages, kernels=self.kernels
        )
        previous = before.before(inputs.slots, inputs.positions)
        if isinstance(self._head, HeadWeights):
            states = going_on = prediction_head.forward(layers, self._head, previous)
        else:
            assert self._eagle is not None
            states, going_on = eagle3.forward(layers, self._head, self._eagle, previous)
        slots = inputs.slots
        positions = inputs.positions
        if indices is not None:
            # States before them are the model's, and may be read by the next chunk.
            slots = slots[indices]
            positions = positions[indices]
        before.store(_selected(going_on, indices), slots, positions, head=True)
        return _selected(states, indices)

    def logits(self, states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(self._head, HeadWeights):
            return super().logits(states, out)
        if out is None:
            out = states.new_empty(states.shape[0], self.config.vocabulary, dtype=torch.float32)
        found = compute_logits(states, self.weights.head, kernels=self.kernels)
        return out.fill_(float("-inf")).index_copy_(1, self._head.tokens, found)


def _selected(states: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
    return states if indices is None else states[indices]
