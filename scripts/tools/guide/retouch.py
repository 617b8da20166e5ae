"""Trains some topics further into a trained guide, among its usual text: half an hour on two cores.

    python scripts/tools/guide/retouch.py FOLDER --out FOLDER2 --topics pull.family,pull.other_name [--seconds 1500]

FOLDER holds the output of train.py; FOLDER2 gets the same form, from which export.py makes a GGUF. The
tokenizer stays, so words that are new to it cost more tokens than after a full training. `--share` of
the conversations are questions on the topics; the others are drawn as usual, so that nothing is
forgotten. Besides topics, names can be `refusal` for all refusals, `refusal.WORD` for those with a word
in their pattern, and `sum.named`, `sum.card` …, kinds of sums (sums.py).
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

import torch
from conversations import Conversation, Writer, conversations, read_facts
from held_out import forbidden, runs
from model import Guide, Shape
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokens import PAD, encode
from torch import Tensor
from train import loss_of, save

HERE: Final = Path(__file__).resolve().parent
WARMING: Final = 20


def talks(topics: list[str], share: float, seed: int) -> Iterator[Conversation]:
    """Endless conversations, a share of them about these topics only. Leaves out whatever shares eight
    words in a row with an evaluation question.
    """
    facts, rng = read_facts(HERE / "facts.json"), Random(seed)
    usual, own, barred = conversations(facts, seed), Writer(facts), forbidden()
    for name in topics:
        _drawn(own, name, Random(seed))  # an unknown name fails before the first step
    while True:
        if rng.random() >= share:
            yield next(usual)[1]
            continue
        question, answer = _drawn(own, rng.choice(topics), rng)
        if barred.isdisjoint(runs(question) | runs(answer)):
            yield [("user", question), ("assistant", answer)]


def _drawn(own: Writer, name: str, rng: Random) -> tuple[str, str]:
    """A question on a topic or of a kind, and its answer."""
    if name.startswith("refusal"):
        return own.refusals.draw(rng, name.removeprefix("refusal").removeprefix("."))
    if name.startswith("sum."):
        return own.sums.draw(rng, name.removeprefix("sum."))[:2]
    return own.topics.question(own.topics.by_id[name], rng)


def batches(
    coder: Tokenizer, stream: Iterator[Conversation], rows: int, length: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids [rows, length], mask of the guide's own tokens), with conversations one after the other."""
    ids, own = torch.full((rows, length), PAD), torch.zeros(rows, length)
    row = at = 0
    while True:
        for tokens, mine in encode(coder, [next(stream) for _ in range(64)]):
            n = min(len(tokens), length - at)
            ids[row, at : at + n] = torch.tensor(tokens[:n])
            own[row, at : at + n] = torch.tensor(mine[:n], dtype=torch.float32)
            at += n
            if at == length:
                row, at = row + 1, 0
            if row == rows:
                yield ids, own
                ids, own = torch.full((rows, length), PAD), torch.zeros(rows, length)
                row = 0


def opened(folder: Path) -> Guide:
    """Load the guide that train.py wrote."""
    state = {
        k: v.float()
        for n in (1, 2)
        for k, v in load_file(folder / f"weights-{n}.safetensors").items()
    }
    model = Guide(Shape())
    missing, unknown = model.load_state_dict(state, strict=False)
    assert not unknown, unknown
    assert not {name for name, _ in model.named_parameters()} & set(missing), missing
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="teach a trained guide some topics more")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--topics", required=True)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--rate", type=float, default=1.5e-4)
    parser.add_argument("--seed", type=int, default=515, help="of the text: another for each pass")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.copy(args.folder / "tokenizer.json", args.out)
    coder = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    model = opened(args.folder)
    adam = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0)
    stream = talks(args.topics.split(","), args.share, args.seed)
    begun = time.monotonic()
    for step, (ids, own) in enumerate(batches(coder, stream, args.rows, args.length)):
        progress = (time.monotonic() - begun) / args.seconds
        if progress >= 1:
            break
        for group in adam.param_groups:
            group["lr"] = args.rate * min(1.0, (step + 1) / WARMING, 1.0 - progress)
        with torch.autocast("cpu", torch.bfloat16):
            loss, mine = loss_of(model, ids, own)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        if step % 10 == 0:
            line = {"step": step, "loss": round(loss.item(), 4), "own": round(mine.item(), 4),
                    "seconds": round(time.monotonic() - begun, 1)}  # fmt: skip
            print(json.dumps(line), flush=True)
    save(model, args.out)


if __name__ == "__main__":
    main()
