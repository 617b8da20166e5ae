"""Trains the built-in guide from facts.json in one command, on one GPU (or, tiny, on a CPU).

    python scripts/tools/guide/train.py --out FOLDER [--seconds 300] [--steps 3000]

Generates the text on all cores, trains in bf16 with fp32 master weights, and writes to FOLDER:
tokenizer.json, weights-1.safetensors and weights-2.safetensors (fp16), train_log.jsonl, and guide.gguf
if the `gguf` package is installed (otherwise `python scripts/tools/guide/export.py FOLDER` makes it
later, on any machine).

Muon trains the matrices (Jordan et al. 2024: momentum, orthogonalized by five Newton-Schulz steps),
with the update scaled to AdamW's size (Liu et al. 2025); AdamW trains embedding, norms and biases. The
learning rate rises for 2 % of the run, stays, and falls to zero over the last half. `--seconds`
shortens the schedule if the machine is too slow for `--steps`, and `--within` does so for the whole call.
Training begins with the first text that is written, and takes in the rest as it comes.
"""

import argparse
import importlib.util
import json
import os
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import IO, Final, cast

import numpy as np
import torch
from corpus import WRITING_S, Rows, held_out, make_tokenizer, many_rows, writers
from model import Guide, Shape
from safetensors.torch import save_file
from tokens import PAD
from torch import Tensor, nn
from torch.nn import functional as F

HERE: Final = Path(__file__).resolve().parent
SEED: Final = 20261121
HELD_OUT_SEED: Final = 77
ENDING_S: Final = 35  # the loss by kind and the files, after the last step
USER_WEIGHT: Final = 0.1  # questions teach a little language; answers are what counts
TINY: Final = Shape(width=128, layers=2, heads=2, kv_heads=1, inner=256)


