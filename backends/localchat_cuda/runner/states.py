"""Running states of a hybrid: one entry per slot, one for padding, and saved entries for the prefix cache.

An entry has the state of a sequence in all layers. New sequences need no empty entry, because kernels treat the
state before the first token as 0.
"""

import torch

from localchat_cuda.config.recurrent import Recurrent
from localchat_cuda.kernels.delta_net import LayerStates


class States:
    """Entries, and the keys of saved states."""

    def __init__(
        self, config: Recurrent, slots: int, saved: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Allocate `slots` for running sequences, one more for padding, and `saved` states.

        `dtype`: of the activations."""
        with_state = [layer for layer, has_state in enumerate(config.layers) if has_state]
        self._number = {layer: number for number, layer in enumerate(with_state)}
        entries = slots + 1 + saved
        heads = config.value_heads
        k = config.key_dim
        v = config.value_dim
        self.matrices = torch.zeros(config.count, entries, heads, k, v, device=device)
        self.inputs = torch.zeros(
            config.count, entries, config.taps - 1, config.channels, device=device, dtype=dtype
        )
        self._free = list(range(entries - 1, slots, -1))
        self._saved: dict[int, int] = {}

    def layer(self, number: int) -> LayerStates:
        """Return the entries of a layer of the model."""
        index = self._number[number]
        return LayerStates(self.matrices[index], self.inputs[index])

    def copy(self, source: int, target: int) -> None:
        """Copy an entry in all layers."""
        self.matrices[:, target].copy_(self.matrices[:, source])
        self.inputs[:, target].copy_(self.inputs[:, source])

    def save(self, slot: int, key: int) -> None:
        """Save the state of a slot."""
        entry = self._saved[key] = self._free.pop()
        self.copy(slot, entry)

    def restore(self, key: int, slot: int) -> None:
        """Copy a saved state to a slot."""
        self.copy(self._saved[key], slot)

    def discard(self, key: int) -> None:
        """Free a saved state."""
        self._free.append(self._saved.pop(key))
