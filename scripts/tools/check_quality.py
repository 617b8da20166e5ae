"""Compares `localchat quality` with llama-perplexity's procedure, and shows it models damaged on purpose.

    python -m scripts.tools.check_quality text [--model localchat/guide/guide.gguf] [--text FILE]
    python -m scripts.tools.check_quality needles MODEL [--lengths 192,256]

`text`: forms of the model are made by llama.cpp's own quantizer (Q4_0, Q2_K), and one has the rows of one
layer's way down in a wrong order. The procedure is that of llama-perplexity, over llama.cpp's C API: chunks of
512 tokens, of which the second half counts, and KL divergence from a base whose log probabilities are stored in
16 bits, as in the file of `--kl-divergence-base`. Perplexity, KL and the share of equal likeliest tokens must
agree to 1 %. Without FILE the text consists of answers that the guide knows.

`needles`: a model that finds needles gets keys
with an outlier that no query looks at: it changes nothing in an f16 cache and spoils the scale of a 4-bit one,
so `quality` must find the needles with f16 and miss some with q4_0.

Prints a table; the last line is JSON. Ends with 1 if something is not as it must be.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from gguf import GGUFReader, GGUFWriter
from numpy.typing import NDArray

from localchat_llamacpp.library_source import find_library
from localchat_llamacpp.native import library

ROOT: Final = Path(__file__).resolve().parents[2]
GUIDE: Final = ROOT / "localchat" / "guide" / "guide.gguf"
FACTS: Final = ROOT / "scripts" / "tools" / "guide" / "facts.json"
_CHARACTERS: Final = 20_000
_CHUNK: Final = 512
_FIRST: Final = _CHUNK // 2
_FILE_TYPES: Final = {"Q4_0": 2, "Q2_K": 10}
"""llama_ftype of llama.h."""
_DEEPEST: Final = 16.0
"""Log probabilities this far below the best are stored as one, and left out of the sum."""
_LEVELS: Final = 65_535
_OUTLIER: Final = 500.0
_WANTED: Final = 0.01


class _QuantizeParams(ctypes.Structure):
    """llama_model_quantize_params, as far as it is set here; the rest keeps its defaults."""

    _fields_ = (
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int),
        ("output_tensor_type", ctypes.c_int),
        ("token_embedding_type", ctypes.c_int),
        ("allow_requantize", ctypes.c_bool),
        ("spare", ctypes.c_uint8 * 127),
    )


class Reference(NamedTuple):
    """The figures of one model by llama-perplexity's procedure."""

    perplexity: float
    kl: float
    same_top: float


class Rows(NamedTuple):
    """Logits of the counted positions (N, V), and the tokens that follow them (N)."""

    logits: NDArray[np.float32]
    tokens: NDArray[np.int64]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    text = parts.add_parser("text")
    text.add_argument("--model", type=Path, default=GUIDE)
    text.add_argument("--text", type=Path)
    text.add_argument("--layer", type=int, default=3, help="the layer to damage")
    needles = parts.add_parser("needles")
    needles.add_argument("model", type=Path)
    needles.add_argument("--lengths", default="192,256")
    for part in (text, needles):
        part.add_argument("--folder", type=Path, help="keep the forms of the model there")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = asked.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        return _needles(asked, folder) if asked.part == "needles" else _text(asked, folder)


def _text(asked: argparse.Namespace, folder: Path) -> int:
    text = asked.text or folder / "text.txt"
    if asked.text is None:
        text.write_text(_answers()[:_CHARACTERS], "utf-8")
    models = {asked.model.stem: asked.model}
    for name, number in _FILE_TYPES.items():
        models[name] = quantized(asked.model, folder / f"{name}.gguf", number)
    models["damaged"] = damaged(asked.model, folder / "damaged.gguf", asked.layer)
    words = ["--text", str(text), "--only", "text", "--windows", "0"]
    ours = _quality([*map(str, models.values()), *words])
    theirs = references(list(models.values()), text.read_text("utf-8"))
    return _report(list(models), ours, theirs)


def _needles(asked: argparse.Namespace, folder: Path) -> int:
    model = with_outliers(asked.model, folder / "outliers.gguf")
    words = ["--only", "needles", "--needles", asked.lengths]
    found = _quality([str(model), "--vary", "kv-type=f16,q8_0,q4_0", *words])
    counts = {
        one["kv_type"]: sum(task["passed"] for task in one["needles"]) for one in found["measured"]
    }
    print("\n".join(found["verdicts"]))
    lost = counts["f16"] - counts["q4_0"]
    print(json.dumps({"needles_found": counts, "ok": lost > 0}))
    return 0 if lost > 0 else 1


