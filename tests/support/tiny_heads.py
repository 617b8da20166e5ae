"""Tiny models with heads that draft, as the hub stores them, and what transformers' layers guess with them."""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tests.support import tiny_models


class Head:
    """A model, and a head made of one layer of its family with attention."""

    def __init__(self, kind: str, **changed: Any) -> None:
        self.model = tiny_models.reference(kind, **changed)
        self.layer = tiny_models.reference(
            kind, **changed, num_hidden_layers=1, layer_types=["full_attention"]
        )
        size = self.model.config.hidden_size
        torch.manual_seed(7)
        self.join = torch.randn(size, 2 * size) * 0.1
        self.norms = [torch.randn(size) * 0.2 for _ in range(2)]

    def save(self, folder: Path) -> None:
        """Write the checkpoint, the head's tensors beside the model's."""
        tiny_models.save(self.model, folder)
        begin, stored = "model.layers.0.", folder / "head"
        tiny_models.save(self.layer, stored)
        held = {
            name.replace(begin, "mtp.layers.0."): tensor
            for file in stored.glob("*.safetensors")
            for name, tensor in safetensors.torch.load_file(file).items()
            if name.startswith(begin)
        }
        held["mtp.norm.weight"] = self.layer.model.norm.weight.detach().clone()
        held["mtp.fc.weight"] = self.join
        held["mtp.pre_fc_norm_embedding.weight"], held["mtp.pre_fc_norm_hidden.weight"] = self.norms
        safetensors.torch.save_file(held, folder / "model-mtp.safetensors")

    def guesses(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest tokens after `tokens`, one after the other."""
        text = torch.tensor([tokens])
        with torch.no_grad():
            states = self.model.model(text).last_hidden_state[0]
            before, known = states[:-1], list(tokens[1:])  # nothing comes before the first one
            for _ in range(count):
                own = self._states(known, before)
                known.append(int(self.model.lm_head(own[-1]).argmax()))
                before = torch.cat((before, own[-1:]))
        return known[len(tokens) - 1 :]

    def _states(self, tokens: list[int], before: torch.Tensor) -> torch.Tensor:
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        both = [self._normed(x, w) for x, w in zip((embedded, before), self.norms, strict=True)]
        joined = torch.cat(both, 1) @ self.join.t()
        found: Any = self.layer.model(inputs_embeds=joined[None]).last_hidden_state[0]
        assert isinstance(found, torch.Tensor)
        return found

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)
