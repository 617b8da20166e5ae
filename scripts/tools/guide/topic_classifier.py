"""Trains the classifier of topics that checks the guide's answers, on the questions of its training.

    python scripts/tools/guide/topic_classifier.py [--questions 300000] [--epochs 16]

Takes a quarter of an hour on two cores; writes localchat/guide/topics.npz. See localchat/engine/guide/topics.py. The guide
itself is asked which questions may be offered: those that it answers, and whose topic the classifier finds.
"""

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.nn import functional

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends"), str(HERE)]

from asking import ALONE  # noqa: E402 - from here on the checkout counts
from conversations import Writer, read_facts  # noqa: E402
from grammar import Choice, Reference, parse, phrase  # noqa: E402

from localchat.engine.events import Text  # noqa: E402
from localchat.engine.guide.rules import GuideQuestion  # noqa: E402
from localchat.engine.guide.topics import FEATURES, Topics, answer_key, features  # noqa: E402
from localchat.engine.local.engine import LocalEngine  # noqa: E402
from localchat.engine.options import EngineOptions  # noqa: E402
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling  # noqa: E402

WIDTH: Final = 64
BATCH: Final = 512
KEPT: Final = 0.75  # of a question's features in a step, so that one strange word does not decide
FOREIGN: Final = 0.1
SUMS: Final = 0.12
REFUSALS: Final = 0.13
TASKS: Final = 0.05  # on a text in one line, which may itself be about localchat
ON_QUESTIONS: Final = 0.3  # of these tasks
FOLLOWING: Final = 0.26  # of all: questions that follow another one
LEAST: Final = 3  # questions of a topic
SMOOTHING: Final = 0.1  # of the labels: a sure and wrong topic costs more than an unsure one
ANSWER_TOKENS: Final = 48  # tell its topic
OFFERED: Final = 0.5  # of a topic's question, so that it may be offered if the guide answers it
CERTAIN: Final = 0.75  # of one that is answered from the table
PHRASINGS: Final = 4  # of each kind that are tried
_CAPITALS: Final = (
    "I GPU GPUs CPU CPUs RAM VRAM KV API APIs JSON GGUF PDF AMD NVIDIA CUDA TTFT TPOT MHA GQA MQA MLA RoPE AWQ GPTQ "
    "MoE IQ FP8 CORS HTTPS IDE VS Ollama Linux Windows Mac Docker Podman Python Emacs OpenAI Zed Aider Cline Codex "
    "Claude ChatGPT LM Studio WebUI Hugging Face RAG LoRA MCP NPU AVX2 Prometheus Markdown LLM JetBrains RTX German "
    "Q4_K_M Q5_K_M"
)
WRITTEN: Final = {word.lower(): word for word in _CAPITALS.split()}
"""Words of offered questions that keep their capitals."""


class Drawn(NamedTuple):
    """A question of the training, its answer, and the question before it, or empty."""

    question: str
    answer: str
    before: str = ""


def questions(count: int, seed: int) -> list[Drawn]:
    """Questions and their answers, in the shares above, the rest about topics."""
    writer, rng = Writer(read_facts(HERE / "facts.json")), Random(seed)
    drawn = []
    for _ in range(count):
        chance = rng.random()
        if chance < FOREIGN:
            drawn.append(Drawn(*writer.foreign.draw(rng)))
        elif chance < FOREIGN + SUMS:
            drawn.append(Drawn(*writer.sums.draw(rng)[:2]))
        elif chance < FOREIGN + SUMS + REFUSALS:
            drawn.append(Drawn(*writer.refusals.draw(rng)))
        elif chance < FOREIGN + SUMS + REFUSALS + TASKS:
            drawn.append(task(writer, rng))
        elif chance < FOREIGN + SUMS + REFUSALS + TASKS + FOLLOWING:
            drawn.append(following(writer, rng))
        else:
            drawn.append(Drawn(*writer.topics.question(writer.topics.draw(rng), rng)))
    return drawn


def task(writer: Writer, rng: Random) -> Drawn:
    """A task on a text that the classifier is asked about: a short one in one line, often a question itself."""
    tasks = [each for each in writer.pasting.words["tasks"] if not each.startswith("{t}")]
    while True:
        text, answer = writer.pasting.draw(rng)
        if rng.random() < ON_QUESTIONS:
            asked, _ = writer.topics.question(writer.topics.draw(rng), rng)
            text = phrase(rng.choice(tasks), writer.refusals.lexicon, rng).replace("{t}", asked)
        if not GuideQuestion(text).is_text:
            return Drawn(text, answer)


def following(writer: Writer, rng: Random) -> Drawn:
    """A question that follows another one in a conversation about topics or sums."""
    while True:
        kind, talk = writer.draw(rng)
        texts = [text for role, text in talk if role != "system"]
        if kind in ("topic", "sum", "chain") and len(texts) > 3:
            at = rng.randrange(2, len(texts), 2)
            return Drawn(texts[at], texts[at + 1], texts[at - 2])


