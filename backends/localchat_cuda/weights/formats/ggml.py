"""Block formats of a GGUF file, in which each tensor has its own number format."""

from localchat_cuda.kernels.ggml import pack as ggml_pack
from localchat_cuda.weights.formats.weight_format import WeightFormat
from localchat_cuda.weights.gguf_source import GgufWeights
from localchat_cuda.weights.meta_weights import MetaWeights


class Ggml(WeightFormat):
    """See WeightFormat."""

    def holds(self, prefix: str) -> bool:
        source = self.target.source
        return isinstance(source, GgufWeights | MetaWeights) and source.in_blocks(
            f"{prefix}.weight"
        )

    def part(self, prefix: str, n: int, k: int) -> ggml_pack.GgmlWeight:
        source = self.target.source
        assert isinstance(source, GgufWeights | MetaWeights)
        type_, raw = source.blocks(f"{prefix}.weight", (n, k))
        return ggml_pack.GgmlWeight((ggml_pack.pack(type_, raw, k),))
