"""The table of facts behind the built-in guide, and the phrasings of its questions: facts.json.

Single source: topics/*.toml (one topic is one fact with its answer and the ways to ask for it) and
the arithmetic below. `python scripts/guide/facts.py` writes facts.json, which is all that training
needs.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
TOPIC_FILES: Final = (
    "commands", "flags", "interface", "program", "field",
    "setup", "daily", "editors", "basics",
)  # fmt: skip
WORD_FILES: Final = ("lexicon", "words", "frames", "sums", "refusals", "copying")

# What the program accepts, as the issues fix it; a test compares it with the program.
VERBS: Final = [
    "run",
    "pull",
    "list",
    "ls",
    "show",
    "rm",
    "cp",
    "ps",
    "stop",
    "serve",
    "fit",
    "import",
    "doctor",
    "history",
    "config",
    "completion",
]
SUBCOMMANDS: Final = {
    "history": ["list", "search", "show", "export", "rename", "rm", "restore"],
    "config": ["show", "keys", "path", "set", "unset"],
    "completion": ["bash", "zsh", "fish"],
}
FLAGS: Final = [
    "-m",
    "--model",
    "-s",
    "--system",
    "-f",
    "--file",
    "-o",
    "--option",
    "-c",
    "--continue",
    "-i",
    "-x",
    "--extract",
    "-q",
    "--quiet",
    "--conversation",
    "--temperature",
    "--top-p",
    "--top-k",
    "--min-p",
    "--seed",
    "--max-tokens",
    "--ctx",
    "--stop",
    "--n",
    "--kv-type",
    "--threads",
    "--gpu-layers",
    "--no-speculation",
    "--think",
    "--no-think",
    "--hide-reasoning",
    "--json",
    "--stats",
    "--no-color",
    "--offline",
    "--no-history",
    "--no-attach",
    "--schema",
    "--regex",
    "--grammar",
    "--require-gpu",
    "--remote",
    "--vram-gb",
    "--kv-gb",
    "--parallel",
    "--force",
    "--rebuild",
    "--origin",
    "--host",
    "--port",
    "--api-key-file",
    "--keep-alive",
    "--allow-origin",
    "--allow-host",
    "--strict-models",
    "--longest",
    "--cache-ram",
    "--backend",
    "--head-int8",
    "--head-exact",
    "--raw-prompt",
    "--theme",
    "--reduced-motion",
    "--for",
    "--help",
    "--version",
]
SLASH: Final = [
    "/model",
    "/new",
    "/clear",
    "/system",
    "/set",
    "/think",
    "/regen",
    "/edit",
    "/undo",
    "/compact",
    "/copy",
    "/export",
    "/search",
    "/stats",
    "/fit",
    "/pull",
    "/help",
    "/quit",
]
EXIT_CODES: Final = {
    0: ("OK", "ok: everything went well"),
    1: ("ERROR", "an error that has no code of its own, for instance that the engine died"),
    2: ("USAGE", "usage: an unknown flag, a bad value or a mistyped command"),
    3: ("MODEL_MISSING", "the model is missing here; `localchat pull MODEL` gets it"),
    4: ("DOES_NOT_FIT", "the model does not fit in memory; `localchat fit MODEL` says what would"),
    5: ("NETWORK", "the network failed, or a checksum did not match"),
    6: ("CONTEXT_EXCEEDED", "the prompt exceeds the context: shorten it, or try q8_0 KV"),
    130: ("INTERRUPTED", "interrupted by Ctrl+C; what was said is kept"),
}  # fmt: skip
EXIT_REASONS: Final = {
    0: "everything went well|it worked|no error",
    1: "some other error|the engine died|a general error",
    2: "i mistype a flag|a flag is unknown|a usage error|i use it wrongly|an option is wrong",
    3: "the model is missing|no model is there|the model is not downloaded|the model is not found",
    4: "the model does not fit|memory is too small|not enough memory|it runs out of memory",
    5: "the network fails|the download fails|the checksum is wrong|there is no network",
    6: "the prompt is too long|the context is exceeded|the input is longer than the context",
    130: "i press ctrl+c|i interrupt it|i press ctrl c|it is interrupted|i cancel it",
}

# name as written, ways to say it; sizes in billions of parameters
FAMILIES: Final = {
    "qwen2.5": ("qwen2.5|qwen 2.5|qwen25", "0.5 1.5 3 7 14 32 72"),
    "qwen3": ("qwen3|qwen 3", "0.6 1.7 4 8 14 32"),
    "qwen2.5-coder": ("qwen2.5-coder|qwen 2.5 coder|qwen2.5 coder|qwen coder", "1.5 3 7 14 32"),
    "llama3.1": ("llama3.1|llama 3.1", "8"),
    "llama3.2": ("llama3.2|llama 3.2", "1 3"),
    "llama3.3": ("llama3.3|llama 3.3", "70"),
    "mistral": ("mistral", "7"),
    "gemma3": ("gemma3|gemma 3", "1 4 12 27"),
    "phi4": ("phi4|phi 4|phi-4", "14"),
    "deepseek-r1": ("deepseek-r1|deepseek r1|deepseek-r1 distill", "1.5 7 8 14 32 70"),
    "smollm2": ("smollm2|smollm 2|smollm", "1.7"),
}
WEIGHT_SIZES: Final = (0.5, 1, 1.5, 3, 4, 7, 8, 14, 32, 70, 72)
WEIGHT_BITS: Final = (16, 8, 4)
# layers, KV heads, head_dim, as their config.json files have them
SHAPES: Final = {
    "Qwen2.5-0.5B": (24, 2, 64),
    "Qwen2.5-1.5B": (28, 2, 128),
    "Qwen2.5-3B": (36, 2, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Qwen2.5-14B": (48, 8, 128),
    "Qwen2.5-32B": (64, 8, 128),
    "Llama 3.1 8B": (32, 8, 128),
    "Llama 3.2 1B": (16, 8, 64),
    "Llama 3.2 3B": (28, 8, 128),
    "Llama 3.3 70B": (80, 8, 128),
    "Mistral 7B": (32, 8, 128),
}
KV_TOKENS: Final = (4096, 8192, 16384, 32768, 131072)
KV_BYTES: Final = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
FILE_GB: Final = {
    "3b": 1.9,
    "7b": 4.7,
    "8b": 4.9,
    "14b": 9.0,
    "32b": 19.9,
    "70b": 42.5,
}  # Q4_K_M files
BANDWIDTHS: Final = (25, 50, 80, 100, 200, 300, 400, 500, 800, 900, 1000, 2000, 3350, 4800)
LINE_MBIT: Final = (16, 50, 100, 250, 500, 1000)
MEMORY_CHOICE: Final = {
    4: ("qwen2.5:3b-q4_k_m", "3B", 1.9, "and a short context"),
    6: ("qwen2.5:3b-q4_k_m", "3B", 1.9, "with a long context; a 7B (4.7 GB) fits only barely"),
    8: ("qwen2.5:7b-q4_k_m", "7B", 4.7, "with room for the KV cache"),
    10: ("qwen2.5:7b-q4_k_m", "7B", 4.7, "with a long context"),
    12: ("qwen2.5:14b-q4_k_m", "14B", 9.0, "with a short context or q8_0 KV"),
    16: ("qwen2.5:14b-q4_k_m", "14B", 9.0, "with a long context"),
    24: ("qwen2.5:32b-q4_k_m", "32B", 19.9, "with a short context or q8_0 KV"),
    32: ("qwen2.5:32b-q4_k_m", "32B", 19.9, "with a long context"),
    48: ("llama3.3:70b-q4_k_m", "70B", 42.5, "with a short context or q8_0 KV"),
    64: ("llama3.3:70b-q4_k_m", "70B", 42.5, "with a long context"),
    80: ("llama3.3:70b-q4_k_m", "70B", 42.5, "with a long context"),
}


def number(value: float) -> str:
    """A figure as the guide writes it: no zeros at the end, commas from 10,000 on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def gigabytes(value_bytes: float) -> str:
    """Decimal gigabytes with two places, one from 10 GB on."""
    gb = value_bytes / 1e9
    return f"{gb:.1f} GB" if gb >= 10 else f"{gb:.2f} GB"


