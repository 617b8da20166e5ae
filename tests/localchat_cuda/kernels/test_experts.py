"""Experts: choice, sort and products against plain torch at awkward shapes; rows alone and among others."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from localchat_cuda.kernels import experts, rms_norm
from localchat_cuda.kernels.experts import Experts, Router, blocks, choice, gemm_int4_few
from localchat_cuda.kernels.experts.blocks import Product
from localchat_cuda.kernels.int4 import e2m1
from localchat_cuda.kernels.int4 import pack as w4_pack
from tests.support.tiny_engine_core import DEVICE

WIDTH, INNER, EPS = 128, 128, 1e-6


class Case(NamedTuple):
    rows: int
    experts: int
    chosen: int
    normalized: bool = True
    shared: int = 0


CASES = [
    Case(1, 4, 2),
    Case(3, 5, 2, False, 2),
    Case(7, 3, 3),
    Case(16, 7, 1, False),
    Case(17, 20, 2),
    Case(33, 2, 1, True, 1),
    Case(2, 512, 3, True, 1),
]
"""Of 20 experts some get no row; 3 of 3 is all of them; 33 rows over 2 need several blocks; of 512
most get none."""


def router_of(case: Case, spread: float = 0.3) -> Router:
    rows = case.experts + bool(case.shared)
    weight = (torch.randn(rows, WIDTH) * spread).half()
    return Router(weight, case.chosen, case.normalized, case.shared).counting()


def random_w4(n: int, k: int, group: int) -> w4_pack.W4:
    scales = (torch.rand(n, k // group) + 0.5) * 0.02
    return w4_pack.pack(torch.randint(0, 16, (n, k)), scales, torch.randint(6, 10, scales.shape))


def layer_of(case: Case, group: int = 0) -> Experts:
    """Of fp16 weights, or int4 ones in groups."""
    router = router_of(case)
    shapes = (router.stored * 2 * INNER, WIDTH), (router.stored * WIDTH, INNER)
    if group:
        packed = [random_w4(*shape, group) for shape in shapes]
        return Experts(router, packed[0], packed[1])
    floating = [(torch.randn(shape) * 0.1).half() for shape in shapes]
    return Experts(router, floating[0], floating[1])


def random_mxfp4(n: int, k: int) -> w4_pack.W4:
    return e2m1.pack_floats(torch.randint(0, 16, (n, k)), random_exponents(n, k))


def random_exponents(n: int, k: int) -> torch.Tensor:
    return torch.randint(119, 123, (n, k // 32), dtype=torch.uint8)


def padded(weight: torch.Tensor, count: int, rows: int) -> torch.Tensor:
    """Codes or exponents of `count` parts with as many rows each."""
    parts = weight.view(count, -1, weight.shape[1])
    return torch.nn.functional.pad(parts, (0, 0, 0, rows - parts.shape[1])).flatten(0, 1)


def clamped_layer(width: int, inner: int, *, packed: bool) -> Experts:
    """5 experts with biases and gpt-oss's activation, of fp16 or MXFP4 weights."""
    count, whole = 5, -(-inner // 128) * 128 if packed else inner
    weight = (torch.randn(count, width) * 0.3).half()
    router = Router(weight, 3, normalized=True, bias=torch.randn(count)).counting()
    gate_bias = torch.zeros(count, 2, whole)
    gate_bias[..., :inner] = torch.randn(count, 2, inner)
    biases = gate_bias.flatten(), torch.randn(count * width)
    if not packed:
        shapes = (count * 2 * inner, width), (count * width, inner)
        weights = [(torch.randn(shape) * 0.1).half() for shape in shapes]
        return Experts(router, weights[0], weights[1], biases[0], biases[1], 2.0)
    rows = count * 2 * inner
    codes, exponents = torch.randint(0, 16, (rows, width)), random_exponents(rows, width)
    gate_up = e2m1.pack_floats(*(padded(each, 2 * count, whole) for each in (codes, exponents)))
    down = random_mxfp4(count * width, inner)
    return Experts(router, gate_up, down, biases[0], biases[1], 2.0)


def added_and_normed(
    rows: int, width: int = WIDTH
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partial sums, residual, gain, and the norm of their sum."""
    y, residual = torch.randn(2, rows, width), torch.randn(rows, width)
    gain = torch.rand(width).half() + 0.5
    x = torch.empty(rows, width, dtype=torch.float16)
    rms_norm.reference(y, residual.clone(), gain, x, EPS)
    return y, residual, gain, x


def run(scene: tuple[torch.Tensor, ...], layer: Experts) -> torch.Tensor:
    """Parts [C, T, H] as a decoder layer computes them."""
    y, residual, gain, x = scene
    rows = residual.shape[0]
    if rows <= experts.FEW_ROWS:
        found, added = experts.apply_few(y, residual, gain, layer, EPS)
        assert torch.allclose(added, residual + y.sum(0), atol=1e-5, equal_nan=True)
        return found
    packed = experts.packed_rows(rows, layer, DEVICE)
    rms_norm.add_norm(y, residual.clone(), gain, torch.empty_like(x), EPS, packed)
    return experts.apply_many(x, packed, layer)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(5)
    with DEVICE:
        yield


@pytest.mark.parametrize(
    "case", [*CASES, Case(1, 300, 8), Case(2, 130, 8), Case(70, 60, 4, False, 4)]
)
def test_choices_are_the_top_of_the_softmax(case: Case) -> None:
    router, scene = router_of(case)._replace(arrivals=None), added_and_normed(case.rows)
    wanted = choice.reference(scene[3], router)
    found = [choice.route(scene[3], router)]
    if case.rows <= choice.FEW_ROWS:
        for one in (router, router.counting()):
            found += [choice.add_few(*scene[:3], one, EPS).choices for _ in range(2)]
    for each in found:
        assert torch.equal(each.ids, wanted.ids)
        assert torch.allclose(each.weights, wanted.weights, atol=1e-3)


@pytest.mark.parametrize(
    "case", [Case(1, 6, 3), Case(3, 5, 2, False, 2), Case(7, 60, 4, True, 1), Case(40, 130, 8)]
)
def test_choices_of_sigmoids_follow_a_correction_that_weighs_nothing(case: Case) -> None:
    plain, scene = router_of(case), added_and_normed(case.rows)
    bias = torch.randn(len(plain.weight)) * 0.3
    router = plain._replace(bias=bias, sigmoid=True, scale=2.5, arrivals=None)
    logits = scene[3].float() @ router.weight.float().t()
    scores = logits[:, : case.experts].sigmoid()
    ids = (scores + bias[: case.experts]).topk(case.chosen, 1).indices
    assert not torch.equal(ids, scores.topk(case.chosen, 1).indices)
    weights = scores.gather(1, ids)
    weights = 2.5 * (weights / weights.sum(1, keepdim=True) if case.normalized else weights)
    found = [choice.reference(scene[3], router), choice.route(scene[3], router)]
    if case.rows <= choice.FEW_ROWS:
        for one in (router, router.counting()):
            found.append(choice.add_few(*scene[:3], one, EPS).choices)
    for each in found:
        assert torch.equal(each.ids[:, : case.chosen], ids.to(torch.int32))
        assert torch.allclose(each.weights[:, : case.chosen], weights, atol=2e-3)
        if case.shared:  # by the last logit and its bias
            gate = (logits[:, -1:] + bias[-1]).sigmoid().expand(-1, case.shared)
            assert torch.allclose(each.weights[:, case.chosen :], gate, atol=2e-3)


def test_tiny_sigmoids_add_up_to_one() -> None:
    weight = torch.zeros(4, WIDTH).half()
    weight[:, 0] = torch.tensor([-9.0, -9.5, -10.0, -12.0])
    x = torch.zeros(1, WIDTH).half()
    x[0, 0] = 2.0
    found = choice.route(x, Router(weight, 2, normalized=True, sigmoid=True))
    assert found.ids.tolist() == [[0, 1]]
    share = 1 / (1 + math.exp(-1))
    assert torch.allclose(found.weights, torch.tensor([[share, 1 - share]]), atol=1e-3)


def test_equal_logits_choose_the_first_experts() -> None:
    router = Router(torch.zeros(6, WIDTH).half(), 3, normalized=True)
    found = choice.route(torch.randn(2, WIDTH).half(), router)
    assert found.ids.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(found.weights, torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("case", [Case(3, 5, 2, False, 2), Case(33, 4, 2)])
def test_experts_without_gates_square_a_relu(case: Case) -> None:
    router, scene = router_of(case), added_and_normed(case.rows)
    up, down = (
        (torch.randn(router.stored * n, k) * 0.1).half() for n, k in ((96, WIDTH), (WIDTH, 96))
    )
    layer = Experts(router, up, down, square=True)
    assert layer.inner == 96
    first = int(choice.reference(scene[3], router).ids[0, 0])
    inner = (scene[3].float() @ up.float().t()).relu().square()[:, 96 * first : 96 * (first + 1)]
    own = inner @ down.view(-1, WIDTH, 96)[first].float().t()
    weight = choice.reference(scene[3], router).weights[0, 0]
    found = run(scene, layer).float()
    assert distance(found[0, :1], own[:1] * weight) < 3e-3
    assert distance(found.sum(0), experts.reference(scene[3], layer)[0]) < 3e-3


@pytest.mark.parametrize("group", [0, 128])
def test_a_row_of_nan_stays_nan_and_spoils_no_other(group: int) -> None:
    layer, scene = layer_of(Case(3, 4, 2), group), added_and_normed(3)
    scene[1][1] = float("nan")
    found = run(scene, layer).sum(0)
    assert bool(found[1].isnan().all())
    wanted = experts.reference(scene[3], layer)[0]
    assert distance(found[[0, 2]], wanted[[0, 2]]) < 2e-3


@pytest.mark.parametrize(
    ("ids", "count"),
    [
        (torch.randint(0, 6, (40, 3)), 6),
        (torch.full((20, 1), 2), 4),
        (torch.tensor([[0], [3]]), 4),
        (torch.randint(0, 3, (700, 2)), 3),
    ],
)
def test_pairs_are_sorted_into_blocks_of_one_expert(ids: torch.Tensor, count: int) -> None:
    ids = ids.to(DEVICE)
    made = blocks.sort(ids.to(torch.int32), count, 16)
    flat, slots = ids.flatten(), made.slots.view(-1, 16)
    found: list[int] = []
    for owner, own in zip(made.owners.tolist(), slots, strict=True):
        pairs = own[own >= 0].tolist() if owner >= 0 else []
        assert all(int(flat[pair]) == owner for pair in pairs)
        found += pairs
    assert found == torch.argsort(flat, stable=True).tolist()
    used = [owner for owner in made.owners.tolist() if owner >= 0]
    assert len(used) == sum(-(-int(n) // 16) for n in torch.bincount(flat))


@pytest.mark.parametrize("case", CASES)
def test_floating_experts_are_their_reference(case: Case) -> None:
    layer, scene = layer_of(case), added_and_normed(case.rows)
    assert distance(run(scene, layer).sum(0), experts.reference(scene[3], layer)[0]) < 2e-3


@pytest.mark.parametrize(
    ("case", "group"),
    [
        (Case(1, 4, 2), 128),
        (Case(1, 3, 2, True, 1), 32),
        (Case(3, 3, 2, False, 1), 64),
        (Case(7, 3, 2), 128),
        (Case(17, 20, 2), 128),
        (Case(18, 2, 1, True, 1), 64),
        (Case(20, 3, 3), 32),
    ],
)
def test_int4_experts_are_their_reference(case: Case, group: int) -> None:
    layer, scene = layer_of(case, group), added_and_normed(case.rows)
    assert distance(run(scene, layer).sum(0), experts.reference(scene[3], layer)[0]) < 2e-3


@pytest.mark.parametrize("group", [128, 32, 0], ids=["128", "32", "mxfp4"])
def test_column_blocks_that_warps_do_not_divide_count_once(group: int) -> None:
    columns = 7 * 128
    weight = random_w4(3 * 16, columns, group) if group else random_mxfp4(3 * 16, columns)
    chosen = choice.Choices(torch.tensor([[2, 0]], dtype=torch.int32), torch.rand(1, 2))
    x, found = torch.randn(2, columns).half(), torch.empty(3, 2, 1, 16)
    for out, tile in zip(found, [(1, 1), (2, 3), (4, 1)], strict=True):
        gemm_int4_few.multiply(x, Product(weight), chosen, out, gemm_int4_few.FewTile(*tile))
    assert found[0].abs().sum() > 0
    assert distance(found[1], found[0]) < 1e-5
    assert distance(found[2], found[0]) < 1e-5


@pytest.mark.parametrize("group", [0, 128])
def test_all_rows_on_one_expert_take_as_many_blocks_as_needed(group: int) -> None:
    layer, scene = layer_of(Case(20, 4, 1), group), added_and_normed(20)
    layer.router.weight.zero_()[2] = scene[3][0]
    rows = (
        each[..., :1, :].expand_as(each).contiguous() for each in (scene[0], scene[1], scene[3])
    )
    y, residual, x = rows
    scene = (y, residual, scene[2], x)
    assert set(choice.route(scene[3], layer.router).ids.flatten().tolist()) == {2}
    assert distance(run(scene, layer).sum(0), experts.reference(scene[3], layer)[0]) < 2e-3


@pytest.mark.parametrize(("group", "normalized"), [(0, False), (64, True)])
def test_a_row_is_the_same_bits_alone_and_among_others(group: int, normalized: bool) -> None:
    layer, scene = layer_of(Case(3, 3, 2, normalized), group), added_and_normed(3)
    whole, (y, residual, gain, x) = run(scene, layer), scene
    for row in range(3):
        one = slice(row, row + 1)
        alone = run((y[:, one].contiguous(), residual[one].clone(), gain, x[one]), layer)
        assert torch.equal(alone[:, 0], whole[:, row])


@pytest.mark.parametrize(
    ("rows", "width", "inner", "packed"),
    [
        (1, 192, 160, False),
        (3, 192, 160, False),
        (20, 192, 160, False),
        (1, 192, 160, True),
        (3, 128, 128, True),
        (8, 192, 352, True),
        (20, 192, 160, True),
        (40, 320, 128, True),
    ],
)
def test_clamped_experts_with_biases_are_their_reference(
    rows: int, width: int, inner: int, packed: bool
) -> None:
    """Also where no column count is a multiple of 128."""
    layer, y_bias = clamped_layer(width, inner, packed=packed), torch.randn(width)
    y, residual, gain, x = added_and_normed(rows, width)
    rms_norm.reference(y, residual.clone(), gain, x, EPS, bias=y_bias)
    wanted = experts.reference(x, layer)[0]
    if rows <= experts.FEW_ROWS:
        found, added = experts.apply_few(y, residual, gain, layer, EPS, y_bias)
        assert torch.allclose(added, residual + y.sum(0) + y_bias, atol=1e-5)
    else:
        packed_x = experts.packed_rows(rows, layer, DEVICE)
        rms_norm.add_norm(y, residual, gain, torch.empty_like(x), EPS, packed_x, y_bias)
        found = experts.apply_many(x, packed_x, layer)
    assert distance(found.sum(0), wanted) < 2e-3


def test_mxfp4_weights_are_their_values() -> None:
    codes = torch.arange(16).repeat(16, 6)
    exponents = torch.tensor([127, 128, 120, 1, 90, 0], dtype=torch.uint8)[:3].repeat(16, 1)
    found = e2m1.dense(e2m1.pack_floats(codes, exponents))
    one = torch.tensor([*e2m1.VALUES, *(-value for value in e2m1.VALUES)]).repeat(2)
    wanted = torch.cat((one, 2 * one, one / 128, torch.zeros(32)))
    assert torch.equal(found, wanted.expand(16, -1))


def test_mxfp4_weights_beyond_fp16_are_refused() -> None:
    exponents = torch.full((16, 4), 129, dtype=torch.uint8)
    with pytest.raises(ValueError, match="scales up to 2 wanted"):
        e2m1.pack_floats(torch.zeros(16, 128, dtype=torch.int64), exponents)


def test_shapes_that_no_kernel_takes_are_refused() -> None:
    x = torch.randn(2, WIDTH).half()
    with pytest.raises(ValueError, match="router: at most 1024 rows wanted, 5 of 4 given"):
        choice.route(x, Router(torch.zeros(4, WIDTH).half(), 5, normalized=True))
    with pytest.raises(ValueError, match=r"router: torch\.float16 wanted"):
        choice.route(x, Router(torch.zeros(4, WIDTH), 2, normalized=True))
    y, residual, gain, _ = added_and_normed(17)
    with pytest.raises(ValueError, match="residual: 1 to 8 rows wanted, 17 given"):
        choice.add_few(y, residual, gain, router_of(Case(17, 4, 2)), EPS)
