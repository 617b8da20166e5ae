"""Trains a tiny model that adds and reads imperfectly, to measure votes with: bench_tries.py --model OUT.

    PYTHONPATH=.:backends python scripts/tools/guide/tries_model.py OUT.gguf [--kinds sums] [--minutes 10]

One core, a few minutes. Stops once answers that are drawn at temperature 1 are right this often, of each kind
that is trained, or when the time is over: a model that never errs has nothing to vote about. Questions are
those of bench_tries.py; one in five sums (by its numbers) is never trained on.
"""

import argparse
import json
import time
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
import torch
from export import write_gguf
from model import Guide, Shape
from tokens import TEMPLATE, TURN_END, TURN_START, train_tokenizer
from torch.nn import functional as F

from scripts.bench.bench_tries import Question, reading_question, sum_question

assert "<|im_start|>" in TEMPLATE, "the prompt below is written as the template writes it"
_BATCH: Final = {"sums": 128, "reading": 32}
_WARM_STEPS: Final = 100
_LOOK_EVERY: Final = 100
_RATE: Final = 1e-3


class Examples:
    """Questions as rows of tokens, the answer last."""

    def __init__(self, seed: int) -> None:
        self._draw = Random(seed)
        texts = [self._text(one) for one in (*self.some("sums", 4000), *self.some("reading", 4000))]
        self.tokenizer = train_tokenizer(texts)

    def _text(self, question: Question) -> str:
        return f"user\n{question.text} assistant\n{question.right}"

    def some(self, kind: str, count: int, *, held_out: bool = False) -> list[Question]:
        """Questions of one kind; of sums only those that are trained on, or only the others."""
        make = sum_question if kind == "sums" else reading_question
        found: list[Question] = []
        while len(found) < count:
            question = make(self._draw)
            numbers = sum(map(ord, question.text))
            if kind == "reading" or (numbers % 5 == 0) == held_out:
                found.append(question)
        return found

    def rows(self, questions: list[Question]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids (B, T), and 1 where the answer stands (B, T)."""
        rows, own = [], []
        for question in questions:
            ids = [TURN_START, *self._ids(f"user\n{question.text}"), TURN_END, *self._ids("\n")]
            ids += [TURN_START, *self._ids("assistant\n")]
            answer = [*self._ids(question.right), TURN_END]
            rows.append([*ids, *answer])
            own.append([0] * len(ids) + [1] * len(answer))
        longest = max(map(len, rows))
        padded = [row + [0] * (longest - len(row)) for row in rows]
        masks = [row + [0] * (longest - len(row)) for row in own]
        return torch.tensor(padded), torch.tensor(masks)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)


def sampled_accuracy(model: Guide, examples: Examples, kind: str, *, held_out: bool) -> float:
    """Part of answers that a draw at temperature 1 would write without a wrong token."""
    ids, own = examples.rows(examples.some(kind, 200, held_out=held_out))
    with torch.no_grad():
        scores = F.log_softmax(model(ids[:, :-1]).float(), -1)
    told = scores.gather(-1, ids[:, 1:, None])[..., 0] * own[:, 1:]
    return float(told.sum(-1).exp().mean())


def train(examples: Examples, kinds: list[str], minutes: float, sampled: float) -> Guide:
    """Train until these kinds are answered well enough, or the time is over."""
    size = examples.tokenizer.get_vocab_size()
    model = Guide(Shape(-(-size // 32) * 32, 128, 2, 2, 1, 64, 256, 512, 10_000.0))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    began_s, step = time.monotonic(), 0
    good: dict[str, float] = dict.fromkeys(kinds, 0.0)
    while time.monotonic() - began_s < minutes * 60 and min(good.values()) < sampled:
        # What is answered well enough is not trained on, so that it stays imperfect.
        for kind in [kind for kind, accuracy in good.items() if accuracy < sampled]:
            for group in optimizer.param_groups:
                group["lr"] = _RATE * min(1.0, (step + 1) / _WARM_STEPS)
            ids, own = examples.rows(examples.some(kind, _BATCH[kind]))
            logits = model(ids[:, :-1])
            losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            loss = (losses * own[:, 1:]).sum() / own[:, 1:].sum()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        step += 1
        if step % _LOOK_EVERY == 0:
            good = {kind: sampled_accuracy(model, examples, kind, held_out=False) for kind in good}
            new = sampled_accuracy(model, examples, "sums", held_out=True)
            minutes_s = time.monotonic() - began_s
            print(f"{step} steps, {minutes_s:.0f} s: {good}, new sums {new:.2f}", flush=True)
    return model


def save(model: Guide, examples: Examples, out: Path) -> None:
    """Write the model as a GGUF."""
    tokenizer = json.loads(examples.tokenizer.to_str())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    for number in range(len(vocabulary), model.shape.vocabulary):
        vocabulary[f"<|unused_{number}|>"] = number
    weights = {
        name: np.asarray(value.detach().float().numpy()) for name, value in model.named_parameters()
    }
    write_gguf(weights, tokenizer, out, "F16", context=512, rope_base=10_000.0)
    print(f"{out}: {out.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--sampled", type=float, default=0.75)
    parser.add_argument("--kinds", nargs="+", choices=sorted(_BATCH), default=["sums"])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    examples = Examples(options.seed)
    save(train(examples, options.kinds, options.minutes, options.sampled), examples, options.out)


if __name__ == "__main__":
    main()
