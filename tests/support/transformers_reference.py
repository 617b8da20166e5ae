"""The reference for real models: transformers in fp32 on the dequantized weights of a GGUF file."""

from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import torch
from numpy.typing import NDArray


class TransformersReference:
    """A GGUF model in transformers, with log probabilities in fp32."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.path = path
        # transformers reads the file twice, and the names of all tensors once for each module.
        names, reader = gguf.get_tensor_name_map, gguf.GGUFReader
        with patch.multiple(gguf, get_tensor_name_map=cache(names), GGUFReader=cache(reader)):
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            ).eval()

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)

    def save(self, folder: Path) -> Path:
        """Write a checkpoint of fp32 safetensors, as the CUDA backend loads it."""
        # The weights are plain fp32 numbers by now, but transformers refuses to save what came from GGUF.
        self.model.hf_quantizer = None
        if hasattr(self.model.config, "quantization_config"):
            del self.model.config.quantization_config
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return folder

    def logprobs(self, tokens: list[int]) -> NDArray[np.float32]:
        """Return log probabilities (T, V) of the tokens that follow each position."""
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0]
        result: NDArray[np.float32] = torch.log_softmax(logits.float(), -1).numpy()
        return result
