"""The sampler against the numpy reference, and its time."""

from dataclasses import replace
from functools import partial

import torch

from localchat.backend_api.sampling.gumbel import G, mix
from localchat.backend_api.sampling.reference import Sampler
from localchat.backend_api.step import SamplingParams
from localchat_cuda.kernels.sampling import sample
from localchat_cuda.kernels.sampling import state as sample_state
from scripts.bench.kernels.timing import GPU, VOCABULARY, Results, timed


def sampler() -> Results:
    """Check the sampler against the numpy reference, and time it."""
    found: Results = {}
    base = SamplingParams(temperature=0.8, top_p=1.0, min_p=0.0, top_logprobs=0)
    kinds = {
        "greedy": replace(base, temperature=0.0),
        "default": replace(base, temperature=0.7, top_p=0.95, min_p=0.05),
        "top_p": replace(base, top_p=0.95),
        "top_k": replace(base, top_k=40, top_p=0.9),
        "plain": base,
        "typical": replace(base, typical_p=0.9),
    }
    numpy_sampler = Sampler(VOCABULARY)
    for points in (1, 8, 32, 128):
        logits = torch.randn(points, VOCABULARY, device=GPU) * 2.5
        logits[:, :50] += torch.linspace(14, 4, 50, device=GPU)
        order = torch.arange(points, dtype=torch.int32, device=GPU)
        draws = sample_state.Draws(order, order, order + 100)
        scratch = sample_state.Scratch.empty(points, VOCABULARY, GPU)
        out = (
            torch.empty(points, dtype=torch.int32, device=GPU),
            torch.empty(points, device=GPU),
            torch.empty(points, device=GPU),
        )
        for name, kind in kinds.items():
            held = sample_state.SamplingTensors.empty(points, 4, GPU)
            for i in range(points):
                fill(held, i, replace(kind, seed=i * 977 + 5))
            go = partial(sample.draw, logits, draws, held, scratch, *out)
            out[0].fill_(-7)
            go()
            wrong = 0
            rows = logits[: min(points, 16)].cpu().numpy()
            for i, row in enumerate(rows):
                wanted = numpy_sampler.draw(row, replace(kind, seed=i * 977 + 5), i + 100)
                assert wanted.logprob is not None
                off = abs(wanted.logprob - float(out[1][i]))
                wrong += wanted.token != int(out[0][i]) or off > 1e-4
            us = timed([go] * 4) / 4
            found[f"sampler_{name}_{points}_us"] = us
            print(
                f"sampler {points:3} points, {name:8} {us:8.1f} us, {wrong} of {len(rows)} differ",
                flush=True,
            )
    return found


def fill(held: sample_state.SamplingTensors, i: int, p: SamplingParams) -> None:
    held.floats[i] = torch.tensor([column(p) for column in sample_state.FIELDS.values()])
    held.top_k[i] = p.top_k
    key = mix((mix(p.seed + G) ^ p.choice) + G)
    held.keys[i] = key - 2**64 if key >= 2**63 else key
    held.bias_counts[i] = len(p.logit_bias)
    for n, (token, value) in enumerate(p.logit_bias):
        held.bias_ids[i, n], held.bias_values[i, n] = token, value
