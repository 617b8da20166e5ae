"""Measures retrieval from learned documents: planted facts found and cited right, and the times.

    PYTHONPATH=.:backends python scripts/bench/bench_learn.py [--tokens 3000000] [--facts 100] [--seed 1]

Files of generated text, half Markdown and half DOCX, hold facts that questions in other words ask for, in
English and German; each fact stands among five of the same wording. Found: among the passages that a question
would get (8). Cited right: with its file, and its page or a passage that covers its line. By BM25 alone.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from localchat.documents.library import DocumentLibrary
from localchat.documents.passages import Passage
from tests.support.planted_facts import PlantedFact, write_documents

PASSAGES = 8


def is_cited(fact: PlantedFact, passage: Passage) -> bool:
    """Whether a passage that holds a fact is cited with its place."""
    if passage.file != fact.file:
        return False
    line = passage.number + passage.text[: passage.text.index(fact.sentence)].count("\n")
    return (line if fact.file.endswith(".md") else passage.number) == fact.number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=3_000_000)
    parser.add_argument("--facts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        source.mkdir()
        facts = write_documents(source, options.tokens, options.facts, options.seed)
        with DocumentLibrary(Path(folder, "data")).open("bench", create=True) as collection:
            began_s = time.perf_counter()
            collection.learn([str(source)])
            read_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            collection.learn()
            again_s = time.perf_counter() - began_s
            characters = collection.summary().length
            took_s, found, cited, missed = [], 0, 0, []
            for fact in facts:
                began_s = time.perf_counter()
                passages = collection.find(fact.question, PASSAGES)
                took_s.append(time.perf_counter() - began_s)
                holding = [one for one in passages if fact.sentence in one.text]
                found += bool(holding)
                cited += any(is_cited(fact, one) for one in holding)
                if not holding:
                    missed.append(fact.question)
        stored = sum(path.stat().st_size for path in Path(folder, "data").iterdir())
    for question in missed:
        print("missed:", question)
    result = {
        "tokens": characters // 4,
        "facts": len(facts),
        "found": found,
        "cited_right": cited,
        "read_s": round(read_s, 1),
        "unchanged_s": round(again_s, 3),
        "question_ms": round(1e3 * statistics.median(took_s), 1),
        "question_ms_most": round(1e3 * max(took_s), 1),
        "stored_mb": round(stored / 1e6, 1),
    }
    for key, value in result.items():
        print(f"{key:<18}{value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
