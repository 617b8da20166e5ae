"""Compares `localchat quantize` with llama.cpp's own quantizer: blocks, peak memory, and loss.

    PYTHONPATH=.:backends python -m scripts.tools.check_quantize MODEL [--types Q8_0,Q4_K_M] [--windows 4]

Both write every type from MODEL, each in a process of its own. All blocks must be equal, and the new files must
have the same formats. `--windows N` then measures what each type lost, over N windows of the sample text. Files
with equal blocks have equal figures, so those of llama.cpp are not measured again. The default is all types.

Prints a table; the last line is JSON. Ends with 1 if a block differs.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import gguf

from localchat.model_files.ggml_types import FILE_TYPES
from localchat_llamacpp.quantize import GgufQuantizer

_QUIET: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
_FILE_CODES = {name: code for code, name in FILE_TYPES.items()}


class Comparison(NamedTuple):
    """Blocks of two files with the same tensors."""

    blocks: int
    different_blocks: int
    different_formats: tuple[str, ...]
    """Tensors whose formats differ. Their blocks are not counted."""

    @property
    def is_equal(self) -> bool:
        """Whether both files have the same weights."""
        return not self.different_blocks and not self.different_formats


def compare(path: Path, other: Path) -> Comparison:
    """Compare the tensors of two files block by block. Raises KeyError if one lacks a tensor."""
    others = {tensor.name: tensor for tensor in gguf.GGUFReader(other).tensors}
    blocks = 0
    different_blocks = 0
    different_formats = []
    for tensor in gguf.GGUFReader(path).tensors:
        match = others.pop(tensor.name)
        if match.tensor_type != tensor.tensor_type:
            different_formats.append(tensor.name)
            continue
        _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        rows = tensor.data.reshape(-1).view("u1").reshape(-1, block_bytes)
        other_rows = match.data.reshape(-1).view("u1").reshape(-1, block_bytes)
        blocks += len(rows)
        different_blocks += int((rows != other_rows).any(axis=1).sum())
    if others:
        raise KeyError(f"{path} lacks {', '.join(others)}")
    return Comparison(blocks, different_blocks, tuple(different_formats))


def write_reference(source: Path, target: Path, name: str) -> None:
    """Quantize by llama_model_quantize of the package llama-cpp-python, which exports it."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = _FILE_CODES[name]
    params.allow_requantize = True
    status = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(params)
    )
    if status:
        raise SystemExit(f"llama.cpp cannot quantize {source}")


def peak_bytes(command: list[str]) -> int:
    """Run a command and return its peak memory, mapped files included. Raises SystemExit if it fails."""
    process = subprocess.Popen([sys.executable, "-m", *command], **_QUIET)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return usage.ru_maxrss * 1024


def losses(source: Path, models: list[Path], windows: int) -> list[dict[str, Any]]:
    """Return what `quality` measures for the source and each model."""
    command = [sys.executable, "-m", "localchat", "quality", *map(str, (source, *models))]
    options = ["--only", "text", "--windows", str(windows), "--json", "--quiet"]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, check=True)
    measured: list[dict[str, Any]] = json.loads(done.stdout)["measured"]
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--types", default=",".join(GgufQuantizer.names))
    parser.add_argument("--windows", type=int, default=0)
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reference is not None:
        # A child of this script, whose memory is measured.
        for name in options.types.split(","):
            write_reference(options.model, options.reference / f"{name}.gguf", name)
        return 0
    rows = []
    # Comparing maps whole files, and a process that is started counts its parent's peak as its own.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, spawn)
    with tempfile.TemporaryDirectory() as folder, pool:
        models = []
        print(f"{'type':8} {'blocks':>12} {'different':>10} {'peak MB':>8} {'llama.cpp':>10}")
        for name in options.types.split(","):
            ours = Path(folder, f"{name}.gguf")
            references = Path(folder, "references")
            references.mkdir(exist_ok=True)
            theirs = references / f"{name}.gguf"
            command = ["localchat", "quantize", str(options.model), str(ours), "-t", name]
            peak = peak_bytes(command)
            script = ["scripts.tools.check_quantize", str(options.model), "--types", name]
            reference_peak = peak_bytes([*script, "--reference", str(references)])
            comparison = pool.submit(compare, ours, theirs).result()
            row = {"type": name, **comparison._asdict(), "peak_bytes": peak}
            rows.append(row | {"reference_peak_bytes": reference_peak})
            print(
                f"{name:8} {comparison.blocks:12,} {comparison.different_blocks:10,} "
                f"{peak / 1e6:8.0f} {reference_peak / 1e6:10.0f} {' '.join(comparison.different_formats)}",
                flush=True,
            )
            theirs.unlink()
            if options.windows:
                models.append(ours)
            else:
                ours.unlink()
        if options.windows:
            source, *measured = losses(options.model, models, options.windows)
            print(f"{'source':8} PPL {source['perplexity']['perplexity']:.3f}")
            for row, model in zip(rows, measured, strict=True):
                row["perplexity"] = model["perplexity"]["perplexity"]
                row["kl"] = model["divergence"]["kl_mean"]
                print(f"{row['type']:8} PPL {row['perplexity']:.3f} KL {row['kl']:.4f}")
    is_equal = all(not row["different_blocks"] and not row["different_formats"] for row in rows)
    print(json.dumps({"rows": rows, "ok": is_equal}))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
