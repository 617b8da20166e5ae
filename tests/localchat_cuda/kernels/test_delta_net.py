"""Kernels of gated delta nets and Mamba 2 against plain torch: sequences of any length, new or going on."""

from typing import NamedTuple

import pytest
import torch

from localchat_cuda.kernels import delta_net
from localchat_cuda.kernels.attention.reference import AttentionBatch
from localchat_cuda.kernels.delta_net import (
    CHUNK,
    TAPS,
    ChunkedPart,
    DeltaNetWeights,
    LayerStates,
    Prepared,
    Projection,
    Tokens,
    chunked,
    gated_norm,
    prepare,
    recurrent,
)
from tests.support.tiny_engine_core import DEVICE

ENTRIES = 6


class Shape(NamedTuple):
    key_heads: int
    value_heads: int
    k: int
    v: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.k + self.value_heads * self.v


SHAPES = [Shape(2, 4, 16, 32), Shape(1, 3, 32, 64), Shape(2, 2, 64, 16)]
WIDE_SHAPES = [Shape(2, 4, 64, 64), Shape(1, 3, 64, 128), Shape(2, 2, 128, 64)]
"""Those that the chunked form takes."""
MAMBA_SHAPES = [Shape(2, 4, 64, 80), Shape(1, 3, 64, 64)]
"""Heads of 80 columns are no power of two."""


class Part(NamedTuple):
    """New tokens of a sequence."""

    slot: int
    start: int
    width: int


class Scene:
    """A layer's step: its inputs, states and weights, and copies of the states for the reference."""

    def __init__(
        self,
        shape: Shape,
        parts: list[Part],
        dtype: torch.dtype,
        sums: int = 1,
        *,
        alike: bool = False,
        mamba: bool = False,
    ) -> None:
        torch.manual_seed(shape.k + sum(part.width for part in parts))
        self.shape, self.parts, self.dtype = shape, parts, dtype
        h, c, values = shape.value_heads, shape.channels, shape.value_heads * shape.v
        self.tokens_count = t = sum(part.width for part in parts)
        # Gates stand in the same rows, and more columns that nothing reads.
        products = torch.randn(sums, t, c + values + 2 * h + 3)
        if (
            alike
        ):  # keys of almost one direction, kept for long: powers of their products would overflow
            products[:, :, : 2 * shape.key_heads * shape.k] = (
                4.0 + 0.01 * products[:, :, : 2 * shape.key_heads * shape.k]
            )
            products[:, :, c + values :] = 3.0
        kind = dtype if sums == 1 else torch.float32
        products = products.to(kind).to(DEVICE)
        self.projection = Projection(products, products[..., c + values :])
        rate = -0.001 if alike else -0.5
        self.weights = DeltaNetWeights(
            (torch.rand(c, TAPS) * 0.5 if alike else torch.randn(c, TAPS)).to(dtype).to(DEVICE),
            rate * torch.rand(h, device=DEVICE),
            torch.randn(h, device=DEVICE),
            torch.rand(shape.v).to(dtype).to(DEVICE),
        )
        if mamba:
            self.weights = self.weights._replace(
                bias=torch.randn(c).to(dtype).to(DEVICE), skip=torch.randn(h, device=DEVICE)
            )
        self.states = self._states()
        self.expected = LayerStates(*(each.clone() for each in self.states))
        self.batch = self._batch(parts)
        self.tokens = Tokens(
            self._ints([part.slot for part in parts for _ in range(part.width)]),
            self._ints([part.start + i for part in parts for i in range(part.width)]),
            self._ints([i for part in parts for i in range(part.width)]),
        )
        self.out = torch.zeros(t, h, shape.v, dtype=dtype, device=DEVICE)
        self.wanted = torch.zeros(t, h, shape.v, device=DEVICE)
        self.prepared = self._prepared(dtype)
        self.right = self._prepared(dtype)
        prepare.reference(self.projection, self.weights, self.expected, self.tokens, self.right)

    def _states(self) -> LayerStates:
        shape = self.shape
        matrices = torch.randn(ENTRIES, shape.value_heads, shape.k, shape.v)
        inputs = torch.randn(ENTRIES, TAPS - 1, shape.channels).to(self.dtype)
        fresh = [part.slot for part in self.parts if not part.start]
        matrices[fresh], inputs[fresh] = float("nan"), float("nan")  # they must not be read
        for part in self.parts:
            inputs[part.slot, : max(0, TAPS - 1 - part.start) if part.start else 0] = 0.0
        return LayerStates(matrices.to(DEVICE), inputs.to(DEVICE))

    def _prepared(self, dtype: torch.dtype) -> Prepared:
        return Prepared.empty(
            self.tokens_count,
            self.shape.channels,
            self.shape.value_heads,
            dtype,
            torch.device(DEVICE),
        )

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def _batch(self, parts: list[Part]) -> AttentionBatch:
        firsts = [sum(part.width for part in parts[:i]) for i in range(len(parts))]
        return AttentionBatch(
            self._ints(firsts),
            self._ints([part.width for part in parts]),
            self._ints([max(1, part.start + part.width) for part in parts]),
            self._ints([part.slot for part in parts]),
            self._ints([0])[None],
        )

    def chunked_part(self) -> ChunkedPart:
        chunks = [
            (i, at) for i, part in enumerate(self.parts) for at in range(-(-part.width // CHUNK))
        ]
        flat = [number for chunk in [*chunks, (-1, 0)] for number in chunk]
        return ChunkedPart(self.batch, self._ints(flat).view(-1, 2))

    def assert_right(self, tolerance: float) -> None:
        skip = self.weights.skip
        recurrent.reference(
            self.right, self.projection, self.expected, self.batch, self.wanted, skip
        )
        assert distance(self.out, self.wanted) < tolerance
        used = [part.slot for part in self.parts if part.width]
        assert distance(self.states.matrices[used], self.expected.matrices[used]) < tolerance
        found, wanted = self.states.inputs, self.expected.inputs
        assert torch.equal(found[used], wanted[used])
        others = [entry for entry in range(ENTRIES) if entry not in used]
        assert torch.equal(
            self.states.matrices[others].nan_to_num(), self.expected.matrices[others].nan_to_num()
        )
        assert torch.equal(found[others].nan_to_num(), wanted[others].nan_to_num())


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-9))


