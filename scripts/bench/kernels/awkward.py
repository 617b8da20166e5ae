"""Checks, without timing, what the shapes of one model leave out.

Every head dimension, fp16 and bf16 caches, odd lengths and counts, and the sampler with penalties,
masks and biases.
"""

from dataclasses import replace

import numpy as np
import torch

from localchat.backend_api.sampling.reference import Sampler
from localchat.backend_api.sampling.token_counts import TokenCounts
from localchat.backend_api.step import SamplingParams
from localchat_cuda.kernels import rope
from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention import reference as attention_reference
from localchat_cuda.kernels.sampling import sample
from localchat_cuda.kernels.sampling import state as sample_state
from scripts.bench.kernels.draws import fill
from scripts.bench.kernels.timing import GPU, PAGE, VOCABULARY, Results, error

HEADS_OF = {64: (14, 2), 96: (6, 6), 128: (32, 8), 256: (8, 1)}
FEW = ((1, 1), (3, 70), (16, 16), (1, 1000), (5, 65))
MANY = ((65, 65), (40, 167), (1, 64), (300, 555))


def awkward() -> Results:
    """Errors against fp32, by head dimension and dtype, and how many drawn tokens differ."""
    found: Results = {}
    for d, (h, j) in HEADS_OF.items():
        for dtype in (torch.float16, torch.bfloat16):
            name = f"d{d}_{str(dtype).removeprefix('torch.')}"
            found |= {f"rope_{name}": rotated(h, j, d, dtype)}
            found |= {f"few_{name}": attended(FEW, h, j, d, dtype)}
            found |= {f"many_{name}": attended(MANY, h, j, d, dtype)}
            text = " ".join(f"{k} {found[f'{k}_{name}']:.1e}" for k in ("rope", "few", "many"))
            print(f"awkward {name}: error of {text}", flush=True)
    found["draws_that_differ"] = drawn()
    print(f"awkward: {found['draws_that_differ']:.0f} of 32 draws differ", flush=True)
    return found


