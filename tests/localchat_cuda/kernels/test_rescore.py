"""Draws from the bounded head are those from the whole head, in Triton's interpreter."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from localchat.backend_api.step import SamplingParams
from localchat_cuda.kernels import fp8_int8, skinny_gemm
from localchat_cuda.kernels.fp8_int8.bounded_head import BoundedHead, bounded_head
from localchat_cuda.kernels.fp8_int8.pack import dense
from localchat_cuda.kernels.sampling import rescore, sample
from localchat_cuda.kernels.sampling import state as sample_state
from tests.localchat_cuda.kernels.test_sampling import settings_of
from tests.support.seeded import seeded
from tests.support.tiny_engine_core import DEVICE, without_gpu

N, K = 520, 128
GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams(temperature=0.8, top_p=1.0, min_p=0.0)
SETTINGS = [
    PLAIN,
    GREEDY,
    replace(PLAIN, top_k=5, top_p=0.8, typical_p=0.9),
    replace(PLAIN, min_p=0.05, temperature=1.5),
    replace(PLAIN, temperature=0.2),
    replace(PLAIN, top_k=1),
    replace(PLAIN, logit_bias=((7, 4.0), (9, -4.0), (N + 1, 1.0)), temperature=1.2),
    replace(PLAIN, top_k=3, min_p=0.1, logit_bias=((3, 2.5),)),
]


class Drawn(NamedTuple):
    tokens: list[int]
    logits: torch.Tensor
    exact: torch.Tensor
    """[rows, N]: logits that were computed again."""

    @property
    def again(self) -> int:
        """Tokens of which some logit was."""
        return int(self.exact.any(0).sum())


def head_of(seed: int, dtype: torch.dtype = torch.float16, n: int = N, k: int = K) -> torch.Tensor:
    generator = seeded(seed)
    return (torch.randn(n, k, generator=generator) * 0.2).to(dtype)


def states_of(rows: int, seed: int, dtype: torch.dtype = torch.float16, k: int = K) -> torch.Tensor:
    generator = seeded(seed + 1000)
    return torch.randn(rows, k, generator=generator).to(dtype)


def drawn(
    x: torch.Tensor, head: torch.Tensor, copy: BoundedHead, params: list[SamplingParams], position: int = 3,
    known: list[list[int]] | None = None, mask: torch.Tensor | None = None,
) -> Drawn:  # fmt: skip
    """Draw once for each row with the bounded head."""
    rows, n = len(params), head.shape[0]
    logits = fp8_int8.logits(x, copy.weight)
    approximate = logits.clone()
    tokens = torch.full((rows,), -7, dtype=torch.int32)
    order = torch.arange(rows, dtype=torch.int32)
    extras: dict[str, object] = {}
    if known is not None:
        texts = torch.tensor(known, dtype=torch.int32)
        counts = torch.empty(rows, n, dtype=torch.int32)
        extras["known"] = sample_state.PenaltyTokens(texts, order, order + 2, counts)
    if mask is not None:
        extras["masking"] = sample_state.Masking(mask, torch.zeros(rows, dtype=torch.int32))
    sample.draw(
        logits, sample_state.Draws(order, order, order * 0 + position), settings_of(params),
        sample_state.Scratch.empty(rows, n, DEVICE), tokens, torch.empty(rows), torch.empty(rows),
        rescoring=rescore.Rescoring(x, head, copy.bounds),
        rescore_scratch=rescore.RescoreScratch.empty(rows, n, DEVICE), **extras,  # type: ignore[arg-type]
    )  # fmt: skip
    same = (logits == approximate) | (logits.isnan() & approximate.isnan())
    return Drawn(tokens.tolist(), logits, ~same)


def whole(copy: BoundedHead) -> BoundedHead:
    """A copy that excludes nothing: every token is computed by the head itself."""
    return copy._replace(bounds=torch.full_like(copy.bounds, float("inf")))


def same_draws(
    x: torch.Tensor, head: torch.Tensor, params: list[SamplingParams], **more: object
) -> tuple[Drawn, Drawn]:
    """Draw with the bounded and with the whole head, and compare."""
    copy = bounded_head(head)
    found = drawn(x, head, copy, params, **more)  # type: ignore[arg-type]
    wanted = drawn(x, head, whole(copy), params, **more)  # type: ignore[arg-type]
    assert found.tokens == wanted.tokens
    torch.testing.assert_close(
        found.logits[found.exact], wanted.logits[found.exact], rtol=0, atol=0, equal_nan=True
    )
    return found, wanted


@pytest.mark.parametrize(("n", "k"), [(130, 128), (34, 160), (34, 640), (34, 1024)])
def test_tokens_computed_again_have_the_bits_of_the_head_for_one_row(n: int, k: int) -> None:
    head, x = head_of(1, n=n, k=k), states_of(2, 1, k=k)
    found = drawn(x, head, whole(bounded_head(head)), [GREEDY, PLAIN])
    exact = torch.empty(2, n)
    for row in range(2):
        skinny_gemm.gemm(x[row : row + 1], head, exact[row : row + 1])
    assert torch.equal(found.logits, exact)
    assert found.exact.all()


@pytest.mark.parametrize("rows", [1, 8])
def test_draws_are_those_of_the_whole_head(rows: int) -> None:
    head, x = head_of(rows), states_of(rows, rows)
    params = [replace(p, seed=rows + i) for i, p in enumerate(SETTINGS[:rows])]
    found, _ = same_draws(x, head, params)
    assert 0 < found.again < N / 3
    # A token that few rows want is computed for two rows, or for those of several draws.
    assert rows == 1 or int(found.exact.sum()) < 0.6 * rows * found.again


def test_the_copy_of_a_head_may_have_padded_columns() -> None:
    head, x = head_of(6, k=K + 32), states_of(2, 6, k=K + 32)
    found, _ = same_draws(x, head, [GREEDY, replace(PLAIN, temperature=0.2)])
    assert 0 < found.again < N / 3


def test_penalties_and_masks_are_applied_to_the_bounds() -> None:
    head, x = head_of(4), states_of(2, 4)
    best = (x.float() @ head.float().t()).topk(2).indices
    known = [[int(best[i, 0]), 5, int(best[i, 1]), int(best[i, 0])] for i in range(2)]
    params = [
        replace(GREEDY, repetition_penalty=1.6, frequency_penalty=0.3),
        replace(PLAIN, top_k=6, presence_penalty=0.7, repetition_penalty=0.8, seed=2),
    ]
    words = torch.full((1, -(-N // 32)), -1, dtype=torch.int32)
    words[0, int(best[0, 1]) // 32] = 0
    found, _ = same_draws(x, head, params, position=4, known=known, mask=words)
    plain = drawn(x, head, bounded_head(head), [GREEDY, PLAIN])
    assert found.tokens[0] != plain.tokens[0] == int(best[0, 0])


def test_near_ties_and_equal_rows_are_all_computed_again() -> None:
    head, x = head_of(5), states_of(2, 5)
    # A few dozen copies of one row, some with a feature changed in its last bit.
    best = int((x[0].float() @ head.float().t()).argmax())
    head[100:140] = head[best].clone()
    head[110:120, 0] *= 1 + 2**-10
    found, wanted = same_draws(x, head, [GREEDY, replace(PLAIN, top_k=7, seed=3)])
    assert bool(found.exact[:, 100:140].any(0).all())
    assert set(wanted.logits[0].topk(20).indices.tolist()) <= {best, *range(100, 140)}


def test_a_flat_row_is_the_whole_head() -> None:
    head = head_of(6)[:1].repeat(N, 1)
    found, _ = same_draws(states_of(1, 6), head, [replace(PLAIN, seed=1)])
    assert found.again > N / 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_undefined_numbers_draw_what_the_whole_head_draws(bad: float) -> None:
    head, x = head_of(7), states_of(3, 7)
    head[20, 3] = bad
    x[1, 4] = bad
    found, _ = same_draws(x, head, [GREEDY, PLAIN, replace(PLAIN, top_k=4)])
    assert found.again >= N - 1


def test_draws_that_nobody_reads_are_not_computed_again() -> None:
    head, x = head_of(8), states_of(1, 8)
    found = drawn(x, head, bounded_head(head), [replace(GREEDY, top_k=rescore.DISCARDED)])
    assert not found.exact.any()


@without_gpu
def test_float32_states_find_the_best_token() -> None:
    head, x = head_of(9, torch.float32), states_of(2, 9, torch.float32)
    found = drawn(x, head, bounded_head(head), [GREEDY, GREEDY])
    assert found.tokens == (x @ head.t()).argmax(1).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bounds_hold_and_are_close_to_the_rounding(dtype: torch.dtype) -> None:
    head = head_of(10, dtype) * torch.linspace(1e-3, 3, N)[:, None].to(dtype)
    copy = bounded_head(head)
    error = (head.double() - dense(copy.weight).double())[::7]
    off = error.norm(dim=1)
    assert bool((off <= copy.bounds[::7].double()).all())
    assert bool(
        (copy.bounds[::7].double() <= 1.2 * off + 1e-3 * head[::7].double().norm(dim=1)).all()
    )


def test_a_smaller_bound_would_lose_the_best_token() -> None:
    """A state along the rounding error of a row, and a row without error that the copy takes for better."""
    head, best, rival = head_of(11), 300, 40
    error = head[best].double() - dense(bounded_head(head).weight)[best].double()
    x = (error * 400).half()[None]
    signs, state = error.sign(), x[0].double()
    between = (head[best].double() - error / 2) @ state
    height = between / (signs @ state)
    others = ((height - 1) * signs).half()
    head[:] = torch.where(torch.arange(N)[:, None] == best, head, others)
    head[rival] = (height * signs).half()
    copy = bounded_head(head)
    found = drawn(x, head, copy, [GREEDY])
    assert found.tokens == [best] == [int((x.double() @ head.double().t()).argmax())]
    assert int(fp8_int8.logits(x, copy.weight).argmax()) == rival
    tight = drawn(x, head, copy._replace(bounds=copy.bounds * 0.3), [GREEDY])
    assert tight.tokens == [rival]