FEW = [
    [Part(0, 0, 1)],
    [Part(3, 7, 1), Part(1, 0, 2), Part(0, 1, 1), Part(2, 2, 1), Part(5, 0, 0)],
    [Part(4, 0, 16), Part(2, 9, 3), Part(1, 1, 5)],
    [Part(0, 0, 3), Part(1, 0, 18)],
]
"""Of a sequence's second and third token the convolution reads less than it could."""
MANY = [
    [Part(0, 0, 64)],
    [Part(2, 5, 17), Part(1, 0, 65), Part(3, 0, 0), Part(0, 2, 63)],
    [Part(4, 0, 131), Part(5, 64, 128)],
]


@pytest.mark.parametrize(
    ("shape", "dtype", "sums", "mamba"),
    [
        (SHAPES[0], torch.float16, 3, False),
        (SHAPES[1], torch.float32, 1, False),
        (MAMBA_SHAPES[0], torch.float32, 2, True),
    ],
)
@pytest.mark.parametrize("parts", FEW)
def test_convolution_norms_and_gates_are_their_reference(
    shape: Shape, parts: list[Part], dtype: torch.dtype, sums: int, mamba: bool
) -> None:
    scene = Scene(shape, parts, dtype, sums, mamba=mamba)
    prepare.prepare(scene.projection, scene.weights, scene.states, scene.tokens, scene.prepared)
    for found, wanted in zip(scene.prepared, scene.right, strict=True):
        assert bool(wanted.isfinite().all())
        assert distance(found, wanted) < (1e-5 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("parts", FEW)
@pytest.mark.parametrize(("shape", "sums"), [(SHAPES[0], 1), (SHAPES[1], 2), (SHAPES[2], 1)])
def test_the_recurrent_form_is_its_reference(shape: Shape, parts: list[Part], sums: int) -> None:
    scene = Scene(shape, parts, torch.float32, sums)
    recurrent.apply(scene.right, scene.projection, scene.states, scene.batch, scene.out)
    scene.assert_right(1e-5)


@pytest.mark.parametrize("parts", FEW)
@pytest.mark.parametrize(("shape", "sums"), [(MAMBA_SHAPES[0], 2), (MAMBA_SHAPES[1], 1)])
def test_the_recurrent_form_of_mamba_is_its_reference(
    shape: Shape, parts: list[Part], sums: int
) -> None:
    scene = Scene(shape, parts, torch.float32, sums, mamba=True)
    skip = scene.weights.skip
    recurrent.apply(scene.right, scene.projection, scene.states, scene.batch, scene.out, skip)
    scene.assert_right(1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 3e-3)])
@pytest.mark.parametrize("parts", MANY)
@pytest.mark.parametrize("shape", MAMBA_SHAPES)
def test_the_chunked_form_of_mamba_is_the_recurrent_one(
    shape: Shape, parts: list[Part], dtype: torch.dtype, tolerance: float
) -> None:
    scene = Scene(shape, parts, dtype, mamba=True)
    part, skip = scene.chunked_part(), scene.weights.skip
    chunked.apply(scene.right, scene.projection, scene.states, part, scene.out, skip)
    scene.assert_right(tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 3e-3)])
