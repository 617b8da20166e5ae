"""Streams of a Gemma 3n's residual during one step.

Layers compute with the first stream, and alternating updates correct the others. Streams start as projections
of the embeddings. At the end, their projections are scaled to the power of the first stream and averaged.

Letters: see kernels/altup.py.
"""

import torch

from localchat_cuda.kernels import altup
from localchat_cuda.kernels.altup import Added
from localchat_cuda.layers.dense import DenseLayers
from localchat_cuda.layers.output_head import dense_gemm
from localchat_cuda.weights.model_weights import LayerWeights, ModelWeights

_MIN_POWER = 1e-5
"""Lower bound of the mean square of a projected row."""


class Streams:
    """Streams of one step, [A, T, H] in fp32."""

    def __init__(self, ops: DenseLayers, weights: ModelWeights) -> None:
        """Start from the embeddings of the step's tokens. `ops`: its residual is the one of a single layer."""
        assert weights.streams is not None
        self._ops = ops
        self._weights = weights.streams
        ops.embed_residual(weights.embedding)
        x = ops.residual.to(ops.dtype)
        projected = [
            dense_gemm(x, projection, kernels=ops.kernels) for projection in self._weights.begin
        ]
        self._streams = _with_power_of_first(torch.stack((ops.residual, *projected)))
        self._before: Added | None = None

    def predict(self, layer: LayerWeights) -> torch.Tensor:
        """Start a layer, and return the normed rows for its attention: [T, H] in the model's dtype."""
        assert layer.altup is not None
        out = self._empty()
        predict = self._ops.implementation(altup.predict, altup.predict_reference)
        predict(
            self._streams,
            layer.altup,
            layer.norms["attention"],
            out,
            self._ops.config.eps,
            self._before,
        )
        return out

    def add_laurel(self, x: torch.Tensor, y: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """Add attention and its low-rank product, and return the rows for the MLP.

        `x`: input of attention. `y`: partial sums of attention. Rows that `ops` dropped are dropped here,
        too."""
        ops = self._ops
        norms = layer.norms
        self._streams = ops.remaining_rows(self._streams)
        x = ops.remaining_rows(x)
        left = layer.linears["laurel_left"]
        assert isinstance(left, torch.Tensor)
        inner = torch.empty(len(x), len(left), dtype=ops.dtype, device=ops.device)
        inner = dense_gemm(x, left, kernels=ops.kernels, out=inner).to(ops.dtype)
        out = self._empty()
        add_laurel = ops.implementation(altup.add_laurel, altup.add_laurel_reference)
        add_laurel(
            self._streams,
            Added(y, norms["post_attention"]),
            Added(ops.gemm(inner, layer.linears["laurel_right"]), norms["post_laurel"]),
            (norms["attention"], norms["mlp"]),
            ops.residual,
            out,
            ops.config.eps,
        )
        return out

    def correct(self, y: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """Add partial sums y of the MLP, and return the second embedding's gate rows."""
        assert layer.altup is not None
        ops = self._ops
        out = self._empty()
        correct = ops.implementation(altup.correct, altup.correct_reference)
        correct(
            self._streams,
            ops.residual,
            Added(y, layer.norms["post_mlp"]),
            layer.altup,
            out,
            ops.config.eps,
        )
        return out

    def end(self, y: torch.Tensor, layer: LayerWeights) -> None:
        """Finish a layer: add partial sums y to all streams but the first."""
        self._before = Added(y, layer.norms["post_input"])

    def finish(self, gain: torch.Tensor) -> torch.Tensor:
        """Return the last states [P, H] for the head, normed with `gain`."""
        ops = self._ops
        assert self._before is not None
        self._streams[1:] += ops.add_normed(self._before)
        if ops.logits_indices is not None:
            self._streams = self._streams[:, ops.logits_indices]
        projected = (
            dense_gemm(x, projection, kernels=ops.kernels)
            for x, projection in zip(
                self._streams[1:].to(ops.dtype), self._weights.end, strict=True
            )
        )
        states = _with_power_of_first(torch.stack((self._streams[0], *projected)))
        return ops.normed(None, states.mean(0), gain)

    def _empty(self) -> torch.Tensor:
        ops = self._ops
        return torch.empty(ops.residual.shape, dtype=ops.dtype, device=ops.device)


def _with_power_of_first(streams: torch.Tensor) -> torch.Tensor:
    """Scale all streams in place to the first one's root mean square, row by row."""
    power = streams.square().mean(-1, keepdim=True)
    streams[1:] *= (power[:1] / power[1:].clamp_min(_MIN_POWER)).sqrt()
    return streams
