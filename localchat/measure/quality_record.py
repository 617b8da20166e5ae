"""Records of quality: dated JSON files with machine, models, settings and everything measured."""

from pathlib import Path
from typing import Final, Literal

import msgspec

from localchat import __version__
from localchat.atomic import write_text
from localchat.config.paths import expand_home
from localchat.errors import LocalchatError, UsageError, reason
from localchat.measure.bench_record import LAST, MachineRecord
from localchat.measure.sweep import BenchVariant

FOLDER: Final = "quality"


class PerplexityFigures(msgspec.Struct, frozen=True):
    """Perplexity of a text, by the definition of llama-perplexity."""

    perplexity: float
    margin: float
    """Its standard error."""
    tokens: int
    """Tokens that count: the second half of each window."""
    bits_per_byte: float
    """Comparable between models of different tokenizers."""


class DivergenceFigures(msgspec.Struct, frozen=True):
    """How far the token probabilities are from those of the first model."""

    kl_mean: float
    """Mean KL divergence of a token, in nats."""
    kl_p99: float
    kl_max: float
    same_top_share: float
    """Share of positions with the same likeliest token."""
    complete: bool
    """True: over the whole vocabulary; False: a lower bound from the likeliest tokens and the rest."""


class TaskOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """One task and its outcome."""

    name: str
    passed: bool
    answer: str = ""
    """Its beginning."""
    length: int = 0
    """Tokens of the text of a needle."""
    depth: float = 0.0
    """Of a needle: 0 is the beginning of the text, 1 its end."""


class GreedyText(msgspec.Struct, frozen=True):
    """A greedy answer by tokens, or by words where the server names no tokens."""

    prompt: str
    pieces: tuple[str, ...]
    same: int | None = None
    """Pieces up to the first that differs from the first model's; None: all are equal."""


class VariantQuality(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything measured of one variant."""

    variant: BenchVariant
    model: str
    backend: str = ""
    quantization: str = ""
    kv_type: str = ""
    file_bytes: int = 0
    context_tokens: int = 0
    perplexity: PerplexityFigures | None = None
    divergence: DivergenceFigures | None = None
    """None for the first one."""
    greedy: tuple[GreedyText, ...] = ()
    json: tuple[TaskOutcome, ...] = ()
    tools: tuple[TaskOutcome, ...] = ()
    needles: tuple[TaskOutcome, ...] = ()
    questions: tuple[TaskOutcome, ...] = ()
    left_out: tuple[str, ...] = ()
    """What could not be measured, and why."""


class QualitySpec(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked to be measured."""

    variants: tuple[BenchVariant, ...]
    tests: tuple[str, ...]
    text: str
    """Name of the text."""
    text_digest: str
    window_tokens: int
    most_windows: int
    needle_lengths: tuple[int, ...]
    needle_depths: int
    tasks: int
    """Schemas and tools."""
    questions: str = ""
    """Name of the questions file."""


class QualityRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison."""

    version: Literal[1] = 1
    id: int = 0
    """Its number on this machine; 0: it is not kept."""
    at: str
    """When it began, ISO 8601."""
    localchat: str = __version__
    machine: MachineRecord
    spec: QualitySpec
    measured: tuple[VariantQuality, ...]
    verdicts: tuple[str, ...] = ()
    complete: bool = True


class QualityStore:
    """Records of this machine, numbered from 1."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / FOLDER

    def keep(self, record: QualityRecord) -> QualityRecord:
        """Store a record under the next number. Raises LocalchatError where it cannot be written."""
        from filelock import FileLock

        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self._folder / ".lock"):
                kept = msgspec.structs.replace(record, id=max(self._numbers(), default=0) + 1)
                text = msgspec.json.format(msgspec.json.encode(kept)).decode()
                write_text(self._path(kept.id), f"{text}\n")
        except OSError as problem:
            raise LocalchatError(
                f"the result cannot be kept in {self._folder}: {reason(problem)}",
                hint="--no-keep measures without keeping",
            ) from problem
        return kept

    def records(self) -> list[QualityRecord]:
        """All records, oldest first; damaged files are left out."""
        found = []
        for number in sorted(self._numbers()):
            try:
                found.append(_read(self._path(number)))
            except UsageError:
                continue
        return found

    def find(self, word: str) -> QualityRecord:
        """The record with this number, the `last` one, or the one in a file. Raises UsageError."""
        numbers = sorted(self._numbers())
        if word == LAST and numbers:
            return _read(self._path(numbers[-1]))
        if word.isascii() and word.isdecimal() and int(word) in numbers:
            return _read(self._path(int(word)))
        path = expand_home(word)
        if path.is_file():
            return _read(path)
        kept = f"there are 1 to {numbers[-1]}: localchat quality --list" if numbers else ""
        none = "there is none yet: localchat quality A B makes one"
        raise UsageError(
            f"there is no quality result {word!r}",
            hint=f"{kept or none}; or give the file of a record",
        )

    def _numbers(self) -> list[int]:
        stems = [path.stem for path in self._folder.glob("*.json")]
        return [int(stem) for stem in stems if stem.isascii() and stem.isdecimal()]

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:04}.json"


def _read(path: Path) -> QualityRecord:
    try:
        return msgspec.json.decode(path.read_bytes(), type=QualityRecord)
    except (OSError, msgspec.DecodeError) as problem:
        raise UsageError(f"{path} is no record of quality: {problem}") from problem
