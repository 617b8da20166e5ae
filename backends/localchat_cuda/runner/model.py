"""A loaded model on its device: weights, KV pages, and a step from token ids to logits."""

import torch

from localchat_cuda.architectures import ARCHITECTURES
from localchat_cuda.kernels.int4 import packed_rows
from localchat_cuda.layers import DenseLayers, PackedW4Layers, compute_logits
from localchat_cuda.model_config import ModelConfig
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
        most = packed_rows(self.pages.device, unpacked=self.weights.unpacked)
        packed = self.weights.packed and inputs.ids.shape[0] <= most
        layers = PackedW4Layers if packed else DenseLayers
        states: torch.Tensor = self._forward(
            layers(self.config, inputs, self.pages, kernels=self.kernels), self.weights
        )
        return states

    def logits(self, states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits fp32 [P, vocabulary], in `out` if it is given."""
        head, cap = self.weights.head, self.config.head_cap
        return compute_logits(states, head, cap, kernels=self.kernels, out=out)
