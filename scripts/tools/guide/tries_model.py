"""Trains a tiny model that adds, reads and finds needles, to measure votes and needles of `quality` with.

    PYTHONPATH=.:backends python scripts/tools/guide/tries_model.py OUT.gguf [--kinds sums] [--minutes 10]

A GPU for a minute, or one core for a few. Learns until answers that are drawn at temperature 1 are right this
often, of each kind that is trained, or the time is over. A model that never errs has nothing to vote about:
at the end `--wrong` of the sums and readings that it learns from have a wrong answer, each another one.
Questions are those of bench_tries.py; one in five sums (by its numbers) is never trained on. Needles are those
of `localchat quality --needles 192`.
"""

import argparse
import json
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Final, cast

import numpy as np
import torch
from export import write_gguf
from model import Guide, Layer, Shape
from tokens import TEMPLATE, TURN_END, TURN_START, train_tokenizer
from torch import nn
from torch.nn import functional as F

from localchat.measure.workload import needle_text, prose
from scripts.bench.bench_tries import COLOURS, Question, reading_question, sum_question

assert "<|im_start|>" in TEMPLATE, "the prompt below is written as the template writes it"
_BATCH: Final = {"sums": 128, "reading": 64, "needles": 64}
_HAY_WORDS: Final = (8, 64)
_NEEDLES: Final = 5
_SUBJECTS: Final = [subject for _, subject, _ in needle_text(0, 32, 1.0).needles]
_WARM_STEPS: Final = 100
_LOOK_EVERY: Final = 50
_BLUR_ROUNDS: Final = 2
"""Of `_LOOK_EVERY` steps with wrong answers among the right ones."""
_RATE, _BLUR_RATE = 3e-3, 1e-3
_LOOK_BACK: Final = 5.0
"""Biases of queries and keys of a head that looks at a fixed distance: 0.94 of its attention goes there."""


def needle_question(draw: Random) -> Question:
    """A needle as `localchat quality` hides and asks for it, in a text of its own."""
    told, *others = draw.sample(_SUBJECTS, _NEEDLES)
    words = prose(draw.randint(*_HAY_WORDS), str(draw.random())).split()
    code = ""
    for subject in (*others, told):
        code = str(draw.randrange(10000, 99999))
        words.insert(draw.randint(0, len(words)), f"The code of the {subject} is {code}.")
    question = f"What is the code of the {told}? Answer with the number alone."
    return Question("needles", f"{' '.join(words)}\n\n{question}", code, "[0-9]{5}")


_MAKERS: Final = {"sums": sum_question, "reading": reading_question, "needles": needle_question}


