#!/usr/bin/env python3
"""Compares planned with used GPU memory for partial offload.

    scripts/tools/check_offload.py --vocabulary VOCAB.gguf [--shape 3584,28,28,4,18944] [--layers 0,7,14,21,all]

Needs a llama.cpp built for the GPU, and nvidia-ml-py. Writes a model of random weights (or takes
`--model`), loads it once for each number of layers and KV type in a separate engine, answers a prompt,
and reads the card's free memory before and after. Prints a line for each, and as the last line one JSON
object.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

_PROMPT = tuple(range(1000, 1400))


class Measured(NamedTuple):
    """One load. Bytes of GPU memory, tokens a second of the decode. parts: weights, KV and compute
    buffers on all devices, as planned and as llama.cpp reported.
    """

    kv_type: str
    asked: str
    gpu_layers: int
    planned_bytes: int
    taken_bytes: int
    tokens_per_s: float
    parts: tuple[tuple[int, int], ...]

    @property
    def error(self) -> float:
        """Error of the plan, as a share of what was used; none for a load that uses nothing."""
        return self.planned_bytes / self.taken_bytes - 1 if self.taken_bytes else 0.0


def main() -> int:
    """Measure and print every load."""
    asked = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model or _written(Path(folder) / "offload.gguf", asked)
        rows: list[Measured] = []
        for kv_type in asked.kv_types.split(","):
            for layers in asked.layers.split(","):
                row = _measured(model, layers, kv_type, asked.context)
                rows.append(row)
                print(
                    f"{kv_type:>5} {layers:>4} layers ({row.gpu_layers}): planned "
                    f"{row.planned_bytes / 1e6:8.1f} MB, taken {row.taken_bytes / 1e6:8.1f} MB "
                    f"({row.error:+.1%}), {row.tokens_per_s:.1f} tok/s",
                    flush=True,
                )
    worst = max((abs(row.error) for row in rows), default=0.0)
    print(json.dumps({"worst_error": round(worst, 4), "loads": [row._asdict() for row in rows]}))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, metavar="GGUF")
    parser.add_argument("--vocabulary", type=Path, metavar="GGUF")
    parser.add_argument(
        "--shape",
        default="3584,28,28,4,18944",
        help="embedding, layers, heads, KV heads, feed-forward (7B of Qwen2.5)",
    )
    parser.add_argument("--layers", default="0,7,14,21,all")
    parser.add_argument("--kv-types", default="f16,q8_0")
    parser.add_argument("--context", type=int, default=8192, metavar="TOKENS")
    asked = parser.parse_args()
    if not asked.model and not asked.vocabulary:
        parser.error("give --model, or --vocabulary to write one")
    return asked


def _written(path: Path, asked: argparse.Namespace) -> Path:
    from gguf import GGUFReader

    from scripts.bench.llamacpp.gguf_models import Shape, write_model

    shape = Shape(*(int(number) for number in asked.shape.split(",")))
    write_model(path, GGUFReader(asked.vocabulary), 1, shape)
    return path


def _measured(model: Path, layers: str, kv_type: str, context: int) -> Measured:
    from localchat.engine.events import Done
    from localchat.engine.local.engine import LocalEngine
    from localchat.engine.options import EngineOptions
    from localchat.engine.request import GenerateRequest, Sampling, TokenIds
    from localchat.fit.hardware import read_machine
    from localchat.fit.load_options import LoadOptions
    from localchat.model_files.architecture import model_shape
    from localchat.model_files.open_gguf import read_header
    from localchat_llamacpp.plan.memory_plan import plan

    wanted: int | Literal["all"] = "all" if layers == "all" else int(layers)
    load_options = LoadOptions(context_tokens=context, kv_type=kv_type, gpu_layers=wanted)
    machine = read_machine()
    planned = plan(model_shape(read_header(model)), load_options, machine, can_offload=True)
    before = machine.gpu_free_bytes
    options = EngineOptions(
        model,
        load=LoadOptions(context_tokens=context, kv_type=kv_type, gpu_layers=wanted),
        speculation=False,
    )
    engine = LocalEngine(options, notify=lambda text: print(f"  {text}", file=sys.stderr))
    try:
        request = GenerateRequest(
            TokenIds(_PROMPT), Sampling(temperature=0), max_tokens=64, ignore_eos=True
        )
        done = [event for event in engine.generate(request) if isinstance(event, Done)][-1]
        taken = before - read_machine().gpu_free_bytes
        info = engine.info()
    finally:
        engine.close()
    rate = done.timings.decode_tokens_per_s or 0.0
    names = ("weights_bytes", "kv_bytes", "compute_bytes")
    parts = tuple((getattr(info.predicted, n), getattr(info.actual, n)) for n in names)
    return Measured(kv_type, layers, planned.gpu_layers, planned.gpu_bytes, taken, rate, parts)


if __name__ == "__main__":
    raise SystemExit(main())
