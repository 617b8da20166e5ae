"""Loads the weights of a model to the device, one tensor at a time.

A family lists its tensors in a `Names` table. `load` walks the table and merges the parts that one gemm
computes (q, k and v; gate and up) along N. Only formats/ knows how a linear layer is stored. The peak memory is
that of the model and one tensor.
"""

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

from localchat.errors import EngineClosed, ModelInvalid
from localchat_cuda.architectures.names import ExpertNames, Names
from localchat_cuda.config.mixture import Mixture
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.quantization import quantized_head
from localchat_cuda.config.tensor_names import is_in_layers
from localchat_cuda.kernels.delta_net import DeltaNetWeights
from localchat_cuda.kernels.experts import Experts, Router
from localchat_cuda.kernels.fp8_int8.bounded_head import bounded_head
from localchat_cuda.kernels.ggml import GgmlWeight
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.weights import interleaved_experts
from localchat_cuda.weights.formats import Unquantized, weight_format
from localchat_cuda.weights.formats.rounded import Rounded
from localchat_cuda.weights.formats.weight import (
    Weight,
    block_of,
    concat_rows,
    dequantized,
    pad_rows,
    refused,
    reorder_rows,
    stack_rows,
)
from localchat_cuda.weights.layer_shapes import linear_shapes, norm_widths
from localchat_cuda.weights.model_weights import (
    LayerInputs,
    LayerWeights,
    ModelWeights,
    RecurrentWeights,
)
from localchat_cuda.weights.source import LoadTarget, WeightSource

_OTHER_MODEL = "Use another quantization of the model, or a GGUF file with llama.cpp."
_ALWAYS = 20.0
"""Logit whose sigmoid is 1 in fp32."""
_GEMM_ROWS = 64
_MIN_GAIN = 1e-4
"""Smallest weight of a norm by which a router's columns are divided. Experts do not depend on smaller ones."""
Progress: TypeAlias = Callable[[int, int], bool]