def orthogonal(g: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards the nearest orthogonal matrix. g: (N, rows, columns)."""
    x: Tensor = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Muon:
    """Momentum 0.95 (Nesterov), orthogonalized; matrices of one shape are updated together."""

    def __init__(self, parameters: list[torch.nn.Parameter], decay: float) -> None:
        self.groups: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for p in parameters:
            self.groups.setdefault(p.shape, []).append(p)
        self.momentum = {
            s: torch.zeros(len(ps), *s, device=ps[0].device) for s, ps in self.groups.items()
        }
        self.decay = decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, parameters in self.groups.items():
            g = torch.stack([p.grad for p in parameters if p.grad is not None]).float()
            m = self.momentum[shape].lerp_(g, 0.05)
            update = orthogonal(g.lerp(m, 0.95)).float() * (0.2 * max(shape) ** 0.5)
            for p, u in zip(parameters, update, strict=True):
                p.mul_(1 - rate * self.decay).add_(u, alpha=-rate)


def schedule(progress: float) -> float:
    """Share of the peak learning rate at this share of the run."""
    return min(1.0, progress / 0.02, (1 - progress) / 0.5)


def loss_of(model: nn.Module, ids: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """(weighted loss for training, loss of the model's own tokens)."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(ids[:, :-1])
    each = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    mine = own[:, 1:].flatten().float()
    weight = mine + USER_WEIGHT * (1 - mine) * (ids[:, 1:].flatten() != PAD)
    return (each * weight).sum() / weight.sum(), (each.detach() * mine).sum() / mine.sum().clamp(
        min=1
    )


class Feed:
    """Batches of rows in random order, from memory on the device: new rows first, then all again."""

    def __init__(
        self, parts: list[Future[Rows]], per_batch: int, device: torch.device, seed: int
    ) -> None:
        self.written, self.per_batch = parts, per_batch
        self.ids = torch.zeros((0, 0), dtype=torch.int16, device=device)
        self.own = torch.zeros((0, 0), dtype=torch.uint8, device=device)
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []

    def _take(self) -> int:
        """Take in what was written since; returns the number of the first new row."""
        known = len(self.ids)
        ready = [part for part in self.written if part.done()] or self.written[: known == 0]
        self.written = [part for part in self.written if part not in ready]
        for rows in [part.result(timeout=WRITING_S) for part in ready]:
            ids = torch.from_numpy(rows.ids.view(np.int16)).to(self.ids.device)
            own = torch.from_numpy(rows.own).to(self.own.device)
            self.ids = torch.cat((self.ids, ids)) if len(self.ids) else ids
            self.own = torch.cat((self.own, own)) if len(self.own) else own
        return known if len(self.ids) - known >= self.per_batch else 0

    def next(self) -> tuple[Tensor, Tensor]:
        if len(self.order) < self.per_batch:
            first = self._take()
            order = torch.randperm(len(self.ids) - first, generator=self.generator) + first
            self.order = order.tolist()
        picked, self.order = self.order[: self.per_batch], self.order[self.per_batch :]
        at = torch.tensor(picked, device=self.ids.device)
        return self.ids[at].long(), self.own[at]


@torch.no_grad()
def loss_per_kind(
    model: Guide, facts: Path, coder: str, device: torch.device, each: int
) -> dict[str, float]:
    """Mean loss of the model's own tokens, by kind, on conversations of a held-out seed."""
    result = {}
    for kind, talks in held_out(facts, coder, HELD_OUT_SEED, each).items():
        length = min(model.shape.context, max(len(i) for i, _ in talks))
        ids = torch.full((len(talks), length), PAD)
        own = torch.zeros((len(talks), length))
        for row, (tokens, mine) in enumerate(talks):
            ids[row, : min(length, len(tokens))] = torch.tensor(tokens[:length])
            own[row, : min(length, len(mine))] = torch.tensor(mine[:length])
        result[kind] = round(loss_of(model, ids.to(device), own.to(device))[1].item(), 4)
    return result


def save(model: Guide, folder: Path) -> None:
    """Write fp16 weights in two files of about equal size."""
    state = {
        k: v.detach().to("cpu", torch.float16).contiguous() for k, v in model.named_parameters()
    }
    half = sum(v.numel() for v in state.values()) // 2
    first: dict[str, Tensor] = {}
    for name in list(state):
        if sum(v.numel() for v in first.values()) < half:
            first[name] = state.pop(name)
    save_file(first, folder / "weights-1.safetensors")
    save_file(state, folder / "weights-2.safetensors")


def optimize(
    model: Guide,
    compiled: nn.Module,
    feeds: tuple[Feed, Feed],
    args: argparse.Namespace,
    log: IO[str],
) -> None:
    """The training loop: short rows first, rows of the full context for the last part."""
    matrices = [p for n, p in model.blocks.named_parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    muon = Muon(matrices, decay=0.05)
    adam = torch.optim.AdamW(rest, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0)
    begun, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        ids, own = feeds[progress >= args.long_from].next()
        loss, mine = loss_of(compiled, ids, own)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        rate = args.rate * schedule(progress)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        muon.step(rate)
        model.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0 or step == 1:
            spent = time.monotonic() - begun
            line = {"step": step, "loss": round(loss.item(), 4), "own": round(mine.item(), 4),
                    "rate": round(rate, 6), "seconds": round(spent, 1)}  # fmt: skip
            log.write(json.dumps(line) + "\n")
            log.flush()
            if step % 200 == 0 or step == 1:
                print(json.dumps(line), flush=True)
        progress = max(step / args.steps, (time.monotonic() - begun) / args.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="train the built-in guide")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--facts", type=Path, default=HERE / "facts.json")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument(
        "--within",
        type=float,
        default=0,
        help="seconds for all of it, where a limit ends the call; 0: none",
    )
    parser.add_argument("--tokens", type=int, default=131072, help="tokens in a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens in a short row")
    parser.add_argument(
        "--long-from", type=float, default=0.85, help="share after which rows have 4,096 tokens"
    )
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument(
        "--text-tokens", type=int, default=280_000_000, help="tokens of text written"
    )
    parser.add_argument(
        "--writers",
        type=int,
        default=max(1, (os.cpu_count() or 2) - 1),
        help="processes that write the text; a machine may have fewer cores for this than it counts",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a small network, to try the pipeline on a CPU"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED)
    shape = TINY if args.tiny else Shape()
    begun = time.monotonic()
    tokenizer = make_tokenizer(args.facts, SEED, 2000 if args.tiny else 60_000)
    tokenizer.save(str(args.out / "tokenizer.json"))
    coder = tokenizer.to_str()
    shape = replace(shape, vocabulary=tokenizer.get_vocab_size())
    print(f"tokenizer: {shape.vocabulary} tokens, {time.monotonic() - begun:.0f} s", flush=True)
    with writers(args.writers) as pool:
        share = args.text_tokens / args.length
        short = many_rows(
            pool, args.facts, coder, SEED + 1000, int(share * args.long_from), args.length
        )
        long_rows = max(
            args.tokens // shape.context,
            int(share * (1 - args.long_from) * args.length / shape.context),
        )
        long = many_rows(pool, args.facts, coder, SEED + 5000, long_rows, shape.context)
        model = Guide(shape).to(device)
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)
        compiled = warmed(model, args, device)
        print(f"compiled: {time.monotonic() - begun:.0f} s", flush=True)
        feeds = (
            Feed(short, args.tokens // args.length, device, SEED),
            Feed(long, max(1, args.tokens // shape.context), device, SEED),
        )
        if args.within:
            left = args.within - (time.monotonic() - begun) - ENDING_S
            args.seconds = min(args.seconds, max(60.0, left))
            print(f"training for at most {args.seconds:.0f} s", flush=True)
        with (args.out / "train_log.jsonl").open("w") as log:
            optimize(model, compiled, feeds, args, log)
            pool.shutdown(wait=False, cancel_futures=True)
            print(f"text: {sum(f.ids.numel() for f in feeds):,} tokens", flush=True)
            save(model, args.out)
            kinds = loss_per_kind(model, args.facts, coder, device, 20 if args.tiny else 400)
            spent = round(time.monotonic() - begun, 1)
            log.write(json.dumps({"held_out": kinds, "seconds": spent}) + "\n")
    print(json.dumps({"held_out": kinds}), flush=True)
    if importlib.util.find_spec("gguf"):
        from export import export

        export(args.out, args.out / "guide.gguf", "Q8_0")


def warmed(model: Guide, args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The compiled network; both row lengths are compiled while the text is still being generated."""
    if device.type == "cpu":
        return model
    compiled = cast(nn.Module, torch.compile(model, dynamic=False))
    for length in (args.length, model.shape.context):
        ids = torch.zeros((args.tokens // length, length), dtype=torch.long, device=device)
        torch.autograd.backward(loss_of(compiled, ids, torch.ones_like(ids))[0])
    model.zero_grad(set_to_none=True)
    return compiled


if __name__ == "__main__":
    main()
