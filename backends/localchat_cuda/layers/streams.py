"""Streams of a Gemma 3n's residual during one step; letters as in kernels/altup.py.

Layers compute with the first stream, and the others follow by alternating updates. They begin as projections of
the embeddings, and end as one state: the mean of their projections, all as large as the first.
"""

import torch

from localchat_cuda.kernels import altup
from localchat_cuda.kernels.altup import Added
from localchat_cuda.layers.dense import DenseLayers
from localchat_cuda.layers.output_head import dense_gemm
from localchat_cuda.weights.model_weights import LayerWeights, ModelWeights

_LEAST_POWER = 1e-5
"""Mean square of a projected row, at least."""


class Streams:
    """The streams, [A, T, H] in fp32."""

    def __init__(self, ops: DenseLayers, weights: ModelWeights) -> None:
        """Begin with the embeddings of the step's tokens. `ops`: whose residual is that of one layer only."""
        assert weights.streams is not None
        self._ops = ops
        self._weights = weights.streams
        ops.embed_residual(weights.embedding)
        x = ops.residual.to(ops.dtype)
        projected = [dense_gemm(x, each, kernels=ops.kernels) for each in self._weights.begin]
        self._streams = _as_large(torch.stack((ops.residual, *projected)))
        self._before: Added | None = None

    def predict(self, layer: LayerWeights) -> torch.Tensor:
        """Begin a layer: the normed row of its attention, [T, H] in the model's dtype."""
        assert layer.altup is not None
        out = self._empty()
        call = altup.predict if self._ops.kernels else altup.predict_reference
        call(
            self._streams,
            layer.altup,
            layer.norms["attention"],
            out,
            self._ops.config.eps,
            self._before,
        )
        return out

    def add_laurel(self, x: torch.Tensor, y: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """Add partial sums y of attention, and of the low-rank product of its input x; the MLP's row. Rows
        that `ops` dropped in between go here, too."""
        ops = self._ops
        norms = layer.norms
        self._streams = ops.kept(self._streams)
        x = ops.kept(x)
        left, right = (layer.linears[name] for name in ("laurel_left", "laurel_right"))
        assert isinstance(left, torch.Tensor)
        inner = torch.empty(len(x), len(left), dtype=ops.dtype, device=ops.device)
        inner = dense_gemm(x, left, kernels=ops.kernels, out=inner).to(ops.dtype)
        out = self._empty()
        (altup.add_laurel if ops.kernels else altup.add_laurel_reference)(
            self._streams,
            Added(y, norms["post_attention"]),
            Added(ops.gemm(inner, right), norms["post_laurel"]),
            (norms["attention"], norms["mlp"]),
            ops.residual,
            out,
            ops.config.eps,
        )
        return out

    def correct(self, y: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """Add partial sums y of the MLP; the row by which a layer reads its part of the second embedding."""
        assert layer.altup is not None
        ops = self._ops
        out = self._empty()
        (altup.correct if ops.kernels else altup.correct_reference)(
            self._streams,
            ops.residual,
            Added(y, layer.norms["post_mlp"]),
            layer.altup,
            out,
            ops.config.eps,
        )
        return out

    def end(self, y: torch.Tensor, layer: LayerWeights) -> None:
        """Add partial sums y to all streams but the first, at the end of a layer."""
        self._before = Added(y, layer.norms["post_input"])

    def finish(self, gain: torch.Tensor) -> torch.Tensor:
        """Last states [P, H] that the head reads, normed with `gain`."""
        ops = self._ops
        assert self._before is not None
        self._streams[1:] += ops.add_normed(self._before)
        if ops.logits_indices is not None:
            self._streams = self._streams[:, ops.logits_indices]
        projected = (
            dense_gemm(x, each, kernels=ops.kernels)
            for x, each in zip(self._streams[1:].to(ops.dtype), self._weights.end, strict=True)
        )
        found = _as_large(torch.stack((self._streams[0], *projected)))
        return ops.normed(None, found.mean(0), gain)

    def _empty(self) -> torch.Tensor:
        ops = self._ops
        return torch.empty(ops.residual.shape, dtype=ops.dtype, device=ops.device)


def _as_large(streams: torch.Tensor) -> torch.Tensor:
    """The streams with the root mean square of the first, row by row; in place."""
    power = streams.square().mean(-1, keepdim=True)
    streams[1:] *= (power[:1] / power[1:].clamp_min(_LEAST_POWER)).sqrt()
    return streams
