"""Loads the weights of a model to the device, one tensor at a time.

An architecture lists its tensors in a `Names` table; `load` walks it and merges the parts that one gemm
computes (q, k and v; gate and up) along N. Only formats/ knows how a linear layer is stored. Peak memory is
the model and one tensor.
"""

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

from localchat.errors import EngineClosed, ModelInvalid
from localchat_cuda.architectures.names import Names
from localchat_cuda.config.mixture import Mixture
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.tensor_names import is_in_layers
from localchat_cuda.kernels.altup import AltUpWeights
from localchat_cuda.kernels.delta_net import TAPS, DeltaNetWeights
from localchat_cuda.kernels.experts import Experts, Router
from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.kernels.fp8_int8.bounded_head import bounded_head
from localchat_cuda.kernels.ggml import GgmlWeight
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.weights import interleaved_experts
from localchat_cuda.weights.formats import Unquantized, weight_format
from localchat_cuda.weights.formats.weight import (
    Weight,
    block_of,
    concat_rows,
    dequantized,
    reorder_rows,
    stack_rows,
)
from localchat_cuda.weights.layer_shapes import linear_shapes, norm_widths
from localchat_cuda.weights.model_weights import (
    LayerInputs,
    LayerWeights,
    ModelWeights,
    StreamWeights,
)
from localchat_cuda.weights.source import LoadTarget, WeightSource
from localchat_cuda.weights.values import number_of

_ALWAYS = 20.0
"""A logit whose sigmoid is 1 in fp32."""
_LEAST_GAIN = 1e-4
"""Of a norm by which a router's columns are divided: experts do not notice so little."""
Progress: TypeAlias = Callable[[int, int], bool]
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


