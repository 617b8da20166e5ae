"""A tiny Gemma 4 with an assistant that drafts over its keys and values, and the drafts of transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support import tiny_models

_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]


class Assistant:
    """A model, and an assistant of three layers for it."""

    def __init__(
        self,
        kind: str = "gemma4-small",
        *,
        centroids: int = 0,
        vocabulary: int = tiny_models.VOCABULARY,
    ) -> None:
        # With a tied head, a tiny model repeats its last token.
        self.model = tiny_models.reference(kind, tie_word_embeddings=False, vocab_size=vocabulary)
        shape = {
            **tiny_models.SHAPE,
            **tiny_models.KINDS[kind][1],
            "vocab_size": vocabulary,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": len(_LAYERS),
            "layer_types": _LAYERS,
            "num_kv_shared_layers": len(_LAYERS),
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
            "enable_moe_block": False,
        }
        del shape["rope_theta"]
        unified = "Unified" if kind == "gemma4" else ""
        text = getattr(transformers, f"Gemma4{unified}TextConfig")(**shape)
        groups: dict[str, Any] = {}
        if centroids:
            groups = {
                "use_ordered_embeddings": True,
                "num_centroids": centroids,
                "centroid_intermediate_top_k": centroids // 2,
            }
        own = getattr(transformers, f"Gemma4{unified}AssistantConfig")(
            text_config=text,
            backbone_hidden_size=self.model.config.hidden_size,
            attn_implementation="eager",
            **groups,
        )
        torch.manual_seed(11)
        self.assistant = getattr(transformers, f"Gemma4{unified}AssistantForCausalLM")(own).eval()
        with torch.no_grad():
            for parameter in self.assistant.parameters():
                scale = 0.2 if parameter.dim() == 1 else 0.1
                parameter.add_(torch.randn_like(parameter) * scale)
            if centroids:
                order = torch.randperm(vocabulary)
                self.assistant.masked_embedding.token_ordering.copy_(order)

    def save(self, folder: Path) -> None:
        """Write the assistant's checkpoint."""
        self.assistant.save_pretrained(folder)

    def guesses(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest tokens after `tokens`, one after the other.

        The keys are those of all tokens but the last one, and in a window of the query at its position."""
        text = torch.tensor([tokens[:-1]])
        with torch.no_grad():
            found = self.model.model(text, return_shared_kv_states=True)
            shared = {kind: (k, v) for kind, (k, v) in found.shared_kv_states.items()}
            window = self.model.config.sliding_window - 1
            k, v = shared["sliding_attention"]
            shared["sliding_attention"] = k[:, :, -window:], v[:, :, -window:]
            state = found.last_hidden_state[:, -1:]
            position = torch.tensor([[len(tokens) - 1]])
            drafted: list[int] = []
            token = tokens[-1]
            for _ in range(count):
                embedded = self.model.model.embed_tokens(torch.tensor([[token]]))
                out = self.assistant(
                    inputs_embeds=torch.cat((embedded, state), -1),
                    position_ids=position,
                    shared_kv_states=shared,
                )
                token = int(out.logits[0, -1].argmax())
                state = out.last_hidden_state
                drafted.append(token)
        return drafted
