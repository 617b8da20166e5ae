"""Builds facts.json, the table of facts for the built-in guide and the phrasings of its questions.

Sources: topics/*.toml (a topic is one fact with its answer and the ways to ask for it) and the tables of
arithmetic.py. `python scripts/tools/guide/facts.py` writes facts.json, which is all that training needs.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Final

from arithmetic import (
    CARDS,
    CARDS_OF_SEVERAL,
    FILE_GB,
    coding,
    downloads,
    kv,
    memory,
    shapes,
    size_fits,
    speeds,
    weights,
)

HERE: Final = Path(__file__).resolve().parent
TOPIC_FILES: Final = (
    "commands", "flags", "interface", "program", "field",
    "setup", "daily", "editors", "service", "basics",
    "moving", "absent", "trouble", "manners", "cuda", "novelties", "details",
)  # fmt: skip
WORD_FILES: Final = (
    "lexicon", "words", "frames", "sums", "refusals", "copying", "leaning", "foreign", "pastes",
)  # fmt: skip

# The program's verbs and flags, written by hand; a test compares them with the program.
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
    "bench",
    "batch",
    "learn",
    "quality",
    "cache",
    "quantize",
    "completion",
]
SUBCOMMANDS: Final = {
    "history": ["list", "search", "show", "export", "rename", "rm", "restore"],
    "config": ["show", "keys", "path", "set", "unset"],
    "cache": ["list", "clear"],
    "completion": ["bash", "zsh", "fish"],
}
FLAGS: Final = [
    "-m",
    "--type",
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
    "--experts-on-cpu",
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
    "--insecure-no-auth",
    "--dummy-weights",
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
    "--no-loop-guard",
    "--yes",
    "-y",
    "--quantize",
    "--draft",
    "--raw-prompt",
    "--theme",
    "--reduced-motion",
    "--for",
    "--require-complete",
    "--anyway",
    "--name",
    "--list",
    "--forget",
    "--think-budget",
    "--rate",
    "--machine-hour",
    "--ttft",
    "--tpot",
    "--limit",
    "--retry-errors",
    "--llamacpp-library",
    "--template",
    "--temp",
    "--verbose",
    "--output",
    "--vary",
    "--list",
    "--svg",
    "--clients",
    "--cache-disk",
    "--no-cache-disk",
    "--tools",
    "--root",
    "--tool-rounds",
    "--lora",
    "-v",
    "-V",
    "-n",
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
    "/everything",
    "/copy",
    "/export",
    "/history",
    "/stats",
    "/tools",
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
    7: ("ANSWER_CUT", "a limit or a loop ended the answer, and --require-complete was given"),
    130: ("INTERRUPTED", "interrupted by Ctrl+C; the partial answer is kept"),
}  # fmt: skip
EXIT_REASONS: Final = {
    0: "everything went well|it worked|no error",
    1: "some other error|the engine died|a general error",
    2: "i mistype a flag|a flag is unknown|a usage error|i use it wrongly|an option is wrong",
    3: "the model is missing|no model is there|the model is not downloaded|the model is not found",
    4: "the model does not fit|memory is too small|not enough memory|it runs out of memory",
    5: "the network fails|the download fails|the checksum is wrong|there is no network",
    6: "the prompt is too long|the context is exceeded|the input is longer than the context",
    7: "the answer is cut|the answer is not complete|the answer is incomplete|a limit ends the answer",
    130: "i press ctrl+c|i interrupt it|i press ctrl c|it is interrupted|i cancel it",
}

EXIT_HELP: Final = {
    1: "@command.doctor", 2: "@flag.all", 3: "@pull.missing", 4: "@advice.oom", 5: "@pull.resume",
    6: "@advice.long",
}  # fmt: skip
"""The topic that answers "how do I fix that?" after an exit code."""

# Name as written, ways to say it, sizes in billions of parameters.
FAMILIES: Final = {
    "qwen2.5": ("qwen2.5|qwen 2.5|qwen25", "0.5 1.5 3 7 14 32 72"),
    "qwen3": ("qwen3|qwen 3", "0.6 1.7 4 8 14 32"),
    "qwen2.5-coder": ("qwen2.5-coder|qwen 2.5 coder|qwen2.5 coder|qwen coder", "1.5 3 7 14 32"),
    "llama3.1": ("llama3.1|llama 3.1", "8"),
    "llama3.2": ("llama3.2|llama 3.2", "1 3"),
    "llama3.3": ("llama3.3|llama 3.3", "70"),
    "mistral": ("mistral", "7"),
    "gemma3": ("gemma3|gemma 3|gemma", "1 4 12 27"),
    "phi4": ("phi4|phi 4|phi-4", "14"),
    "deepseek-r1": ("deepseek-r1|deepseek r1|deepseek-r1 distill|deepseek|r1", "1.5 7 8 14 32 70"),
    "smollm2": ("smollm2|smollm 2|smollm", "1.7"),
}
BARE: Final = {
    "llama|llama 3|llama3|llama-3|meta llama": "llama3.2:1b llama3.2:3b llama3.1:8b llama3.3:70b",
    "qwen|alibaba qwen": (
        "qwen3:0.6b qwen2.5:1.5b qwen3:1.7b qwen2.5:3b qwen3:4b qwen2.5:7b qwen3:8b qwen2.5:14b qwen2.5:32b "
        "qwen2.5:72b"
    ),
}
"""Family names without a version, and the catalogue's model for each size."""