def _answers() -> str:
    """Answers that the guide was trained on, so that it has something to lose."""
    facts = json.loads(FACTS.read_text("utf-8"))
    return "\n\n".join(topic["answer"] for topic in facts["topics"] if "answer" in topic)


# ---------------------------------------------------------------------------- forms of the model


def quantized(source: Path, target: Path, file_type: int) -> Path:
    """Write the model in another type by llama_model_quantize."""
    library()  # loads what it depends on
    found = find_library().library
    assert found is not None
    native = ctypes.CDLL(str(found.file))
    native.llama_model_quantize_default_params.restype = _QuantizeParams
    params = native.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = file_type, True
    native.llama_model_quantize.argtypes = (
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.POINTER(_QuantizeParams),
    )
    native.llama_model_quantize.restype = ctypes.c_uint32
    if native.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(params)
    ):
        raise SystemExit(f"llama.cpp cannot quantize {source}")
    return target


def damaged(source: Path, target: Path, layer: int) -> Path:
    """Write the model with the way down of one layer's feed-forward network in a wrong order of rows."""

    def change(name: str, rows: NDArray[Any]) -> NDArray[Any]:
        return np.roll(rows, 1, axis=0) if name == f"blk.{layer}.ffn_down.weight" else rows

    return _rewritten(source, target, change)


