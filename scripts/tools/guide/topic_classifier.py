"""Trains the classifier of topics that checks the guide's answers, on the questions of its training.

    python scripts/tools/guide/topic_classifier.py [--questions 150000] [--epochs 5]

Takes minutes on two cores; writes localchat/guide/topics.npz. See localchat/engine/guide_topics.py.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE)]

from conversations import Writer, read_facts  # noqa: E402 - from here on the checkout counts

from localchat.engine.guide_topics import FEATURES, answer_key, features  # noqa: E402

WIDTH: Final = 64
BATCH: Final = 512
KEPT: Final = 0.75  # of a question's features in a step, so that one strange word does not decide
FOREIGN: Final = 0.1
SUMS: Final = 0.12
REFUSALS: Final = 0.13
LEAST: Final = 3  # questions of a topic


def questions(count: int, seed: int) -> list[tuple[str, str]]:
    """First questions and their answers, in the shares above, the rest about topics."""
    writer, rng = Writer(read_facts(HERE / "facts.json")), Random(seed)
    drawn = []
    for _ in range(count):
        chance = rng.random()
        if chance < FOREIGN:
            drawn.append(writer.foreign.draw(rng))
        elif chance < FOREIGN + SUMS:
            drawn.append(writer.sums.draw(rng)[:2])
        elif chance < FOREIGN + SUMS + REFUSALS:
            drawn.append(writer.refusals.draw(rng))
        else:
            drawn.append(writer.topics.question(writer.topics.draw(rng), rng))
    return drawn


def known_answers() -> tuple[str, ...]:
    """Answers that are equal for every question of their topic; in other languages a line stands before."""
    facts = read_facts(HERE / "facts.json")
    refusals = [each["answer"] for each in facts["refusals"].values() if "answer" in each]
    return (*(each["answer"] for each in facts["topics"]), *refusals, facts["foreign"]["english"])


class Net(torch.nn.Module):
    """The mean of the features' vectors, and a linear layer."""

    def __init__(self, topics: int) -> None:
        super().__init__()
        self.features = torch.nn.EmbeddingBag(FEATURES, WIDTH, mode="mean")
        self.topics = torch.nn.Linear(WIDTH, topics)

    def forward(self, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.topics(self.features(ids, starts))
        return found


def train(asked: list[list[int]], topics: torch.Tensor, count: int, epochs: int) -> Net:
    """Train on lists of features and their topics."""
    torch.manual_seed(1)
    net = Net(count)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    lengths = torch.tensor([len(each) for each in asked])
    flat = torch.tensor([each for one in asked for each in one])
    begins = lengths.cumsum(0) - lengths
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 - epoch / epochs)
        total = 0.0
        order = torch.randperm(len(asked))
        for at in range(0, len(order), BATCH):
            batch = order[at : at + BATCH]
            rows = torch.repeat_interleave(torch.arange(len(batch)), lengths[batch])
            within = torch.cat([torch.arange(int(each)) for each in lengths[batch]])
            kept = (torch.rand(len(rows)) < KEPT) | (within == 0)
            ids = flat[begins[batch][rows] + within][kept]
            held = torch.bincount(rows[kept], minlength=len(batch))
            loss = functional.cross_entropy(net(ids, held.cumsum(0) - held), topics[batch])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total * BATCH / len(order):.4f}", flush=True)
    return net


def write(path: Path, net: Net, keys: list[str], answers: list[str]) -> None:
    """Write the tables in eight bits."""
    tables: dict[str, Any] = {}
    scale = 1.0
    for name, weights in (("features", net.features.weight), ("topics", net.topics.weight)):
        step = float(weights.detach().abs().max()) / 127
        tables[name] = (weights.detach() / step).round().numpy().astype(np.int8)
        scale *= step
    foreign = read_facts(HERE / "facts.json")["foreign"]
    english = foreign["english"]
    languages = [each["answer"] for each in foreign.values() if isinstance(each, dict)]
    np.savez_compressed(
        path,
        english=np.frombuffer(english.encode(), np.uint8),
        languages=np.frombuffer("\0".join(languages).encode(), np.uint8),
        scale=np.float32(scale),
        bias=net.topics.bias.detach().numpy(),
        keys=np.frombuffer("\0".join(keys).encode(), np.uint8),
        answers=np.frombuffer("\0".join(answers).encode(), np.uint8),
        **tables,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=150_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "localchat" / "guide" / "topics.npz")
    told = parser.parse_args()
    drawn = questions(told.questions, told.seed)
    answers: dict[str, list[str]] = defaultdict(list)
    for _, answer in drawn:
        answers[answer_key(answer)].append(answer)
    keys = sorted(key for key, given in answers.items() if len(given) >= LEAST)
    number = {key: at for at, key in enumerate(keys)}
    usable = [pair for pair in drawn if answer_key(pair[1]) in number]
    asked = [features(question) for question, _ in usable]
    topics = torch.tensor([number[answer_key(answer)] for _, answer in usable])
    print(f"{len(usable):,} questions, {len(keys):,} topics", flush=True)
    net = train(asked, topics, len(keys), told.epochs)
    given = [answers[key][0] if len(set(answers[key])) == 1 else "" for key in keys]
    known = known_answers()
    write(told.out, net, keys, [text if text.endswith(known) else "" for text in given])
    print(f"{told.out}: {told.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