def rate(bandwidth_gb_s: float, size_gb: float) -> str:
    """tok/s bound by bandwidth: each token reads all weights."""
    value = bandwidth_gb_s / size_gb
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def weights() -> dict[str, str]:
    """`size/bits` -> gigabytes, for the sizes people ask for."""
    return {
        f"{number(b)}/{bits}": f"{number(b * bits / 8)} GB"
        for b in WEIGHT_SIZES
        for bits in WEIGHT_BITS
    }


def kv() -> dict[str, dict[str, Any]]:
    """Per model: the product, bytes per token at f16, and the total for usual contexts and KV
    types.
    """
    table: dict[str, dict[str, Any]] = {}
    for name, (layers, heads, dim) in SHAPES.items():
        values = 2 * layers * heads * dim
        table[name] = {
            "product": f"2 × {layers} × {heads} × {dim} × 2",
            "per_token": f"{values * 2:,} bytes ({values * 2 // 1024} KiB)",
            "totals": {
                kind: {str(n): gigabytes(values * size * n) for n in KV_TOKENS}
                for kind, size in KV_BYTES.items()
            },
        }
    return table


def memory() -> dict[str, str]:
    """Gigabytes of memory -> which model, in a sentence."""
    return {
        str(gb): f"For {gb} GB take a {size} at Q4_K_M: `localchat pull {name}`. "
        f"Its weights are {number(file_gb)} GB, so it fits {how}."
        for gb, (name, size, file_gb, how) in MEMORY_CHOICE.items()
    }


