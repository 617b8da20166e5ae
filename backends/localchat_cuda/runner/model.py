"""A loaded model on its device: weights, KV pages, and a step from token ids to logits."""

from dataclasses import replace

import torch

from localchat_cuda.architectures import ARCHITECTURES, prediction_head
from localchat_cuda.kernels import fp8_int8
from localchat_cuda.kernels.sampling.rescore import MAX_ROWS, Rescoring
from localchat_cuda.layers import DenseLayers, PackedLayers, compute_logits
from localchat_cuda.model_config import ModelConfig
from localchat_cuda.runner.kv_pages import ModelInputs, Pages
from localchat_cuda.runner.last_states import LastStates
from localchat_cuda.weights.loader import ModelWeights
from localchat_cuda.weights.prediction_head import HeadWeights


class DeviceModel:
    """The forward pass, in two parts: last states of the tokens, and logits of some of them."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, pages: Pages, *, kernels: bool
    ) -> None:
        """`kernels`: run the kernels, else their plain-torch references."""
        self.config, self.weights, self.pages, self.kernels = config, weights, pages, kernels
        self._forward = ARCHITECTURES[config.architecture].forward
        self.last_states: LastStates | None = None
        """Where the states of every step go, for prediction heads."""

    def hidden_states(self, inputs: ModelInputs) -> torch.Tensor:
        """Last states [P, hidden] of the tokens in `logits_indices`; writes keys and values to the pages."""
        kept = self.last_states
        if kept is None:
            return self._last_states(inputs)
        states = self._last_states(replace(inputs, logits_indices=None))
        kept.store(states, inputs.slots, inputs.positions)
        return _selected(states, inputs.logits_indices)

    def _last_states(self, inputs: ModelInputs) -> torch.Tensor:
        packed = inputs.ids.shape[0] <= self.weights.packed_rows(self.pages.device)
        layers = PackedLayers if packed else DenseLayers
        states: torch.Tensor = self._forward(
            layers(self.config, inputs, self.pages, kernels=self.kernels), self.weights
        )
        return states

    def logits(self, states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits fp32 [P, vocabulary], in `out` if it is given."""
        head, cap = self.weights.head, self.config.head_cap
        return compute_logits(states, head, cap, kernels=self.kernels, out=out)

    @property
    def approximate_rows(self) -> int:
        """Most rows of `approximate_logits`; 0: there is no int8 copy of the head."""
        return MAX_ROWS if self.kernels and self.weights.bounded_head is not None else 0

    def approximate_logits(
        self, states: torch.Tensor, out: torch.Tensor
    ) -> tuple[torch.Tensor, Rescoring]:
        """Logits fp32 [P, vocabulary] of the head's int8 copy, in `out`; and what exact ones are made from."""
        head, copy = self.weights.head, self.weights.bounded_head
        assert copy is not None
        assert isinstance(head, torch.Tensor)
        logits = fp8_int8.logits(states, copy.weight, out=out)
        return logits, Rescoring(states, head, copy.bounds)


class HeadModel(DeviceModel):
    """Prediction heads of a model as a model of their own, which shares embedding and head with it."""

    def __init__(
        self, config: ModelConfig, weights: HeadWeights, pages: Pages, states: LastStates, *, kernels: bool
    ) -> None:  # fmt: skip
        """`states`: of the model's tokens, and where those of guesses go."""
        super().__init__(config, weights.model, pages, kernels=kernels)
        self._head, self._before = weights, states

    def hidden_states(self, inputs: ModelInputs) -> torch.Tensor:
        before, indices = self._before, inputs.logits_indices
        layers = DenseLayers(
            self.config, replace(inputs, logits_indices=None), self.pages, kernels=self.kernels
        )
        previous = before.before(inputs.slots, inputs.positions)
        states = prediction_head.forward(layers, self._head, previous)
        slots, positions = inputs.slots, inputs.positions
        if (
            indices is not None
        ):  # states before them are the model's, and may be read by the next chunk
            states, slots, positions = states[indices], slots[indices], positions[indices]
        before.store(states, slots, positions, head=True)
        return states


def _selected(states: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
    return states if indices is None else states[indices]