def plain_questions(topic: dict[str, Any], lexicon: dict[str, list[str]]) -> list[str]:
    """The first phrasings of a topic, as one would print them; none that needs a value."""
    kinds = (("plain", ""), ("do", "how do i "), ("ask", ""))
    said = [
        before + _first(parse(pattern), lexicon)
        for kind, before in kinds
        for pattern in topic.get(kind, ())[:PHRASINGS]
    ]
    texts = [" ".join(WRITTEN.get(word, word) for word in text.split()) for text in said]
    texts = [
        re.sub(r"\ba (?=[aeioAEIO]|RTX)", "an ", text)
        for text in texts
        if not set("{<") & set(text)
    ]
    texts = [re.sub(r"\bVS (?!code)", "vs ", text) for text in texts]
    return [f"{text[:1].upper()}{text[1:]}?" for text in texts]


def _first(choice: Choice, lexicon: dict[str, list[str]]) -> str:
    parts = choice.options[0]
    return "".join(
        part
        if isinstance(part, str)
        else _first(parse(lexicon[part.name][0]), lexicon)
        if isinstance(part, Reference)
        else _first(part, lexicon)
        for part in parts
    )


def offered(topics: Topics, guide: Path) -> list[str]:
    """For each topic a question that the product answers: where the classifier is sure of a topic whose answer
    is always the same, or finds the topic and the guide agrees; or empty.
    """
    asking = Writer(read_facts(HERE / "facts.json")).topics
    found, number = dict.fromkeys(topics.keys, ""), {key: at for at, key in enumerate(topics.keys)}
    engine = LocalEngine(EngineOptions(guide, name="guide"), notify=print)
    try:
        for topic in asking.all:
            key = answer_key(topic["answer"])
            if topic["group"] in ALONE or found.get(key, "?"):
                continue
            asked = plain_questions(topic, asking.lexicon)
            ranked = [(topics.probabilities(text)[number[key]], text) for text in asked]
            sure = [text for likely, text in ranked if likely >= CERTAIN and topics.answer(key)]
            near = [text for likely, text in ranked if likely >= OFFERED][:1]
            known = sure or [text for text in near if answer_key(answer_of(engine, text)) == key]
            found[key] = known[0] if known else ""
    finally:
        engine.close()
    return list(found.values())


def answer_of(engine: LocalEngine, question: str) -> str:
    """The beginning of the guide's answer, unchecked."""
    prompt = Messages((Message("user", question),))
    request = GenerateRequest(prompt, Sampling(temperature=0), max_tokens=ANSWER_TOKENS)
    return "".join(event.text for event in engine.generate(request) if isinstance(event, Text))


def the_same(answers: list[str]) -> str:
    """The answer of a topic, which is all of each of these or its first half (of a double question); or empty."""
    shortest = min(answers, key=len)
    return shortest if all(each.startswith(shortest) for each in answers) else ""


def known_answers() -> tuple[str, ...]:
    """Answers that are equal for every question of their topic; in other languages a line stands before."""
    facts = read_facts(HERE / "facts.json")
    refusals = [each["answer"] for each in facts["refusals"].values() if "answer" in each]
    others = (facts["pastes"]["answer"], facts["foreign"]["english"])
    return (*(each["answer"] for each in facts["topics"]), *refusals, *others)


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
            loss = functional.cross_entropy(
                net(ids, held.cumsum(0) - held), topics[batch], label_smoothing=SMOOTHING
            )
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


def add_questions(path: Path, guide: Path) -> None:
    """Add to the file the questions that may be offered."""
    questions = offered(Topics(path), guide)
    print(f"{sum(map(bool, questions))} questions to offer", flush=True)
    with np.load(path) as file:
        tables = dict(file)
    tables["questions"] = np.frombuffer("\0".join(questions).encode(), np.uint8)
    np.savez_compressed(path, **tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=300_000)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=9)
    guide = ROOT / "localchat" / "guide"
    parser.add_argument("--guide", type=Path, default=guide / "guide.gguf", help="the guide's file")
    parser.add_argument("--out", type=Path, default=guide / "topics.npz")
    told = parser.parse_args()
    drawn = questions(told.questions, told.seed)
    answers: dict[str, list[str]] = defaultdict(list)
    for each in drawn:
        answers[answer_key(each.answer)].append(each.answer)
    keys = sorted(key for key, given in answers.items() if len(given) >= LEAST)
    number = {key: at for at, key in enumerate(keys)}
    usable = [each for each in drawn if answer_key(each.answer) in number]
    asked = [features(each.question, each.before) for each in usable]
    topics = torch.tensor([number[answer_key(each.answer)] for each in usable])
    print(f"{len(usable):,} questions, {len(keys):,} topics", flush=True)
    net = train(asked, topics, len(keys), told.epochs)
    given = [the_same(answers[key]) for key in keys]
    known = known_answers()
    fixed = [text if text.endswith(known) else "" for text in given]
    write(told.out, net, keys, fixed)
    add_questions(told.out, told.guide)
    print(f"{told.out}: {told.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
