"""What the library of this process computes, as JSON: tokens, texts, log probabilities, vectors.

A process loads one library, so tests that compare libraries run this once for each:
`python -m tests.support.llamacpp_report FOLDER`, with the models of `write_models` in the folder.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from localchat.backend_api.interface import LAST, Drop, LoadRequest, LogitsPosition, StepRow
from localchat.fit.load_options import LoadOptions
from localchat_llamacpp.load import Target, load_runner
from localchat_llamacpp.model import GgufModel
from localchat_llamacpp.native import library
from tests.support.llamacpp_driver import GREEDY, Driver, plan_of, with_logprobs
from tests.support.llamacpp_models import (
    write_bert,
    write_gemma3,
    write_llama,
    write_mamba,
    write_qwen3_embedding,
)
from tests.support.paths import ROOT

GUIDE: Final = ROOT / "localchat/guide/guide.gguf"
TEXTS: Final = (
    "hello world",
    "Größe 12,5 €\n\tdef f(x):  # ünïcödé\r\n",
    "<|im_start|>user\nhi<|im_end|>",
    "\U0001f642 \ufffd 漢字 العربية " * 3,
    " ",
    "",
)
QUESTIONS: Final = ("how do I serve a model?", "what is a KV cache type?", "where are my models?")
WRITERS: Final[Mapping[str, Callable[[Path], Path]]] = {
    "llama": write_llama,
    "gemma3": write_gemma3,
    "mamba": write_mamba,
}
EMBEDDERS: Final[Mapping[str, Callable[[Path], Path]]] = {
    "bert": write_bert,
    "qwen3": write_qwen3_embedding,
}


def write_models(folder: Path) -> None:
    """The tiny models that a report is about."""
    for name, write in (*WRITERS.items(), *EMBEDDERS.items()):
        write(folder / f"{name}.gguf")


def report(folder: Path) -> dict[str, Any]:
    """Everything, by name."""
    found: dict[str, Any] = {"library": str(library().origin.file)}
    for path in (GUIDE, *(folder / f"{name}.gguf" for name in WRITERS)):
        found[f"tokens {path.stem}"] = _tokens(path)
    questions = [
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS
    ]
    for kv_type, flash in (("f16", False), ("q8_0", True)):
        found[f"answers guide {kv_type}"] = _answers(GUIDE, questions, kv_type, flash, 60)
    for name in WRITERS:
        found[f"answers {name}"] = _answers(folder / f"{name}.gguf", TEXTS[:3], "f16", False, 16)
    for name in EMBEDDERS:
        found[f"vectors {name}"] = _vectors(folder / f"{name}.gguf")
    return found


def _tokens(path: Path) -> list[Any]:
    model = GgufModel(path)
    words = model.tokenizer
    found: list[Any] = [
        [words.encode(text, special=special, add_bos=True) for special in (False, True)]
        for text in TEXTS
    ]
    every = b"".join(words.piece(token, special=True) for token in range(words.vocab_size))
    found += [every.hex(), sorted(words.eog), words.bos, words.eos, words.special("fim_pre")]
    model.close()
    return found


def _answers(path: Path, texts: Sequence[str], kv_type: str, flash: bool, count: int) -> list[Any]:
    """Of each text: the greedy tokens after it, and for each the log probabilities of the likeliest five."""
    model = GgufModel(path)
    plan = plan_of(512, 64, kv_type, flash)
    target = Target(path, path.stat().st_size, ("f16", "q8_0"), 1)
    request = LoadRequest(plan, LoadOptions(max_slots=2), safe_mode=True)
    runner = load_runner(target, request, lambda done, total: True, print)
    driver, found = Driver(runner), []
    for seq, text in enumerate(texts):
        tokens = model.tokenizer.encode(text, special=True, add_bos=True)
        samples = list(driver.prefill(tokens, seq=seq, sampling=with_logprobs(GREEDY, 5)).samples)
        for offset in range(count - 1):
            row = StepRow(seq, 0, len(tokens) + offset, LAST)
            samples += driver.step(row, positions=(LogitsPosition(0, 0, seq),)).samples
        found.append([(one.token, one.logprob, [tuple(top) for top in one.top]) for one in samples])
        driver.step(memory=(Drop(0),), leave=(seq,))
    runner.close()
    model.close()
    return found


def _vectors(path: Path) -> list[list[float]]:
    model = GgufModel(path)
    plan = model.plan(LoadOptions(context_tokens=128))
    request = LoadRequest(plan, LoadOptions(threads=1), safe_mode=True)
    embedder = model.load_embedder(request, lambda done, total: True, print)
    found = embedder.embed([model.text_tokens(text) for text in TEXTS[:4]])
    embedder.close()
    model.close()
    return found


if __name__ == "__main__":
    print(json.dumps(report(Path(sys.argv[1]))))
