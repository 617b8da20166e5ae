"""A checkpoint of safetensors as a source of GGUF metadata and tensors. One tensor is in memory at a time."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from localchat.errors import ModelInvalid
from localchat.model_files.checkpoint import (
    CONFIG,
    optional_object,
    read_object,
    weight_paths,
    whole_config,
)
from localchat.model_files.gguf import GgufTensor, Header, Value
from localchat_llamacpp.convert.names import name_map, reordered, reorders
from localchat_llamacpp.convert.sizes import CheckpointConfig
from localchat_llamacpp.convert.tensor_files import (
    StoredTensor,
    expected_values,
    read_tensors,
)
from localchat_llamacpp.convert.vocabulary import vocabulary_entries
from localchat_llamacpp.gguf_writer import entry, tensor_to_write

_ROPE_FACTORS: Final = "rope_freqs.weight"
_EMBEDDING: Final = "token_embd.weight"
_OUTPUT: Final = "output.weight"
_PART_OF_IMAGES: Final = (
    *("vision_tower", "multi_modal_projector", "vision_model"),
    *("model.vision_tower", "model.multi_modal_projector"),
)
_COMPUTED: Final = "rotary_emb.inv_freq"


class CheckpointSource:
    """The folder of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Read the config and the headers of the weights. Raises ModelMissing, ModelInvalid."""
        self._folder = folder
        with expected_values(folder):
            self._read(folder)

    def _read(self, folder: Path) -> None:
        config = whole_config(folder, read_object(folder / CONFIG))
        self._config = CheckpointConfig(str(folder), config)
        self._numbers = self._config.numbers()
        self._architecture = self._config.family.architecture
        self._stored = self._named(read_tensors(weight_paths(folder)))
        self._rope_factors = self._config.rope_factors()
        tensors = [self._described(name, tensor) for name, tensor in self._stored.items()]
        if self._rope_factors is not None:
            tensors.insert(0, tensor_to_write(_ROPE_FACTORS, self._rope_factors.shape, "F32"))
        metadata: dict[str, Value] = {"general.architecture": self._architecture}
        metadata |= {f"{self._architecture}.{key}": value for key, value in self._numbers.items()}
        size_bytes = sum(tensor.size_bytes for tensor in tensors)
        self.header = Header(str(folder), 3, metadata, tuple(tensors), 0, size_bytes)

    def _named(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return the tensors by llama.cpp's names, in the order of the layers. Raises ModelInvalid."""
        mapped = name_map(self._architecture, int(self._numbers["block_count"]), str(self._folder))
        named: dict[str, StoredTensor] = {}
        for name, tensor in tensors.items():
            if name.startswith(_PART_OF_IMAGES) or name.endswith(_COMPUTED):
                continue
            target = mapped(name)
            if target is None:
                raise self._invalid(f"its tensor {name} has no name in llama.cpp")
            if target != _OUTPUT or not self._config.tied:
                named[target] = tensor
        layers = range(int(self._numbers["block_count"]))
        suffixes = {name.split(".", 2)[2] for name in named if name.startswith("blk.")}
        for number, suffix in product(layers, sorted(suffixes | {"attn_q.weight"})):
            if f"blk.{number}.{suffix}" not in named:
                raise self._invalid(f"layer {number} of {len(layers)} has no tensor for {suffix}")
        for name in (_EMBEDDING, "output_norm.weight"):
            if name not in named:
                raise self._invalid(f"it has no tensor for {name}")
        return dict(sorted(named.items(), key=lambda item: _file_order(item[0])))

    def _described(self, name: str, stored: StoredTensor) -> GgufTensor:
        kind = stored.dtype
        # llama.cpp computes norms and biases in float32.
        if kind == "F64" or len(stored.shape) < 2:
            kind = "F32"
        return tensor_to_write(name, stored.shape[::-1], kind)

    def entries(self) -> list[bytes]:
        """Return the metadata of the new file. Raises ModelMissing, ModelInvalid."""
        with expected_values(self._folder):
            return self._entries()

    def _entries(self) -> list[bytes]:
        entries = [
            entry("general.architecture", self._architecture),
            entry("general.type", "model"),
            entry("general.name", self._folder.resolve().name),
        ]
        generation = optional_object(self._folder / "generation_config.json")
        entries += [entry(*pair) for pair in self._config.sampling(generation)]
        entries += [
            entry(f"{self._architecture}.{key}", value) for key, value in self._numbers.items()
        ]
        rows = self._stored[_EMBEDDING].shape[0]
        entries += vocabulary_entries(self._folder, rows)
        return entries

    def stored(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """Return the bytes of a tensor in llama.cpp's layout. Raises ModelInvalid."""
        if tensor.name == _ROPE_FACTORS:
            assert self._rope_factors is not None
            return self._rope_factors.view(np.uint8)
        source = self._stored[tensor.name]
        numbers = source.numbers()
        if tensor.format.name != source.dtype:
            numbers = source.floats()
        if reorders(tensor.name, self._architecture):
            heads = self._config.heads
            if ".attn_k." in tensor.name:
                heads = self._config.kv_heads
            if len(numbers) % (2 * heads):
                raise self._invalid(
                    f"{source.tensor.name} has {len(numbers)} rows for {heads} heads"
                )
            numbers = reordered(numbers, heads)
        if self._config.family.norm_shift and tensor.name.endswith("norm.weight"):
            numbers = source.floats() + np.float32(self._config.family.norm_shift)
        return np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)

    def _invalid(self, cause: str) -> ModelInvalid:
        return ModelInvalid(
            f"{self._folder} cannot be converted: {cause}.",
            hint="The checkpoint may be incomplete: download it again.",
            path=str(self._folder),
        )


def _file_order(name: str) -> tuple[int, int, str]:
    """Return the sort key of a tensor: embedding, layers by number, output."""
    first, _, rest = name.partition(".")
    if first == "blk":
        return 1, int(rest.partition(".")[0]), name
    return 2 * (name != _EMBEDDING), 0, name