def speeds() -> dict[str, str]:
    """`size GB/bandwidth GB/s` -> tok/s at most."""
    sizes = sorted({*FILE_GB.values(), 3.5, 7.0, 14.0, 40.0})
    return {f"{number(s)}/{b}": rate(b, s) for s in sizes for b in BANDWIDTHS}


def downloads() -> dict[str, str]:
    """`size GB/line Mbit/s` -> how long, in words with the arithmetic."""
    table = {}
    for size in sorted({*FILE_GB.values(), 0.4, 1.0, 2.0, 5.0, 40.0}):
        for line in LINE_MBIT:
            seconds = size * 8000 / line
            length = f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} s"
            table[f"{number(size)}/{line}"] = (
                f"{length}: {number(size)} × 8 / {line / 1000:g} = {seconds:.0f} s"
            )
    return table


def read_toml(name: str) -> dict[str, Any]:
    """One file of the folder `topics`."""
    return tomllib.loads((HERE / "topics" / f"{name}.toml").read_text("utf-8"))


def exit_topics() -> list[dict[str, Any]]:
    """One topic an exit code; the wording is that of errors.py."""
    forms = read_toml("exit")
    topics = []
    for code, (_, words) in EXIT_CODES.items():
        values = {"code": str(code), "kind": forms["kind"], "reason": f"({EXIT_REASONS[code]})"}
        topics.append({
            "id": f"exit.{code}",
            "group": "exit",
            "source": "errors.py",
            "shorts": [str(code), f"code {code}", f"exit code {code}"],
            "answer": f"Exit code {code}: {words}.",
            "ask": [pattern.format(**values) for pattern in forms["ask"]],
            "kw": [pattern.format(**values) for pattern in forms["kw"]],
        })  # fmt: skip
    return topics


def commands_in(text: str) -> list[str]:
    """Every `localchat ...` command that a text holds in backticks or in a code block."""
    found: list[str] = []
    for i, part in enumerate(re.split(r"^```.*$", text, flags=re.M)):
        found += part.splitlines() if i % 2 else re.findall(r"`([^`\n]+)`", part)
    starts = re.compile(r"(?:^|[|] |=\S+ )(localchat(?: .*)?)$")
    return [m[1].strip() for c in found if (m := starts.search(c.strip()))]


def build() -> dict[str, Any]:
    """The whole table, ready for JSON."""
    topics: list[dict[str, Any]] = []
    for name in TOPIC_FILES:
        topics += read_toml(name)["topic"]
    topics += exit_topics()
    for topic in topics:
        topic["answer"] = topic["answer"].strip()
    return {
        "topics": topics,
        **{name: read_toml(name) for name in WORD_FILES},
        "families": {k: {"say": s, "sizes": z.split()} for k, (s, z) in FAMILIES.items()},
        "weights": weights(),
        "kv": kv(),
        "memory": memory(),
        "speeds": speeds(),
        "downloads": downloads(),
        "exit_codes": {str(code): [name, words] for code, (name, words) in EXIT_CODES.items()},
        "verbs": VERBS,
        "subcommands": SUBCOMMANDS,
        "flags": FLAGS,
        "slash": SLASH,
    }


def main() -> None:
    text = json.dumps(build(), ensure_ascii=False, indent=1) + "\n"
    (HERE / "facts.json").write_text(text, "utf-8")
    print(f"facts.json: {len(build()['topics'])} topics, {len(text)} bytes")


if __name__ == "__main__":
    main()