def scene(
    work: tuple[tuple[int, int], ...], j: int, d: int, dtype: torch.dtype
) -> tuple[torch.Tensor, attention_reference.AttentionBatch]:
    """Pages in a shuffled order with NaN wherever nothing was written, and the batch over them."""
    pages = [-(-length // PAGE) for _, length in work]
    pool = torch.full((sum(pages) + 1, 2, j, PAGE, d), float("nan"), device=GPU, dtype=dtype)
    order = torch.randperm(sum(pages)).tolist()
    tables = torch.full((len(work), max(pages) + 1), sum(pages), dtype=torch.int32)
    for i, (_, length) in enumerate(work):
        for n in range(pages[i]):
            tables[i, n] = order.pop()
            held = min(PAGE, length - n * PAGE)
            pool[int(tables[i, n]), :, :, :held] = torch.randn(2, j, held, d, device=GPU).to(dtype)
    counts = torch.tensor([c for c, _ in work], dtype=torch.int32, device=GPU)
    starts = (counts.cumsum(0) - counts).int()
    lengths = torch.tensor([n for _, n in work], dtype=torch.int32, device=GPU)
    slots = torch.arange(len(work), dtype=torch.int32, device=GPU)
    return pool, attention_reference.AttentionBatch(starts, counts, lengths, slots, tables.to(GPU))


def attended(
    work: tuple[tuple[int, int], ...], h: int, j: int, d: int, dtype: torch.dtype
) -> float:
    """Error of one attention kernel, by its workload."""
    pool, batch = scene(work, j, d, dtype)
    t = sum(c for c, _ in work)
    q = torch.randn(t, h, d, device=GPU).to(dtype)
    k, v = pool[:, 0], pool[:, 1]
    out = torch.full((t, h, d), float("nan"), device=GPU, dtype=dtype)
    if work is FEW:
        partials = decode_attention.Partials.empty(3, t, h, d, GPU)
        decode_attention.attend(q, k, v, batch, 16, partials)
        decode_attention.merge(partials, out.view(t, h * d))
    else:
        config = prefill_attention.best_tile_config(d, PAGE, dtype, GPU)
        tiles = prefill_attention.tiles_of([c for c, _ in work], [n for _, n in work], config.rows)
        listed = torch.tensor(tiles, dtype=torch.int32, device=GPU)
        prefill_attention.attend(q, k, v, batch, listed, out, config=config)
    return error(out, attention_reference.reference(q, k, v, batch, attention_reference.Rules()))


def rotated(h: int, j: int, d: int, dtype: torch.dtype) -> float:
    """Worst error of q and the written pages, with biases and norms of heads."""
    t, splits = 130, 2
    columns = (h + 2 * j) * d
    qkv = torch.randn(splits, t, columns, device=GPU)
    bias = torch.randn(columns, device=GPU)
    q_norm, k_norm = torch.rand(2, d, device=GPU).unbind(0)
    table = rope.angles(300, d, 1e4, GPU)
    positions = torch.arange(t, dtype=torch.int32, device=GPU)
    slots = torch.zeros(t, dtype=torch.int32, device=GPU)
    tables = torch.tensor([[2, 0, 3]], dtype=torch.int32, device=GPU)
    found = []
    for call in (rope.rope_store, rope.reference):
        pool = torch.zeros(4, 2, j, PAGE, d, device=GPU, dtype=dtype)
        q = torch.empty(t, h, d, device=GPU, dtype=dtype)
        k, v = pool[:, 0], pool[:, 1]
        call(qkv, table, positions, slots, tables, q, k, v, bias=bias, q_norm=q_norm, k_norm=k_norm)
        found.append((q, pool))
    return max(error(one, other.float()) for one, other in zip(*found, strict=True))


def drawn() -> float:
    """How many of 32 draws with penalties, masks and biases differ from the numpy reference."""
    points = 32
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((points, VOCABULARY)).astype(np.float32) * 3
    base = SamplingParams(temperature=0.8, top_p=1.0, min_p=0.0, top_logprobs=0)
    kinds = (
        replace(base, temperature=0.0, repetition_penalty=1.5),
        replace(base, frequency_penalty=1.5, presence_penalty=0.5, top_p=0.9),
        replace(base, logit_bias=((17, 9.0), (VOCABULARY + 3, 5.0)), top_k=5),
        replace(base, repetition_penalty=1.2, min_p=0.05),
    )
    params = [replace(kinds[i % 4], seed=i) for i in range(points)]
    known = [[int(row.argmax()), *rng.integers(0, VOCABULARY, 60).tolist()] for row in logits]
    allowed = np.packbits(rng.random(VOCABULARY) < 0.3, bitorder="little").tobytes()
    held = sample_state.SamplingTensors.empty(points, 4, GPU)
    for i, p in enumerate(params):
        fill(held, i, p)
    order = torch.arange(points, dtype=torch.int32, device=GPU)
    prompts = order * 2
    counts = torch.full((points, VOCABULARY), 99, dtype=torch.int32, device=GPU)
    table = torch.tensor(known, dtype=torch.int32, device=GPU)
    positions = torch.full((points,), len(known[0]), dtype=torch.int32, device=GPU)
    words = np.frombuffer(allowed.ljust(-(-VOCABULARY // 32) * 4, b"\0"), np.int32)
    tokens = torch.full((points,), -7, dtype=torch.int32, device=GPU)
    floats = torch.empty(2, points, device=GPU)
    sample.draw(
        torch.tensor(logits, device=GPU), sample_state.Draws(order, order, positions), held,
        sample_state.Scratch.empty(points, VOCABULARY, GPU), tokens, floats[0], floats[1],
        known=sample_state.PenaltyTokens(table, order, prompts, counts),
        masking=sample_state.Masking(
            torch.tensor(words[None].copy(), device=GPU), torch.where(order % 3 == 0, 0, -1).int()
        ),
    )  # fmt: skip
    sampler = Sampler(VOCABULARY)
    wrong = 0
    for i, p in enumerate(params):
        mask = allowed if i % 3 == 0 else None
        wanted = sampler.draw(logits[i], p, len(known[i]), TokenCounts(known[i], 2 * i), mask)
        wrong += wanted.token != int(tokens[i])
    return float(wrong)
