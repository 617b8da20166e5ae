"""Tiny models with heads that draft, as the hub stores them, and what transformers' layers guess with them."""

import copy
import json
import random
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
        file = folder / "model-mtp.safetensors"
        safetensors.torch.save_file(held, file)
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text("utf-8"))
        content["weight_map"].update(dict.fromkeys(held, file.name))
        index.write_text(json.dumps(content), "utf-8")

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


class Eagle:
    """A model of four layers, and an EAGLE-3 head for it, which knows some of the tokens."""

    def __init__(
        self, *, normed_residual: bool = False, normed_output: bool = False, **changed: Any
    ) -> None:
        known = 96
        self.model = tiny_models.reference("qwen2", num_hidden_layers=4, **changed)
        self.head = tiny_models.reference("llama", num_hidden_layers=1, **changed)
        self.layer = self.head.model.layers[0]
        self.normed_residual, self.normed_output = normed_residual, normed_output
        size = self.model.config.hidden_size
        torch.manual_seed(9)
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(self.layer.self_attn, name)
            linear.weight = torch.nn.Parameter(torch.randn(linear.out_features, 2 * size) * 0.1)
        self.state_norm = copy.deepcopy(self.layer.input_layernorm)
        self.state_norm.weight.data += torch.randn(size) * 0.2
        self.fuse = torch.randn(size, 3 * size) * 0.05
        self.output = torch.randn(known, size) * 0.3
        self.known = sorted(random.Random(9).sample(range(tiny_models.VOCABULARY), known))

    def save(self, folder: Path, *, nested: bool = False) -> None:
        """Write the head's checkpoint, flat or as speculators do."""
        layer = {
            key: value for key, value in self.head.config.to_dict().items() if value is not None
        }
        rest = {
            "draft_vocab_size": len(self.known),
            "norm_before_residual": self.normed_residual,
            "norm_output": self.normed_output,
        }
        flat = {**layer, **rest, "architectures": ["LlamaForCausalLMEagle3"]}
        of_speculators = {
            **rest,
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
        }
        raw = of_speculators if nested else flat
        (folder / "config.json").write_text(json.dumps(raw, default=str))
        begin = "layers.0." if nested else "midlayer."
        held = {begin + name: tensor for name, tensor in self.layer.state_dict().items()}
        held[f"{begin}hidden_norm.weight"] = self.state_norm.weight.detach()
        held["norm.weight"] = self.head.model.norm.weight.detach()
        held["fc.weight"], held["lm_head.weight"] = self.fuse, self.output
        held["d2t"] = torch.tensor(self.known) - torch.arange(len(self.known))
        held["t2d"] = torch.zeros(tiny_models.VOCABULARY, dtype=torch.bool)
        safetensors.torch.save_file(held, folder / "model.safetensors")

    def guesses(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest tokens after `tokens` that the head knows, one after the other."""
        with torch.no_grad():
            states = self.model.model(
                torch.tensor([tokens]), output_hidden_states=True
            ).hidden_states
            joined = torch.cat([states[layer][0] for layer in (2, 2, 1)], 1) @ self.fuse.t()
            before, known = joined[:-1], list(tokens[1:])
            for _ in range(count):
                found, going_on = self._states(known, before)
                known.append(self.known[int((self.output @ found[-1]).argmax())])
                before = torch.cat((before, going_on[-1:]))
        return known[len(tokens) - 1 :]

    def _states(self, tokens: list[int], before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.layer.input_layernorm(self.model.model.embed_tokens(torch.tensor(tokens)))
        states = self.state_norm(before)
        x = torch.cat((embedded, states), 1)[None]
        angles = self.head.model.rotary_emb(x, torch.arange(len(tokens))[None])
        mask = torch.full((len(tokens),) * 2, -torch.inf).triu(1)[None, None]
        y, _ = self.layer.self_attn(x, position_embeddings=angles, attention_mask=mask)
        residual = (states if self.normed_residual else before) + y[0]
        residual = residual + self.layer.mlp(self.layer.post_attention_layernorm(residual))
        found = self.head.model.norm(residual)
        return found, found if self.normed_output else residual
