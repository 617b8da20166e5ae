"""States of delta nets: one entry per slot, one for padding, and saved ones for the prefix cache.

An entry has the state of a sequence in all layers. A sequence that begins needs no empty entry: the kernels
take the state before its first token as 0.
"""

import torch

from localchat_cuda.config.delta_net import TAPS, DeltaNet
from localchat_cuda.kernels.delta_net import LayerStates


class States:
    """The entries, and which of them hold saved states by their key."""

    def __init__(
        self, config: DeltaNet, slots: int, saved: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`slots` of running sequences, one after them for padding, then `saved` states. `dtype`: of the
        activations."""
        self._number = {
            layer: n for n, layer in enumerate(i for i, has in enumerate(config.layers) if has)
        }
        entries = slots + 1 + saved
        heads = config.value_heads
        k = config.key_dim
        v = config.value_dim
        self.matrices = torch.zeros(config.count, entries, heads, k, v, device=device)
        self.inputs = torch.zeros(
            config.count, entries, TAPS - 1, config.channels, device=device, dtype=dtype
        )
        self._free = list(range(entries - 1, slots, -1))
        self._saved: dict[int, int] = {}

    def layer(self, number: int) -> LayerStates:
        """Entries of a layer of the model."""
        own = self._number[number]
        return LayerStates(self.matrices[own], self.inputs[own])

    def copy(self, source: int, target: int) -> None:
        """Copy an entry, in all layers."""
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
        """Give up a saved state."""
        self._free.append(self._saved.pop(key))