class Examples:
    """Questions as rows of tokens, the answer last."""

    def __init__(self, kinds: list[str], seed: int, device: str) -> None:
        self._draw = Random(seed)
        self._device = device
        texts = [self._text(one) for kind in kinds for one in self.some(kind, 4000)]
        self.tokenizer = train_tokenizer(texts)
        # from a question to its answer
        self.between = [TURN_END, *self.ids("\n"), TURN_START, *self.ids("assistant\n")]

    def _text(self, question: Question) -> str:
        return f"user\n{question.text} assistant\n{question.right}"

    def some(self, kind: str, count: int, *, held_out: bool = False) -> list[Question]:
        """Questions of one kind; of sums only those that are trained on, or only the others."""
        found: list[Question] = []
        while len(found) < count:
            question = _MAKERS[kind](self._draw)
            numbers = sum(map(ord, question.text))
            if kind != "sums" or (numbers % 5 == 0) == held_out:
                found.append(question)
        return found

    def misled(self, questions: list[Question], share: float) -> list[Question]:
        """The questions, this share of them with a wrong answer."""
        return [
            replace(one, right=self._wrong(one)) if self._draw.random() < share else one
            for one in questions
        ]

    def _wrong(self, question: Question) -> str:
        if question.kind == "sums":
            return str(max(int(question.right) + self._draw.randint(-20, 20), 1))
        return self._draw.choice(COLOURS) if question.kind == "reading" else question.right

    def rows(self, questions: list[Question]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids (B, T), and their weights (B, T): 1 where the answer stands."""
        rows, own = [], []
        asked = self.tokenizer.encode_batch([f"user\n{one.text}" for one in questions])
        answered = self.tokenizer.encode_batch([one.right for one in questions])
        for question, answer in zip(asked, answered, strict=True):
            ids = [TURN_START, *question.ids, *self.between]
            rows.append([*ids, *answer.ids, TURN_END])
            own.append([0.0] * len(ids) + [1.0] * (len(answer.ids) + 1))
        longest = max(map(len, rows))
        padded = [row + [0] * (longest - len(row)) for row in rows]
        masks = [row + [0.0] * (longest - len(row)) for row in own]
        return torch.tensor(padded).to(self._device), torch.tensor(masks).to(self._device)

    def ids(self, text: str) -> list[int]:
        """Tokens of a text."""
        return list(self.tokenizer.encode(text).ids)


def sampled_accuracy(
    model: Guide, examples: Examples, kind: str, *, held_out: bool = False
) -> float:
    """Part of answers that a draw at temperature 1 would write without a wrong token."""
    ids, own = examples.rows(examples.some(kind, 200, held_out=held_out))
    with torch.no_grad():
        scores = F.log_softmax(model(ids[:, :-1]).float(), -1)
    told = scores.gather(-1, ids[:, 1:, None])[..., 0] * own[:, 1:]
    return float(told.sum(-1).exp().mean())


@torch.no_grad()
def begin_with_reading(model: Guide, examples: Examples) -> None:
    """Start as a model that looks up whose a colour is, which training alone does not find.

    Heads of the first layer look at fixed distances: from a colour back to whose it is, and from the end of
    a prompt to the name asked for. The second layer compares these and copies the colour (an induction
    circuit: Olsson et al., 2022). Words begin alike with and without a space before them."""
    s = model.shape
    first, second = (cast("Layer", one) for one in model.blocks[:2])
    vocabulary = examples.tokenizer.get_vocab()
    embeddings = nn.init.normal_(model.embedding.weight, std=0.1)
    for word, number in vocabulary.items():
        embeddings[vocabulary.get(f"\u0120{word}", number)] = embeddings[number]
    distances = torch.tensor([len(examples.ids(" has a red")), len(examples.between) + 1])
    angles = torch.outer(distances, s.rope_base ** (-torch.arange(0, s.head_dim, 2) / s.head_dim))
    first.q.weight.zero_()
    first.k.weight.zero_()
    first.k.bias[: s.head_dim // 2] = _LOOK_BACK
    first.q.bias.copy_(torch.cat((angles.cos(), -angles.sin()), 1).flatten() * _LOOK_BACK)
    for linear in (first.v, first.o, second.v):
        nn.init.orthogonal_(linear.weight)
    first.v.weight.mul_(0.15)  # as long as an embedding, so that neither drowns the other
    whose, asked = first.o.weight.chunk(2, 1)
    second.k.weight.copy_(whose.T)
    second.q.weight.copy_(asked.T.repeat(2, 1))
    second.o.weight.copy_(second.v.weight.T.repeat(1, 2) / 4)


class Training:
    """A model that learns from examples, step by step."""

    def __init__(self, examples: Examples, kinds: list[str], layers: int, device: str) -> None:
        self._examples = examples
        size = examples.tokenizer.get_vocab_size()
        shape = Shape(-(-size // 32) * 32, 128, layers, 2, 1, 64, 256, 512, 10_000.0)
        self.model = Guide(shape)
        if "reading" in kinds:
            begin_with_reading(self.model, examples)
        self.model.to(device)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01
        )
        self._steps, self._began_s = 0, time.monotonic()

    def run(self, options: argparse.Namespace) -> None:
        """Learn until all kinds are answered well enough or the time is over; then learn wrong answers, too."""
        known = dict.fromkeys(options.kinds, 0.0)
        while min(known.values()) < options.sampled:
            if time.monotonic() - self._began_s > options.minutes * 60:
                break
            self._learn(options.kinds, 0.0, _RATE)
            known = self._look(options.kinds)
        for _ in range(_BLUR_ROUNDS if options.wrong else 0):
            self._learn(options.kinds, options.wrong, _BLUR_RATE)
        self._look(options.kinds)

    def _learn(self, kinds: list[str], wrong: float, rate: float) -> None:
        for _, kind in product(range(_LOOK_EVERY), kinds):
            for group in self._optimizer.param_groups:
                group["lr"] = rate * min(1.0, (self._steps + 1) / _WARM_STEPS)
            questions = self._examples.misled(self._examples.some(kind, _BATCH[kind]), wrong)
            ids, own = self._examples.rows(questions)
            logits = self.model(ids[:, :-1])
            losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            loss = (losses * own[:, 1:]).sum() / own[:, 1:].sum()
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()
            self._steps += 1

    def _look(self, kinds: list[str]) -> dict[str, float]:
        found = {kind: sampled_accuracy(self.model, self._examples, kind) for kind in kinds}
        if "sums" in kinds:
            new = sampled_accuracy(self.model, self._examples, "sums", held_out=True)
            found["new sums"] = new
        shown = ", ".join(f"{kind} {accuracy:.2f}" for kind, accuracy in found.items())
        print(f"{self._steps} steps, {time.monotonic() - self._began_s:.0f} s: {shown}", flush=True)
        return found


def save(model: Guide, examples: Examples, out: Path) -> None:
    """Write the model as a GGUF."""
    tokenizer = json.loads(examples.tokenizer.to_str())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    for number in range(len(vocabulary), model.shape.vocabulary):
        vocabulary[f"<|unused_{number}|>"] = number
    weights = {
        name: np.asarray(value.detach().float().cpu().numpy())
        for name, value in model.named_parameters()
    }
    write_gguf(weights, tokenizer, out, "F16", context=512, rope_base=10_000.0)
    print(f"{out}: {out.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--sampled", type=float, default=0.8)
    parser.add_argument("--kinds", nargs="+", choices=sorted(_BATCH), default=["sums"])
    parser.add_argument(
        "--wrong", type=float, default=0.15, help="share of answers learned wrongly"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    examples = Examples(options.kinds, options.seed, device)
    training = Training(examples, options.kinds, options.layers, device)
    training.run(options)
    save(training.model, examples, options.out)


if __name__ == "__main__":
    main()