class Loader:
    """Reads the tensors of one model, layer by layer."""

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
        """The embedding if they are tied, unless the checkpoint holds a different head. That of a GGUF file
        stays in its block format."""
        size = (self.config.vocabulary, self.config.hidden)
        name = self.names.head
        if self.config.head_format:
            stored = self.names.embedding if self.config.tied else name
            found = self.format.part(stored.removesuffix(".weight"), *size)
            assert isinstance(found, GgmlWeight)
            return found
        if not self.config.tied:
            self.check_head()
            return self.tensor(name, *size)
        if self.target.source.has(name):
            own = self.tensor(name, *size)
            if not torch.equal(own, embedding):
                self.target.notify(
                    f"The checkpoint holds {name}, although config.json ties the head to the embedding, "
                    "and they differ; the stored head is used."
                )
                return own
        return embedding

    def report_unread(self) -> None:
        """Notify the user of unused tensors: config.json may be another model's. Layers of a Gemma that read
        earlier layers' keys and values may hold projections of their own, which nothing uses; a layer after the
        last one of a model with latents is a prediction head."""
        config = self.config
        names = ("k_proj", "v_proj", "k_norm")
        idle = tuple(
            f"{self.names.layer.format(layer)}self_attn.{name}."
            for layer in range(config.layers)
            for name in names
            if config.kv_source(layer) != layer
        )
        left = [
            name
            for name in self.target.source.unread()
            if not name.startswith(idle)
            and (config.latent is None or is_in_layers(name, config.layers))
        ]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            self.target.notify(
                f"The checkpoint holds {left[0]}{more}, which config.json does not mention; ignored."
            )

    def check_head(self) -> None:
        """Raise ModelInvalid if the head is quantized like the layers: no gemm takes that."""
        prefix = self.names.head.removesuffix(".weight")
        if self.format.holds(prefix) and (
            self._names_alike() or not self.target.source.has(self.names.head)
        ):
            raise ModelInvalid(
                f"{prefix} is quantized like the layers, and only a floating head can be loaded.",
                hint="Take a checkpoint that leaves its head out of the quantization, or a GGUF.",
            )

    def _names_alike(self) -> bool:
        """True if codes are stored by the names of floating weights."""
        found = self.config.quantization
        return found is not None and found.method in ("fp8", "int8") and not found.on_load

    def check_biases(self, prefixes: list[str], parts: tuple[int, ...]) -> None:
        """Raise ModelInvalid for a bias that the architecture has not. Early GPTQ checkpoints have one
        everywhere, of zeros."""
        for prefix, n in zip(prefixes, parts, strict=True):
            name = f"{prefix}.bias"
            if self.target.source.has(name) and bool(self.tensor(name, n).any()):
                raise ModelInvalid(
                    f"The checkpoint has {name}, and this architecture adds no bias there.",
                    hint="Take another quantization of the model, or a GGUF of it for llama.cpp.",
                )

    def layer(self, number: int) -> LayerWeights:
        begin = self.names.layer.format(number)
        net = self.config.has_delta_net(number)
        norms = {
            field: self.norm(begin + self.names.norms[field], width)
            for field, width in norm_widths(self.config, self.names, number).items()
        }
        if "experts" in norms:  # no column may be lost to the router, which is divided by them
            gain = norms["experts"]
            norms["experts"] = gain.abs().clamp_min(_LEAST_GAIN).copysign(gain)
        linears: dict[str, Weight] = {}
        biases = {}
        for field, (parts, k) in linear_shapes(self.config, number).items():
            listed = self.names.merged[field]
            if self.config.gemma is not None:
                listed = listed[: len(parts)]
            prefixes = [begin + name for name in listed]
            if len(prefixes) == 1:
                parts = (sum(parts),)
            if field in self.names.floating:
                linears[field] = self.floating_part(prefixes[0], parts[0], k)
            else:
                linears[field] = self.linear(prefixes, parts, k)
            if field in self.names.biased and (field != "qkv" or self.config.qkv_bias):
                held = [self.tensor(f"{p}.bias", n) for p, n in zip(prefixes, parts, strict=True)]
                biases[field] = torch.cat(held)
            else:
                self.check_biases(prefixes, parts)
            if field in self.names.orders:
                order = self.names.orders[field](self.config).to(self.target.device)
                linears[field] = reorder_rows(linears[field], order)
                if field in biases:
                    biases[field] = biases[field][order]
        delta_net = self.delta_net(begin, linears) if net else None
        experts = None
        if self.config.mixture is not None and self.config.has_experts(number):
            experts = self.experts(begin, self.config.mixture, norms.get("experts"))
        if "down" in linears and "gate_up" not in biases:
            _fold_down_order(linears)
        return LayerWeights(
            norms,
            linears,
            biases,
            experts,
            self.sinks(begin),
            delta_net,
            self.kv(begin),
            self.scale(begin),
            self.altup(begin),
        )

    def kv(self, begin: str) -> torch.Tensor | None:
        """As LayerWeights has it."""
        latent = self.config.latent
        heads = self.config.heads
        if latent is None:
            return None
        columns = latent.plain + latent.value
        found = self.floating_part(begin + self.names.kv, heads * columns, latent.kv_rank)
        return found.view(heads, columns, latent.kv_rank)

    def scale(self, begin: str) -> float:
        """Of the residual after a layer."""
        if not self.names.scale:
            return 1.0
        stored = self.target.tensor(begin + self.names.scale, (1,), torch.float32)
        return number_of(stored, on_meta=1.0)

    def delta_net(self, begin: str, linears: dict[str, Weight]) -> DeltaNetWeights:
        """The weights of a delta net; adds its gates to the linear layers."""
        names = self.names.delta_net
        shape = self.config.delta_net
        target = self.target
        assert names is not None
        assert shape is not None
        heads = shape.value_heads
        parts = 2 * heads // len(names.ba)
        ba = torch.cat([self.router(begin + name, parts) for name in names.ba])
        if "ba" in self.names.orders:
            ba = ba[self.names.orders["ba"](self.config).to(target.device)]
        qkvz = linears["qkvz"]
        if isinstance(qkvz, torch.Tensor):
            linears["qkvz"] = torch.cat((qkvz, ba))
        else:
            linears["ba"] = ba
        a_log, dt_bias = (
            target.tensor(begin + name, (heads,), torch.float32)
            for name in (names.a_log, names.dt_bias)
        )
        conv = self.tensor(begin + names.conv, shape.channels, 1, TAPS)[:, 0].contiguous()
        return DeltaNetWeights(
            conv, -a_log.exp(), dt_bias, self.tensor(begin + names.norm, shape.value_dim)
        )

    def inputs(self) -> LayerInputs | None:
        own = self.config.gemma
        config = self.config
        if own is None or not own.input_columns:
            return None
        assert self.names.inputs is not None
        table, projection, norm = self.names.inputs
        columns = config.layers * own.input_columns
        return LayerInputs(
            self.tensor(table, own.input_vocabulary, columns),
            self.router(projection, columns),
            self.tensor(norm, own.input_columns),
        )

    def altup(self, begin: str) -> AltUpWeights | None:
        names = self.names.altup
        hidden = self.config.hidden
        own = self.config.gemma and self.config.gemma.altup
        if not own:
            return None
        assert names is not None
        streams = own.streams
        scale = self.tensor(begin + names.scale, hidden)
        return AltUpWeights(
            self.router(begin + names.router, streams),
            self.tensor(begin + names.norm, hidden),
            self.floating_part(begin + names.prediction, streams**2, streams),
            self.floating_part(begin + names.correction, streams, streams),
            scale if own.scaled else torch.ones_like(scale),
        )

    def streams(self) -> StreamWeights | None:
        names = self.names.altup
        own = self.config.gemma and self.config.gemma.altup
        if not own:
            return None
        assert names is not None
        others = range(own.streams - 1)
        return StreamWeights(
            *(
                tuple(self.router(name.format(number), self.config.hidden) for number in others)
                for name in (names.begin, names.end)
            )
        )

    def sinks(self, begin: str) -> torch.Tensor | None:
        if not self.names.sinks:
            return None
        return self.tensor(begin + self.names.sinks, self.config.heads)

    def experts(self, begin: str, mixture: Mixture, gain: torch.Tensor | None = None) -> Experts:
        """`gain`: of a norm that only the experts have, if the router reads columns of its own scale."""
        names = self.names.experts
        hidden = self.config.hidden
        inner = self.config.intermediate
        assert names is not None
        if names.interleaved:
            router = self.router(begin + names.router, mixture.experts)
            bias = self.tensor(f"{begin}{names.router}.bias", mixture.experts)
            return interleaved_experts.load(
                begin + names.interleaved,
                Router(router, mixture.chosen, mixture.normalized, bias=bias).counting(),
                self.config,
                mixture,
                self.target,
            )
        router, shared_bias = self.router_of_experts(begin, mixture, gain)
        weight_scales: torch.Tensor | None = None
        if names.scales is not None:
            weight_scales = self.tensor(begin + names.scales[1], mixture.experts)
        shapes = ((names.gate_up, 2, inner, hidden), ((names.down,), 1, hidden, inner))

        def parts(field: tuple[str, ...], count: int, n: int, k: int) -> Iterator[Weight]:
            stacked = self.stacked_experts(begin, mixture, of_gate_up=count == 2)
            for number in range(mixture.experts):
                if stacked is not None:
                    found: Weight = stacked[number]
                else:
                    prefixes = [begin + each.format(number) for each in field]
                    found = self.checked(prefixes, (n,) * count, k)
                if count == 1 and weight_scales is not None:
                    assert isinstance(found, torch.Tensor)
                    found = found * weight_scales[number]
                yield found
            if not mixture.shared:
                return
            assert names.shared is not None
            if count == 2:  # gate and up: rows of both
                prefixes = [begin + each for each in names.shared[0]]
                rows = 2 * n * mixture.shared // len(prefixes)
                whole = self.checked(prefixes, (rows,) * len(prefixes), k)
                for at in range(0, n * mixture.shared, n):
                    both = (block_of(whole, s * n * mixture.shared + at, n) for s in range(2))
                    yield concat_rows(both, 2 * n, self.target.dtype)
                return
            whole = self.checked([begin + names.shared[1]], (n,), k * mixture.shared)
            for at in range(0, k * mixture.shared, k):
                yield block_of(whole, 0, n, at, k)

        stacks = []
        for field, count, n, k in shapes:
            try:
                stacks.append(stack_rows(parts(field, count, n, k), mixture.stored))
            except ValueError as error:
                raise ModelInvalid(
                    f"The experts {begin}{field[0]} cannot be joined: {error}.",
                    hint="Take another quantization of the model, or a GGUF of it for llama.cpp.",
                ) from error
        gate_up, down = stacks
        held = Router(
            router,
            mixture.chosen,
            mixture.normalized,
            mixture.shared,
            shared_bias,
            sigmoid=mixture.sigmoid,
            scale=mixture.scale,
        )
        return Experts(held.counting(), gate_up, down, gelu=mixture.gelu)

    def router_of_experts(
        self, begin: str, mixture: Mixture, gain: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The router's weight, with a row for a shared expert, and its bias; `gain` as in `experts`."""
        names = self.names.experts
        assert names is not None
        router = self.router(begin + names.router, mixture.experts)
        bias: torch.Tensor | None = None
        if mixture.gated:
            router = torch.cat((router, self.router(begin + names.shared_gate, 1)))
        elif mixture.shared:  # a row without weights, whose sigmoid is 1
            router = torch.cat((router, torch.zeros_like(router[:1])))
            bias = torch.zeros_like(router[:, 0])
            bias[-1] = _ALWAYS
        if names.correction:
            own = (mixture.experts,)
            correction = self.target.tensor(begin + names.correction, own, torch.float32)
            bias = correction if bias is None else torch.cat((correction, bias[-1:].float()))
        if names.scales is not None:
            assert gain is not None
            router = self.scaled_router(router, begin + names.scales[0], gain)
        return router, bias

    def scaled_router(self, router: torch.Tensor, scale: str, gain: torch.Tensor) -> torch.Tensor:
        """The router's weight for rows that a norm has multiplied with `gain` [K], in place of the router's own
        scale and the root of K."""
        own = self.target.tensor(scale, tuple(gain.shape), torch.float32)
        return (router.float() * own / (gain.float() * math.sqrt(len(gain)))).to(router.dtype)

    def stacked_experts(
        self, begin: str, mixture: Mixture, *, of_gate_up: bool
    ) -> torch.Tensor | None:
        """One tensor with a weight [N, K] of each expert, where the checkpoint has one."""
        names = self.names.experts
        hidden = self.config.hidden
        inner = self.config.intermediate
        assert names is not None
        if names.stacked is None or not self.target.source.has(begin + names.stacked[0]):
            return None
        if self.config.quantization is not None:
            raise ModelInvalid(
                f"{begin}{names.stacked[0]} holds all experts at once, and those of a quantized model "
                "can only be loaded one by one.",
                hint="Take another quantization of the model, or a GGUF of it for llama.cpp.",
            )
        shape = (2 * inner, hidden) if of_gate_up else (hidden, inner)
        name = names.stacked[0 if of_gate_up else 1]
        return self.tensor(begin + name, mixture.experts, *shape)

    def router(self, prefix: str, rows: int) -> torch.Tensor:
        """A router's weight."""
        return self.floating_part(prefix, rows, self.config.hidden)

    def floating_part(self, prefix: str, n: int, k: int) -> torch.Tensor:
        """A weight [N, K], floating: never rounded, and dequantized where a checkpoint did that."""
        stored = self.target.source.shape(f"{prefix}.weight")
        coded = stored == () or (stored is not None and self._names_alike())
        if not coded or not self.format.holds(prefix):
            return self.tensor(f"{prefix}.weight", n, k)
        return dequantized(self.format.part(prefix, n, k), self.target.dtype)

    def checked(self, prefixes: list[str], parts: tuple[int, ...], k: int) -> Weight:
        """As `linear`, of layers without biases."""
        self.check_biases(prefixes, parts)
        return self.linear(prefixes, parts, k)

    def linear(self, prefixes: list[str], parts: tuple[int, ...], k: int) -> Weight:
        found = (self.part(prefix, n, k) for prefix, n in zip(prefixes, parts, strict=True))
        try:
            return concat_rows(found, sum(parts), self.target.dtype)
        except ValueError as error:
            raise ModelInvalid(
                f"{' and '.join(prefixes)} cannot be merged: {error}.",
                hint="Take a quantization of the model without act-order (desc_act false), AWQ, or a GGUF.",
            ) from error

    def part(self, prefix: str, n: int, k: int) -> Weight:
        """Load a linear layer: quantized checkpoints keep some floating. The format reports a missing one."""
        left_out = not self.format.holds(prefix) and self.floating.holds(prefix)
        return (self.floating if left_out else self.format).part(prefix, n, k)


def _fold_down_order(linears: dict[str, Weight]) -> None:
    """Let gate and up compute activations in the order that `down` reads.

    Nothing else reads the features between them, so no kernel has to permute columns."""
    down = linears["down"]
    gate_up = linears["gate_up"]
    if not isinstance(down, w4_pack.W4) or down.order is None:
        return
    order = down.order.long()
    linears["gate_up"] = reorder_rows(gate_up, torch.cat((order, order + down.features_in)))
    linears["down"] = down._replace(order=None)


def load(
    config: ModelConfig,
    names: Names,
    source: WeightSource,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    head_int8: bool = False,
    head_bounds: bool = False,
    progress: Progress = lambda done, total: True,
    notify: Callable[[str], None] = lambda text: None,
) -> ModelWeights:
    """Load all weights to `device` in `dtype` (None: the checkpoint's; packed layers stay packed).

    `head_int8` rounds the head to 8 bits, and keeps the embedding if they are tied. `head_bounds` keeps the
    head and adds an int8 copy with bounds. `progress` is called after each layer with (layers done, layers in
    all); False raises EngineClosed. `notify` gets sentences about the checkpoint for the user.
    Raises ModelInvalid."""
    loader = Loader(
        config, names, LoadTarget(source, device, dtype or _DTYPES[config.dtype], notify)
    )
    embedding = loader.tensor(names.embedding, config.vocabulary, config.hidden)
    layers = []
    for number in range(config.layers):
        layers.append(loader.layer(number))
        if not progress(number + 1, config.layers):
            raise EngineClosed("The load was stopped.")
    head = loader.head(embedding)
    stored_head: torch.Tensor | w8_pack.W8 | GgmlWeight = head
    copy = None
    if isinstance(head, torch.Tensor):
        stored_head = w8_pack.whole_rows(head) if head_int8 else head
        copy = bounded_head(head) if head_bounds else None
    last_norm = loader.norm(names.last_norm, config.hidden)
    if config.logits_divisor != 1.0:
        last_norm = last_norm.float() / config.logits_divisor
    inputs = loader.inputs()
    streams = loader.streams()
    loader.report_unread()
    return ModelWeights(embedding, tuple(layers), last_norm, stored_head, copy, inputs, streams)
