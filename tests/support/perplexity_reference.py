"""Perplexity and KL divergence straight from llama.cpp's logits, as a program; and its quantizer.

`reference MODEL OTHER TEXT WINDOW COUNT` prints JSON; `quantize FROM TO TYPE` writes a model. Its own process,
because two libraries of llama.cpp in one disturb each other.
"""

import ctypes
import json
import sys
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray


def quantize(source: str, target: str, kind: str) -> None:
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = {"q8_0": 7, "q2_k": 10}[kind]
    parameters.allow_requantize = True
    parameters.nthread = 1
    status = llama_cpp.llama_model_quantize(
        source.encode(), target.encode(), ctypes.byref(parameters)
    )
    if status:
        raise SystemExit(f"llama_model_quantize: {status}")


def logits_of(path: str, text: str, window: int, count: int) -> tuple[NDArray[Any], list[int]]:
    """Log probabilities (count, window / 2 - 1, V) of the second halves, and the tokens they predict."""
    weights = llama_cpp.llama_model_default_params()
    weights.use_extra_bufts = False  # with AMX a stock build crashes on repacked weights
    model = llama_cpp.llama_model_load_from_file(path.encode(), weights)
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    size = llama_cpp.llama_vocab_n_tokens(vocabulary)
    with_bos = llama_cpp.llama_vocab_get_add_bos(vocabulary)
    room = (llama_cpp.llama_token * (len(text) + 8))()
    data = text.encode()
    found = llama_cpp.llama_tokenize(vocabulary, data, len(data), room, len(room), with_bos, False)
    tokens = list(room[:found])
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = window
    parameters.n_threads = parameters.n_threads_batch = 1
    rows, known = [], []
    first = window // 2
    for number in range(count):
        part = tokens[number * window : (number + 1) * window]
        if with_bos:
            part[0] = llama_cpp.llama_vocab_bos(vocabulary)
        context = llama_cpp.llama_init_from_model(model, parameters)
        batch = llama_cpp.llama_batch_init(window, 0, 1)
        batch.n_tokens = window
        for at, token in enumerate(part):
            batch.token[at], batch.pos[at], batch.logits[at] = token, at, 1
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (window, size))
        counted = logits[first : window - 1].astype(np.float64)
        best = counted.max(1, keepdims=True)
        rows.append(counted - best - np.log(np.exp(counted - best).sum(1, keepdims=True)))
        known += part[first + 1 :]
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return np.concatenate(rows), known


def main() -> None:
    match sys.argv[1:]:
        case ["quantize", source, target, kind]:
            quantize(source, target, kind)
        case ["reference", one, other, path, window, count]:
            with open(path, encoding="utf-8") as file:  # noqa: PTH123
                text = file.read()
            p, known = logits_of(one, text, int(window), int(count))
            q, _ = logits_of(other, text, int(window), int(count))
            places = np.arange(len(known)), known
            found = {
                "perplexity": float(np.exp(-p[places].mean())),
                "other": float(np.exp(-q[places].mean())),
                "kl": float((np.exp(p) * (p - q)).sum(1).mean()),
                "same_top": float((p.argmax(1) == q.argmax(1)).mean()),
                "tokens": len(known),
            }
            print(json.dumps(found))


if __name__ == "__main__":
    main()
