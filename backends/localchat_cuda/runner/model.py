"""A loaded model on its device: weights, KV pages, and a step from token ids to logits."""

import torch

from localchat_cuda.architectures import ARCHITECTURES
from localchat_cuda.kernels import fp8_int8
from localchat_cuda.kernels.sampling.rescore import MAX_ROWS, Rescoring
from localchat_cuda.layers import DenseLayers
from localchat_cuda.model_config import ModelConfig
from localchat_cuda.output_head import compute_logits
from localchat_cuda.packed_layers import PackedLayers
from localchat_cuda.runner.kv_pages import ModelInputs, Pages
from localchat_cuda.weights.loader import ModelWeights


class DeviceModel:
    """The forward pass, in two parts: last states of the tokens, and logits of some of them."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, pages: Pages, *, kernels: bool
    ) -> None:
        """`kernels`: run the kernels, else their plain-torch references."""
        self.config, self.weights, self.pages, self.kernels = config, weights, pages, kernels
        self._forward = ARCHITECTURES[config.architecture].forward

    def hidden_states(self, inputs: ModelInputs) -> torch.Tensor:
        """Last states [P, hidden] of the tokens in `logits_indices`; writes keys and values to the pages."""
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