def read_toml(name: str) -> dict[str, Any]:
    """Read one file of the folder `topics`."""
    return tomllib.loads((HERE / "topics" / f"{name}.toml").read_text("utf-8"))


def exit_topics() -> list[dict[str, Any]]:
    """One topic per exit code."""
    forms = read_toml("exit")
    topics = []
    for code, (_, words) in EXIT_CODES.items():
        values = {"code": str(code), "kind": forms["kind"], "reason": f"({EXIT_REASONS[code]})"}
        topics.append({
            "id": f"exit.{code}",
            "group": "exit",
            "source": "localchat/errors.py",
            "shorts": [str(code), f"code {code}", f"exit code {code}"],
            "answer": f"Exit code {code}: {words}.",
            "ask": [pattern.format(**values) for pattern in forms["ask"]],
            "kw": [pattern.format(**values) for pattern in forms["kw"]],
            **({"follow": [[forms["mend"], EXIT_HELP[code]]]} if code in EXIT_HELP else {}),
        })  # fmt: skip
    return topics


def commands_in(text: str) -> list[str]:
    """Find every `localchat ...` command in backticks or in a code block of a text."""
    found: list[str] = []
    for i, part in enumerate(re.split(r"^```.*$", text, flags=re.M)):
        found += part.splitlines() if i % 2 else re.findall(r"`([^`\n]+)`", part)
    starts = re.compile(r"(?:^|[|] |=\S+ )(localchat(?: .*)?)$")
    return [m[1].strip() for c in found if (m := starts.search(c.strip()))]


def build() -> dict[str, Any]:
    """Build the whole table, ready for JSON."""
    topics: list[dict[str, Any]] = []
    for name in TOPIC_FILES:
        topics += read_toml(name)["topic"]
    topics += exit_topics()
    said: dict[str, list[str]] = read_toml("wordings")
    for topic in topics:
        topic["answer"] = topic["answer"].strip()
        if topic["id"] in said:
            topic["said"] = said.pop(topic["id"])
    if said:
        raise ValueError(f"wordings.toml names topics that do not exist: {', '.join(said)}")
    return {
        "topics": topics,
        **{name: read_toml(name) for name in WORD_FILES},
        "families": {k: {"say": s, "sizes": z.split()} for k, (s, z) in FAMILIES.items()},
        "bare": {say: names.split() for say, names in BARE.items()},
        "weights": weights(),
        "kv": kv(),
        "shapes": shapes(),
        "memory": memory(),
        "size_fits": size_fits(),
        "coding": coding(),
        "cards": CARDS,
        "cards_of_several": CARDS_OF_SEVERAL,
        "files": FILE_GB,
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