def with_outliers(source: Path, target: Path) -> Path:
    """Write a model in F16 with a huge value in the slowest pair of each key, which no query looks at."""
    fields = GGUFReader(source).fields
    name = str(fields["general.architecture"].contents())
    heads, embedding = (
        int(fields[f"{name}.{what}"].contents())
        for what in ("attention.head_count", "embedding_length")
    )
    known = fields.get(f"{name}.attention.key_length")
    size = int(known.contents()) if known is not None else embedding // heads

    def change(tensor: str, rows: NDArray[Any]) -> NDArray[Any]:
        part = tensor.split(".")[-2:]
        if part[0] not in ("attn_q", "attn_k"):
            return rows
        changed = rows.reshape(-1, size, *rows.shape[1:]).copy()  # (heads, head dimension, ...)
        for at in (size // 2 - 1, size - 1):
            changed[:, at] = _OUTLIER if part == ["attn_k", "bias"] else 0
        return changed.reshape(rows.shape)

    return _rewritten(source, target, change)


def _rewritten(
    source: Path, target: Path, change: Callable[[str, NDArray[Any]], NDArray[Any]]
) -> Path:
    """Write the file with changed tensors."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value: Any = entry.contents()
        if len(entry.types) > 1:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, entry.types[0])
    for tensor in reader.tensors:
        rows = np.ascontiguousarray(change(tensor.name, tensor.data))
        writer.add_tensor(tensor.name, rows, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


# ---------------------------------------------------------------------------- llama-perplexity's procedure


def references(models: list[Path], text: str) -> list[Reference]:
    """Figures of each model; KL from the first."""
    found: list[Reference] = []
    base: list[_StoredRow] = []
    for path in models:
        rows = counted_rows(path, text)
        logs = _log_softmax(rows.logits)
        loss = -logs[np.arange(len(rows.tokens)), rows.tokens]
        base = base or [_StoredRow.of(row) for row in rows.logits]
        kl, same = 0.0, 0
        for stored, row, log in zip(base, rows.logits, logs, strict=True):
            known = stored.log_probabilities()
            counted = known > -_DEEPEST
            kl += float(np.sum(np.exp(known[counted]) * (known[counted] - log[counted])))
            same += int(known.argmax() == row.argmax())
        found.append(Reference(float(np.exp(loss.mean())), kl / len(logs), same / len(logs)))
    return found


def counted_rows(path: Path, text: str) -> Rows:
    """Logits of the second halves of all chunks, each computed alone, with BOS where the model has one."""
    api = library().api
    model_params = api.llama_model_default_params()
    model_params.use_extra_bufts = False  # as our engine loads
    model = api.llama_model_load_from_file(str(path).encode(), model_params)
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = _CHUNK
    context = api.llama_init_from_model(model, params)
    if not model or not context:
        raise SystemExit(f"llama.cpp cannot load {path}")
    vocabulary = api.llama_model_get_vocab(model)
    size = api.llama_vocab_n_tokens(vocabulary)
    raw = text.encode()
    room = (ctypes.c_int32 * (len(raw) + 8))()
    count = api.llama_tokenize(vocabulary, raw, len(raw), room, len(room), True, True)
    logits, following = [], []
    for start in range(0, count - _CHUNK + 1, _CHUNK):
        chunk = list(room[start : start + _CHUNK])
        following += chunk[_FIRST + 1 :]
        if api.llama_vocab_get_add_bos(vocabulary):
            chunk[0] = api.llama_vocab_bos(vocabulary)
        logits.append(_decoded(api, context, chunk, size))
    api.llama_free(context)
    api.llama_model_free(model)
    return Rows(np.concatenate(logits), np.array(following))


def _decoded(api: Any, context: int, chunk: list[int], size: int) -> NDArray[np.float32]:  # noqa: ANN401
    """Logits of the counted positions of a chunk."""
    api.llama_memory_clear(api.llama_get_memory(context), True)
    batch = api.llama_batch_init(len(chunk), 0, 1)
    batch.n_tokens = len(chunk)
    for at, token in enumerate(chunk):
        batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, at, 1
        batch.seq_id[at][0], batch.logits[at] = 0, at >= _FIRST
    if api.llama_decode(context, batch):
        raise SystemExit("llama_decode failed")
    rows = [
        np.ctypeslib.as_array(api.llama_get_logits_ith(context, at), (size,)).copy()
        for at in range(_FIRST, _CHUNK - 1)
    ]
    api.llama_batch_free(batch)
    return np.stack(rows)


class _StoredRow(NamedTuple):
    """Log probabilities of a position in 16 bits."""

    scale: float
    least: float
    levels: NDArray[np.uint16]

    @classmethod
    def of(cls, logits: NDArray[np.float32]) -> "_StoredRow":
        """Store a row: what is more than 16 below the best becomes the lowest level."""
        best = float(logits.max())
        low = max(float(logits.min()), best - _DEEPEST)
        total = float(np.log(np.exp(logits.astype(np.float64) - best).sum()))
        scale = (best - low) / _LEVELS
        levels = np.rint(np.clip(logits - low, 0, None) / scale) if scale else np.zeros(len(logits))
        return cls(scale, low - best - total, levels.astype(np.uint16))

    def log_probabilities(self) -> NDArray[np.float64]:
        """The stored values."""
        return self.scale * self.levels.astype(np.float64) + self.least


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    best = wide.max(1, keepdims=True)
    found: NDArray[np.float64] = wide - best - np.log(np.exp(wide - best).sum(1, keepdims=True))
    return found


# ---------------------------------------------------------------------------- comparison


def _quality(words: list[str]) -> dict[str, Any]:
    """What `localchat quality` measures."""
    command = [
        sys.executable,
        "-m",
        "localchat",
        "quality",
        *words,
        "--json",
        "--quiet",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _report(names: list[str], ours: dict[str, Any], theirs: list[Reference]) -> int:
    rows, worst = [], 0.0
    print(f"{'':10} {'perplexity':>26} {'KL':>22} {'same top':>16} {'worst':>7}")
    for name, one, other in zip(names, ours["measured"], theirs, strict=True):
        divergence = one.get("divergence") or {"kl_mean": 0.0, "same_top_share": 1.0}
        pairs = [(one["perplexity"]["perplexity"], other.perplexity)]
        if one.get("divergence"):
            pairs += [
                (divergence["kl_mean"], other.kl),
                (divergence["same_top_share"], other.same_top),
            ]
        apart = max(abs(a / b - 1) for a, b in pairs)
        worst = max(worst, apart)
        rows.append({"model": name, "pairs": pairs, "apart": apart})
        shown = [f"{a:.6g} / {b:.6g}" for a, b in pairs] + ["-"] * (3 - len(pairs))
        print(f"{name:10} {shown[0]:>26} {shown[1]:>22} {shown[2]:>16} {apart:7.2%}")
    print("\n".join(ours["verdicts"]))
    print(json.dumps({"rows": rows, "worst": worst, "ok": worst <= _WANTED}))
    return 0 if worst <= _WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