class Loader:
    """Reads the tensors of one model, layer by layer.

    Size: one method per part of a layer, which the weight formats call.
    """

    def __init__(self, config: ModelConfig, names: Names, target: LoadTarget) -> None:
        self.config = config
        self.names = names
        self.target = target
        self.format = weight_format(config.quantization, target)
        self.floating = Unquantized(target)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self.target.tensor(name, shape, self.target.dtype)

    def norm(self, name: str, width: int) -> torch.Tensor:
        if not self.names.norm_offset:
            return self.tensor(name, width)
        return self.target.tensor(name, (width,), torch.float32) + self.names.norm_offset

    def head(self, embedding: torch.Tensor) -> torch.Tensor | GgmlWeight:
        """Load the head, or return the embedding if the two are tied and equal.

        The head of a GGUF file stays in its block format."""
        size = (self.config.vocabulary_part, self.config.hidden)
        name = self.names.head
        if self.config.head_format:
            stored = self.names.embedding if self.config.tied else name
            head = self.format.part(stored.removesuffix(".weight"), *size)
            assert isinstance(head, GgmlWeight)
            return head
        if not self.config.tied:
            self.check_head()
            return self.tensor(name, *size)
        if self.target.source.has(name):
            stored_head = self.tensor(name, *size)
            if not torch.equal(stored_head, embedding):
                self.target.notify(
                    f"config.json ties the head to the embedding, but the checkpoint has a different {name}. "
                    "The stored head is used."
                )
                return stored_head
        return embedding

    def report_unread(self) -> None:
        """Notify the user of unused tensors: config.json may belong to another model."""
        config = self.config
        # Layers of a Gemma that read earlier layers' keys and values may have projections that nothing uses.
        unused_prefixes = tuple(
            f"{self.names.layer.format(layer)}self_attn.{name}."
            for layer in range(config.layers)
            for name in ("k_proj", "v_proj", "k_norm")
            if config.kv_source(layer) != layer
        )
        unread = [
            name for name in self.target.source.unread() if not name.startswith(unused_prefixes)
        ]
        if config.latent is not None:
            # A layer after the last one is a prediction head.
            unread = [name for name in unread if is_in_layers(name, config.layers)]
        if not unread:
            return
        others = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        self.target.notify(
            f"The checkpoint has {unread[0]}{others}, which config.json does not mention. They are ignored."
        )

    def check_head(self) -> None:
        """Raise ModelInvalid if the head is quantized like the layers, for which no gemm exists."""
        prefix = self.names.head.removesuffix(".weight")
        if self.format.holds(prefix) and (
            self._names_alike() or not self.target.source.has(self.names.head)
        ):
            raise quantized_head(prefix)

    def _names_alike(self) -> bool:
        """Return True if codes are stored under the names of floating weights."""
        quantization = self.config.quantization
        if quantization is None or quantization.on_load:
            return False
        return quantization.method in ("fp8", "int8", "mxfp8", "nvfp4")

    def check_biases(self, prefixes: list[str], parts: tuple[int, ...]) -> None:
        """Raise ModelInvalid for a bias that the family does not add.

        Early GPTQ checkpoints have a bias of zeros in every layer."""
        for prefix, n in zip(prefixes, parts, strict=True):
            name = f"{prefix}.bias"
            if self.target.source.has(name) and bool(self.tensor(name, n).any()):
                raise ModelInvalid(
                    f"The checkpoint has {name}, but layers of this architecture do not add that bias.",
                    hint=_OTHER_MODEL,
                )

    def layer(self, number: int) -> LayerWeights:
        """Load a layer. Raises ModelInvalid."""
        begin = self.names.layer.format(number)
        norms = {
            field: self.norm(begin + self.names.norms[field], width)
            for field, width in norm_widths(self.config, self.names, number).items()
        }
        if "experts" in norms:
            # The router is divided by these weights, so none may be 0.
            gain = norms["experts"]
            norms["experts"] = gain.abs().clamp_min(_MIN_GAIN).copysign(gain)
        linears: dict[str, Weight] = {}
        biases: dict[str, torch.Tensor] = {}
        for field, (parts, k) in linear_shapes(self.config, number).items():
            linears[field], bias = self.gemm(begin, field, parts, k)
            if bias is not None:
                biases[field] = bias
        recurrent = None
        if self.config.is_recurrent(number):
            recurrent = self.recurrent(begin, linears)
        experts = None
        if self.config.mixture is not None and self.config.has_experts(number):
            experts = self.experts(begin, self.config.mixture, norms.get("experts"))
        # A bias of gate and up would have to be sorted, too.
        if "gate_up" in linears and "gate_up" not in biases:
            _fold_down_order(linears)
        return LayerWeights(
            norms,
            linears,
            biases,
            experts,
            self.sinks(begin),
            recurrent,
            self.kv(begin),
            self.scale(begin),
        )

    def gemm(
        self, begin: str, field: str, parts: tuple[int, ...], k: int
    ) -> tuple[Weight, torch.Tensor | None]:
        """Load the weight of a gemm and its bias, with rows in the order of computation.

        `parts`: output features of each part. Raises ModelInvalid."""
        # Layers of a Gemma that read earlier layers' keys and values lack the last parts.
        names = self.names.merged[field][: len(parts)]
        prefixes = [begin + name for name in names]
        if len(prefixes) == 1:
            parts = (sum(parts),)
        weight = self.linear(prefixes, parts, k)
        bias: torch.Tensor | None = None
        if field in self.names.biased and (field != "qkv" or self.config.qkv_bias):
            biases = [
                self.tensor(f"{prefix}.bias", n) for prefix, n in zip(prefixes, parts, strict=True)
            ]
            bias = torch.cat(biases)
        else:
            self.check_biases(prefixes, parts)
        if field in self.names.orders:
            order = self.names.orders[field](self.config).to(self.target.device)
            with refused(f"The rows of {prefixes[0]} cannot be sorted", _OTHER_MODEL):
                weight = reorder_rows(weight, order)
            if bias is not None:
                bias = bias[order]
        return weight, bias

    def kv(self, begin: str) -> torch.Tensor | None:
        """Load what makes keys and values of a latent; see LayerWeights.kv."""
        latent = self.config.latent
        heads = self.config.heads
        if latent is None:
            return None
        columns = latent.plain + latent.value
        weight = self.floating_part(begin + self.names.kv, heads * columns, latent.kv_rank)
        return weight.view(heads, columns, latent.kv_rank)

    def scale(self, begin: str) -> float:
        """Load the factor of the residual after a layer."""
        if not self.names.scale:
            return 1.0
        stored = self.target.tensor(begin + self.names.scale, (1,), torch.float32)
        return 1.0 if stored.is_meta else float(stored)

    def recurrent(self, begin: str, linears: dict[str, Weight]) -> RecurrentWeights:
        """Load the weights of a layer with a running state. A delta net adds its gates to the linear layers."""
        names = self.names.recurrent
        shape = self.config.recurrent
        assert names is not None
        assert shape is not None
        conv = self.tensor(begin + names.conv, shape.channels, 1, shape.taps)[:, 0].contiguous()
        if shape.kind == "short_conv":
            return conv
        heads = shape.value_heads

        def per_head(name: str) -> torch.Tensor:
            return self.target.tensor(begin + name, (heads,), torch.float32)

        decay = -per_head(names.a_log).exp()
        dt_bias = per_head(names.dt_bias)
        if shape.kind == "mamba":
            bias = self.tensor(begin + names.conv_bias, shape.channels) if shape.biased else None
            norm = self.tensor(begin + names.norm, shape.values)
            # Time steps of heads are seldom a multiple of the rows that the gemms compute at once.
            linears["in"] = pad_rows(linears["in"], _GEMM_ROWS)
            return DeltaNetWeights(conv, decay, dt_bias, norm, bias, per_head(names.skip))
        self.add_gates(begin, names.ba, linears)
        return DeltaNetWeights(
            conv, decay, dt_bias, self.tensor(begin + names.norm, shape.value_dim)
        )

    def add_gates(self, begin: str, ba: tuple[str, ...], linears: dict[str, Weight]) -> None:
        """Load the linear layers of a delta net's gates, and add them to `in` if both are floating."""
        assert self.config.recurrent is not None
        parts = 2 * self.config.recurrent.value_heads // len(ba)
        gates = torch.cat([self.router(begin + name, parts) for name in ba])
        if "ba" in self.names.orders:
            gates = gates[self.names.orders["ba"](self.config).to(self.target.device)]
        product = linears["in"]
        if isinstance(product, torch.Tensor):
            linears["in"] = torch.cat((product, gates))
        else:
            linears["ba"] = gates

    def inputs(self) -> LayerInputs | None:
        """Load the second embedding of a Gemma 4; None for other models."""
        gemma = self.config.gemma
        if gemma is None or not gemma.input_columns:
            return None
        assert self.names.inputs is not None
        table, projection, norm = self.names.inputs
        columns = self.config.layers * gemma.input_columns
        return LayerInputs(
            self.tensor(table, gemma.input_vocabulary, columns),
            self.router(projection, columns),
            self.tensor(norm, gemma.input_columns),
        )

    def sinks(self, begin: str) -> torch.Tensor | None:
        if not self.names.sinks:
            return None
        return self.tensor(begin + self.names.sinks, self.config.heads)

    def experts(self, begin: str, mixture: Mixture, gain: torch.Tensor | None = None) -> Experts:
        """Load the experts of a layer. `gain`: weights of a norm that the experts read, but not the router."""
        names = self.names.experts
        assert names is not None
        if names.interleaved:
            return self.interleaved_experts(begin, names, mixture)
        router, shared_bias = self.router_of_experts(begin, names, mixture, gain)
        gate_up = self.stack(
            begin + names.gate_up[0], self.gate_up_parts(begin, names, mixture), mixture.stored
        )
        down = self.stack(
            begin + names.down, self.down_parts(begin, names, mixture), mixture.stored
        )
        choice = Router(
            router,
            mixture.chosen,
            mixture.normalized,
            mixture.shared,
            shared_bias,
            sigmoid=mixture.sigmoid,
            scale=mixture.scale,
        )
        square = not self.config.family.gated_feed
        return Experts(choice.counting(), gate_up, down, gelu=mixture.gelu, square=square)

    def interleaved_experts(self, begin: str, names: ExpertNames, mixture: Mixture) -> Experts:
        """Load the experts of a layer as gpt-oss stores them."""
        weight = self.router(begin + names.router, mixture.experts)
        bias = self.tensor(f"{begin}{names.router}.bias", mixture.experts)
        return interleaved_experts.load(
            begin + names.interleaved,
            Router(weight, mixture.chosen, mixture.normalized, bias=bias).counting(),
            self.config,
            mixture,
            self.target,
        )

    def gate_up_parts(self, begin: str, names: ExpertNames, mixture: Mixture) -> Iterator[Weight]:
        """Yield the weight [2N, K] of gate and up for each expert, or [N, K] of `up` alone."""
        n = self.config.intermediate
        k = self.config.hidden
        parts = len(names.gate_up)
        stacked = self.stacked_experts(begin, names, mixture, of_gate_up=True)
        for number in range(mixture.experts):
            if stacked is not None:
                yield self.stacked_expert(begin, stacked[number])
            else:
                prefixes = [begin + name.format(number) for name in names.gate_up]
                yield self.checked(prefixes, (n,) * parts, k)
        if not mixture.shared:
            return
        # The shared expert is as wide as several experts, and is cut into as many.
        assert names.shared is not None
        prefixes = [begin + name for name in names.shared[0]]
        rows = parts * n * mixture.shared // len(prefixes)
        shared = self.checked(prefixes, (rows,) * len(prefixes), k)
        width = n * mixture.shared
        for row in range(0, width, n):
            blocks = (block_of(shared, part * width + row, n) for part in range(parts))
            yield concat_rows(blocks, parts * n, self.target.dtype)

    def down_parts(self, begin: str, names: ExpertNames, mixture: Mixture) -> Iterator[Weight]:
        """Yield the weight [N, K] of down for each expert."""
        n = self.config.hidden
        k = self.config.intermediate
        scales: torch.Tensor | None = None
        if names.scales is not None:
            scales = self.tensor(begin + names.scales[1], mixture.experts)
        stacked = self.stacked_experts(begin, names, mixture, of_gate_up=False)
        for number in range(mixture.experts):
            if stacked is not None:
                weight = self.stacked_expert(begin, stacked[number])
            else:
                weight = self.checked([begin + names.down.format(number)], (n,), k)
            if scales is not None:
                assert isinstance(weight, torch.Tensor)
                weight = weight * scales[number]
            yield weight
        if mixture.shared:
            assert names.shared is not None
            shared = self.checked([begin + names.shared[1]], (n,), k * mixture.shared)
            for column in range(0, k * mixture.shared, k):
                yield block_of(shared, 0, n, column, k)

    def stack(self, name: str, parts: Iterator[Weight], count: int) -> torch.Tensor | w4_pack.W4:
        """Join the weights of all experts. Raises ModelInvalid with this name."""
        with refused(f"The experts {name} cannot be joined", _OTHER_MODEL):
            return stack_rows(parts, count)

    def router_of_experts(
        self, begin: str, names: ExpertNames, mixture: Mixture, gain: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Load the router's weight, with a row for a shared expert, and its bias. `gain`: see `experts`."""
        router = self.router(begin + names.router, mixture.experts)
        bias: torch.Tensor | None = None
        if mixture.gated:
            router = torch.cat((router, self.router(begin + names.shared_gate, 1)))
        elif mixture.shared:
            # Without a gate the shared expert gets a row of zeros, whose biased sigmoid is 1.
            router = torch.cat((router, torch.zeros_like(router[:1])))
            bias = torch.zeros_like(router[:, 0])
            bias[-1] = _ALWAYS
        if names.correction:
            shape = (mixture.experts,)
            correction = self.target.tensor(begin + names.correction, shape, torch.float32)
            if bias is not None:
                correction = torch.cat((correction, bias[-1:].float()))
            bias = correction
        if names.scales is not None:
            assert gain is not None
            router = self.scaled_router(router, begin + names.scales[0], gain)
        return router, bias

    def scaled_router(self, router: torch.Tensor, scale: str, gain: torch.Tensor) -> torch.Tensor:
        """Return the router's weight for rows that a norm has multiplied with `gain` [K].

        The reference multiplies rows with a scale of the router's own, divided by the root of K."""
        router_scale = self.target.tensor(scale, tuple(gain.shape), torch.float32)
        divisor = gain.float() * math.sqrt(len(gain))
        return (router.float() * router_scale / divisor).to(router.dtype)

    def stacked_experts(
        self, begin: str, names: ExpertNames, mixture: Mixture, *, of_gate_up: bool
    ) -> torch.Tensor | None:
        """Load the tensor [experts, N, K] of all experts. None: each expert has its own."""
        hidden = self.config.hidden
        inner = self.config.intermediate
        if names.stacked is None or not self.target.source.has(begin + names.stacked[0]):
            return None
        if self.config.quantization is not None and not self.config.quantization.on_load:
            raise ModelInvalid(
                f"{begin}{names.stacked[0]} contains all experts. Experts of a quantized model can only be "
                "loaded one by one.",
                hint=_OTHER_MODEL,
            )
        gate_up, down = names.stacked
        if of_gate_up:
            return self.tensor(begin + gate_up, mixture.experts, 2 * inner, hidden)
        return self.tensor(begin + down, mixture.experts, hidden, inner)

    def stacked_expert(self, begin: str, weight: torch.Tensor) -> Weight:
        """Return the weight of one expert, rounded if the load rounds layers."""
        if isinstance(self.format, Rounded):
            return self.format.rounded(f"{begin}experts", weight)
        return weight

    def router(self, prefix: str, rows: int) -> torch.Tensor:
        """Load a floating weight [rows, hidden], such as a router's."""
        return self.floating_part(prefix, rows, self.config.hidden)

    def floating_part(self, prefix: str, n: int, k: int) -> torch.Tensor:
        """Load a weight [N, K] as floating numbers: never rounded, and dequantized if it is stored in codes."""
        stored = self.target.source.shape(f"{prefix}.weight")
        may_be_coded = stored == () or (stored is not None and self._names_alike())
        if not may_be_coded or not self.format.holds(prefix):
            return self.tensor(f"{prefix}.weight", n, k)
        return dequantized(self.format.part(prefix, n, k), self.target.dtype)

    def checked(self, prefixes: list[str], parts: tuple[int, ...], k: int) -> Weight:
        """Load a gemm whose layers have no biases; see `linear`."""
        self.check_biases(prefixes, parts)
        return self.linear(prefixes, parts, k)

    def linear(self, prefixes: list[str], parts: tuple[int, ...], k: int) -> Weight:
        """Load the layers of one gemm, and join them along N. Raises ModelInvalid."""
        weights = (self.part(prefix, n, k) for prefix, n in zip(prefixes, parts, strict=True))
        hint = "Use a quantization without act-order (desc_act false), AWQ, or a GGUF file."
        with refused(f"{' and '.join(prefixes)} cannot be merged", hint):
            return concat_rows(weights, sum(parts), self.target.dtype)

    def part(self, prefix: str, n: int, k: int) -> Weight:
        """Load a linear layer. Quantized checkpoints leave some layers floating. Raises ModelInvalid."""
        if not self.format.holds(prefix) and self.floating.holds(prefix):
            return self.floating.part(prefix, n, k)
        return self.format.part(prefix, n, k)


def _fold_down_order(linears: dict[str, Weight]) -> None:
    """Let gate and up compute activations in the order that `down` reads.

    No other layer reads these features, so no kernel has to permute columns."""
    down = linears["down"]
    gate_up = linears["gate_up"]
    if not isinstance(down, w4_pack.W4) or down.order is None:
        return
    order = down.order.long()
    linears["gate_up"] = reorder_rows(gate_up, torch.cat((order, order + down.features_in)))
    linears["down"] = down._replace(order=None)


def load(
    config: ModelConfig,
    source: WeightSource,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    head_bounds: bool = False,
    progress: Progress = lambda done, total: True,
    notify: Callable[[str], None] = lambda text: None,
) -> ModelWeights:
    """Load all weights to `device` in `dtype`. Raises ModelInvalid.

    `dtype`: of floating weights; None: the config's. Packed layers stay packed.
    `head_bounds`: add an int8 copy of the head with bounds of its error.
    `progress`: called with (loaded layers, all layers) after each layer. EngineClosed if it returns False.
    `notify`: gets sentences about the checkpoint for the user."""
    names = config.family.names
    loader = Loader(
        config, names, LoadTarget(source, device, dtype or getattr(torch, config.dtype), notify)
    )
    embedding = loader.tensor(names.embedding, config.vocabulary_part, config.hidden)
    layers = []
    for number in range(config.layers):
        layers.append(loader.layer(number))
        if not progress(number + 1, config.layers):
            raise EngineClosed("The load was cancelled.")
    head = loader.head(embedding)
    copy = None
    if head_bounds and isinstance(head, torch.Tensor):
        copy = bounded_head(head)
    last_norm = loader.norm(names.last_norm, config.hidden)
    if config.logits_divisor != 1.0:
        # The head is linear, so the last norm can divide the logits.
        last_norm = last_norm.float() / config.logits_divisor
    inputs = loader.inputs()
    loader.report_unread()
    return ModelWeights(embedding, tuple(layers), last_norm, head, copy, inputs)
