"""Answers about features that are newer than the guide's training, by patterns of questions.

A training that knows these features makes this table empty.
"""

import re
from typing import Final, NamedTuple

_AGENTS: Final = r"(?:claude code|codex|opencode|crush|gptme|aider|a coding agent)"


class RecentFeature(NamedTuple):
    """A feature, how people ask about it, and the answer."""

    questions: tuple[str, ...]
    """Regular expressions. One that is found in a question suffices."""
    answer: str


RECENT_FEATURES: Final = (
    RecentFeature(
        (
            r"(?i)\b(?:undo|revert|take back)\b.*\b(?:tools?|edits?|files?|wrote|written)\b",
            r"(?i)\brestore\b.*\b(?:tools?|edits?|wrote|written)\b",
        ),
        "`/undo` takes back the last question and every file that tools wrote for it, byte by byte. A file "
        'that has changed since is left as it is, and named. After `localchat "question" --tools edit`, '
        "`localchat -c -i` and `/undo` do the same. Effects of commands and MCP servers cannot be undone.",
    ),
    RecentFeature(
        (
            rf"(?i)\b(?:use|run|start|launch|open|connect|set up|try)\b.*\b{_AGENTS}",
            rf"(?i)\b{_AGENTS}.*\b(?:local models?|my model|localchat)\b",
            r"(?i)\blocalchat launch\b",
        ),
        "`localchat launch codex -m MODEL` starts a coding agent on a model of this machine: claude, codex, "
        "opencode, crush, gptme or aider. It starts a server if none runs, and changes none of the agent's "
        "files. By hand: with `localchat serve` running, Claude Code speaks `/v1/messages`, Codex "
        "`/v1/responses`, and the others `/v1/chat/completions`.",
    ),
    RecentFeature(
        (
            r"(?i)\bacp\b|\bagent client protocol\b|\btoad\b",
            r"(?i)\bagent\b.*\b(?:editor|zed)\b",
        ),
        "`localchat acp -m MODEL` is the agent of an editor, over the Agent Client Protocol (extra `acp`). "
        "In Zed's `settings.json`:\n\n```json\n"
        '{ "agent_servers": { "localchat": { "type": "custom", "command": "localchat", "args": ["acp"] } } }\n'
        '```\n\nIn toad: `toad acp "localchat acp -m MODEL"`.',
    ),
    RecentFeature(
        (
            r"(?i)\b(?:let|allow|make|have|can)\b.*\bmodels?\b.*\b(?:edit|change|modify|write)\b.*"
            r"\b(?:files?|code|project)\b",
            r"(?i)\b(?:let|allow)\b.*\b(?:run|execute)\b.*\b(?:commands?|shell|programs?)\b",
            r"(?i)\b(?:use|turn on|enable|give it)\b.*\btools\b(?!.*\b(?:api|server|openai)\b)",
        ),
        "`localchat run MODEL --tools read,edit` (or `/tools read,edit` in a conversation) lets a model "
        "read, search and edit the files of one folder (`--root`). `run`, `fetch` and `docs` add commands, "
        "web pages and learned documents. Each call asks for your consent, and `/undo` takes back what was "
        "written.",
    ),
    RecentFeature(
        (r"(?i)\b(?:recordings?|transcribe|transcription|audio|mp3|wav|podcasts?)\b",),
        'Some models hear recordings, through llama.cpp: `localchat -f talk.mp3 "What is said here?"` with '
        "WAV, MP3, FLAC or Ogg. `localchat show MODEL` says whether a model can. localchat has no microphone "
        "and does not speak.",
    ),
    RecentFeature(
        (r"(?i)\bscreen.?readers?\b|\bblind\b|\b(?:nvda|orca|voiceover|braille)\b",),
        "`localchat --screen-reader` appends lines and redraws nothing: no colors, numbered choices, and the "
        "line `End of answer.` after each answer. `localchat config set screen_reader true` makes it "
        "permanent.",
    ),
    RecentFeature(
        (
            r"(?i)\b(?:two|2|three|four|both|several|multiple|second)\b.*"
            r"\b(?:gpus?|graphics cards?|video cards?)\b",
        ),
        "llama.cpp spreads the layers of a GGUF over all GPUs it sees, and `localchat fit MODEL` plans for "
        "them. With the CUDA backend, `--gpus 2` or `--gpus auto` computes a safetensors model (bf16, AWQ, "
        "FP8) on several GPUs together.",
    ),
    RecentFeature(
        (r"\bDRY\b", r"(?i)\bdry.(?:multiplier|sampl|penalt|base|allowed)"),
        "DRY penalizes tokens that would continue a repeated sequence: `--dry-multiplier 0.8` turns it on, 0 "
        "is off. `/set` in a conversation lists its other numbers.",
    ),
    RecentFeature(
        (r"(?i)\bxtc\b",),
        "XTC sometimes drops the likeliest tokens but the last above a threshold, so that a text is less "
        "predictable: `--xtc-probability 0.5` turns it on, 0 is off. Use it for stories, not for facts.",
    ),
    RecentFeature(
        (r"(?i)\btop.?n.?sigma\b|\bnsigma\b",),
        "Top-n-sigma keeps tokens whose logits are at most n standard deviations below the highest: "
        "`--top-n-sigma 1` is usual, 0 is off. What it keeps does not depend on the temperature.",
    ),
    RecentFeature(
        (r"(?i)\bdynamic temp(?:erature)?\b|\bdynatemp",),
        "Dynamic temperature is lower where the model is sure and higher where it is not: "
        "`--dynatemp-range 0.3` goes from temperature - 0.3 to temperature + 0.3, 0 is off.",
    ),
    RecentFeature(
        (r"(?i)\b(?:which|what|list|all|order of)\b.*\bsamplers\b",),
        "In order: penalties (`-o repetition_penalty 1.1`), DRY (`--dry-multiplier`), `--top-n-sigma`, "
        "`--top-k`, typical-p (`-o typical_p`), `--top-p`, `--min-p`, XTC (`--xtc-probability`), temperature "
        "(`--temperature`, `--dynatemp-range`). Ask me for one by its name.",
    ),
    RecentFeature(
        (
            r"(?i)\bquality\b.*\b(?:gates?|scripts?|ci|exit code|drops)\b",
            r"(?i)\b(?:gates?|fail|scripts?|ci)\b.*\bquality\b",
        ),
        "`localchat quality A B --gate kl=0.02 --gate needles=0` exits with 1 if B misses a limit against A, "
        'and names it. `--gate` alone allows a verdict up to "close".',
    ),
)


def recent_answer(question: str) -> str:
    """Return the answer about a recent feature. Empty if the question is about something else."""
    for feature in RECENT_FEATURES:
        if any(re.search(pattern, question) for pattern in feature.questions):
            return feature.answer
    return ""