@pytest.mark.parametrize("parts", MANY)
@pytest.mark.parametrize("shape", WIDE_SHAPES)
def test_the_chunked_form_is_the_recurrent_one(
    shape: Shape, parts: list[Part], dtype: torch.dtype, tolerance: float
) -> None:
    scene = Scene(shape, parts, dtype)
    chunked.apply(scene.right, scene.projection, scene.states, scene.chunked_part(), scene.out)
    scene.assert_right(tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float16, 2e-2)])
def test_keys_of_one_direction_spoil_no_chunk(dtype: torch.dtype, tolerance: float) -> None:
    scene = Scene(WIDE_SHAPES[0], [Part(1, 0, 200)], dtype, alike=True)
    chunked.apply(scene.right, scene.projection, scene.states, scene.chunked_part(), scene.out)
    scene.assert_right(tolerance)


def apply_layer(scene: Scene) -> None:
    """Run a layer over one sequence of few tokens, and one of two chunks."""
    whole = scene.batch
    few, many = (
        AttentionBatch(
            whole.starts[own], whole.counts[own], whole.lengths[own], whole.slots[own], whole.tables
        )
        for own in (slice(0, 1), slice(1, 2))
    )
    chunks = torch.tensor([[0, 0], [0, 1]], dtype=torch.int32, device=DEVICE)
    delta_net.apply(
        scene.projection, scene.weights, scene.states, scene.tokens, few, ChunkedPart(many, chunks),
        scene.out,
    )  # fmt: skip


def test_a_layer_runs_both_forms_side_by_side() -> None:
    scene = Scene(WIDE_SHAPES[0], [Part(0, 3, 1), Part(1, 0, 70)], torch.float32)
    apply_layer(scene)
    scene.assert_right(1e-4)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]])
def test_prompts_of_narrow_heads_take_the_recurrent_form(shape: Shape) -> None:
    scene = Scene(shape, [Part(0, 3, 1), Part(1, 0, 70)], torch.float32)
    apply_layer(scene)
    scene.assert_right(1e-5)
    with pytest.raises(ValueError, match="keys and values of 64 columns wanted"):
        chunked.apply(scene.right, scene.projection, scene.states, scene.chunked_part(), scene.out)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("t", "h", "v"), [(1, 4, 32), (3, 2, 96), (70, 16, 64)])
def test_output_gates_are_their_reference(t: int, h: int, v: int, weighted: bool) -> None:
    torch.manual_seed(t)
    x = torch.randn(t, h, v, device=DEVICE).half()
    z = torch.randn(2, t, 5 + h * v, device=DEVICE)[..., 5:]
    weight = torch.rand(v, device=DEVICE).half() if weighted else None
    found, wanted = (torch.empty(t, h * v, device=DEVICE).half() for _ in range(2))
    gated_norm.gate(x, z, weight, found, 1e-6)
    gated_norm.reference(x, z, weight, wanted, 1e-6)
    assert distance(found, wanted) < 1e-3


@pytest.mark.parametrize(("t", "h", "v"), [(1, 1, 512), (3, 2, 96), (300, 4, 80)])
def test_gates_before_norms_of_groups_are_their_reference(t: int, h: int, v: int) -> None:
    torch.manual_seed(t)
    x = torch.randn(t, h, v, device=DEVICE).half()
    z = torch.randn(2, t, 5 + h * v, device=DEVICE)[..., 5:]
    weight = torch.rand(h * v, device=DEVICE).half()
    found, wanted = (torch.empty(t, h * v, device=DEVICE).half() for _ in range(2))
    gated_norm.gate(x, z, weight, found, 1e-6, groups=True)
    gated_norm.reference(x, z, weight, wanted, 1e-6, groups=True)
    assert distance(found, wanted) < 1e-3


def test_wrong_arguments_are_named() -> None:
    scene = Scene(WIDE_SHAPES[0], FEW[0], torch.float16)
    few = scene.projection._replace(qkvz=scene.projection.qkvz[..., : scene.shape.channels - 1])
    with pytest.raises(ValueError, match="qkvz"):
        prepare.prepare(few, scene.weights, scene.states, scene.tokens, scene.prepared)
    half = scene.states._replace(matrices=scene.states.matrices.half())
    with pytest.raises(ValueError, match="matrices"):
        recurrent.apply(scene.right, scene.projection, half, scene.batch, scene.out)
    wide = scene.chunked_part()._replace(chunks=scene.chunked_part().chunks.long())
    with pytest.raises(ValueError, match="chunks"):
        chunked.apply(scene.right, scene.projection, scene.states, wide, scene.out)
