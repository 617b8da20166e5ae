"""Parses quantizations in names of files, and groups the files of each."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from localchat.errors import ModelInvalid, ModelMissing, UsageError
from localchat.models.hub.manifest import Format

DEFAULT_QUANTIZATION: Final = "Q4_K_M"
"""4.5 bits: the smallest mix whose answers are hard to tell from the unquantized model's."""

_GGUF: Final = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q[1-8]|TQ[12])(?:_[0-9A-Z]+)*|MXFP4(?:_MOE)?|BF16|F16|F32|FP16|FP32)"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_SAFETENSORS: Final = re.compile(r"(?<![A-Za-z])(AWQ|GPTQ|FP8|BF16)(?![A-Za-z])", re.IGNORECASE)
_PART: Final = re.compile(r"-(\d{5})-of-(\d{5})$")
_ACCESSORY: Final = re.compile(r"mmproj|imatrix|(^|/)mtp[-/]|dflash|eagle-?3", re.IGNORECASE)
"""Files beside models. A head that only drafts (`mtp-NAME.gguf`) has the quantization of its model, and is no
model; a file whose name tells later that it holds such a head is a whole one."""
_MOST_SHOWN: Final = 20


class Variant(NamedTuple):
    """One model of a repository: the files that belong together."""

    quantization: str
    """Empty where the names do not state it."""
    format: Format
    stem: str
    files: tuple[str, ...]
    """Parts of a split model in order."""
    trouble: str = ""
    """The part that the repository lacks, a sentence."""


def canonical(quantization: str) -> str:
    """The form for comparison: upper case, underscores, F16 for the older FP16."""
    written = quantization.upper().replace("-", "_")
    if written in ("FP16", "FP32"):
        return written[:1] + written[2:]
    return written


def same_quantization(first: str, second: str) -> bool:
    """Whether two spellings mean the same."""
    return canonical(first) == canonical(second)


def is_quantization(name: str) -> bool:
    """Whether a word is the name of a GGUF quantization."""
    return _GGUF.fullmatch(name.replace("-", "_").replace("UD_", "UD-", 1)) is not None


def quantization_of(path: str) -> str:
    """The quantization in a file's name, in upper case; empty where there is none."""
    matches = _GGUF.findall(PurePosixPath(path).stem)
    return str(matches[-1]).upper() if matches else ""


def safetensors_quantization(repository: str) -> str:
    """The quantization in the name of a safetensors repository; empty for the makers' own weights."""
    match = _SAFETENSORS.search(repository)
    return match[0].upper() if match else ""


def gguf_variants(paths: Iterable[str]) -> list[Variant]:
    """The models among these files, without image projectors, importance matrices and drafting heads."""
    groups: dict[str, dict[int, str]] = {}
    counts: dict[str, set[int]] = {}
    for path in sorted(paths):
        pure = PurePosixPath(path)
        if pure.suffix.lower() != ".gguf" or _ACCESSORY.search(path):
            continue
        part = _PART.search(pure.stem)
        stem = str(pure.with_name(pure.stem[: part.start()] if part else pure.stem))
        number, count = (int(part[1]), int(part[2])) if part else (1, 1)
        groups.setdefault(stem, {})[number] = path
        counts.setdefault(stem, set()).add(count)
    return [_variant(stem, parts, counts[stem]) for stem, parts in groups.items()]


def _variant(stem: str, parts: dict[int, str], counts: set[int]) -> Variant:
    count = max(counts)
    trouble = ""
    if len(counts) > 1 or sorted(parts) != list(range(1, count + 1)):
        missing = sorted(set(range(1, min(count, 10_000) + 1)) - set(parts))
        trouble = f"{stem} is split into {count} parts, and the repository has {len(parts)}" + (
            f": part {missing[0]} is missing" if missing else ""
        )
    files = tuple(parts[number] for number in sorted(parts))
    return Variant(quantization_of(f"{stem}.gguf"), "gguf", stem, files, trouble)


def choose(variants: list[Variant], quantization: str | None, repository: str) -> Variant:
    """The variant of a quantization or file name; without one the default, or the only one.

    Raises ModelMissing for one that is not there, UsageError where several match, ModelInvalid for an
    incomplete one.
    """
    if not variants:
        raise ModelMissing(
            f"{repository} has no GGUF model",
            hint="repositories with GGUF files mostly end in -GGUF",
        )
    if quantization is None:
        matches = [
            variant
            for variant in variants
            if same_quantization(variant.quantization, DEFAULT_QUANTIZATION)
        ]
        matches = matches or (variants if len(variants) == 1 else [])
    else:
        matches = [
            variant
            for variant in variants
            if same_quantization(variant.quantization, quantization)
            or PurePosixPath(variant.stem).name.lower()
            == quantization.lower().removesuffix(".gguf")
        ]
    matches = [variant for variant in matches if not variant.trouble] or matches
    if len(matches) == 1:
        return _complete(matches[0], variants)
    if matches:
        names = [PurePosixPath(variant.stem).name for variant in matches]
        raise UsageError(
            f"{repository} holds {len(matches)} files of {matches[0].quantization or 'variant kind'}",
            hint=f"name one of them after the colon: {_listed(names)}",
        )
    offered = _listed(
        [variant.quantization or PurePosixPath(variant.stem).name for variant in variants]
    )
    if quantization is None and len({variant.quantization for variant in variants}) == 1:
        names = [PurePosixPath(variant.stem).name for variant in variants]
        raise UsageError(
            f"{repository} holds {len(variants)} files of {variants[0].quantization or 'variant kind'}",
            hint=f"name one of them after a colon: {_listed(names)}",
        )
    if quantization is None:
        raise UsageError(
            f"{repository} holds {len(variants)} quantizations, and none is {DEFAULT_QUANTIZATION}",
            hint=f"name one after a colon, as hf.co/{repository}:QUANT; it has {offered}",
        )
    raise ModelMissing(f"{repository} has no {quantization}", hint=f"it has {offered}")


def _complete(choice: Variant, variants: list[Variant]) -> Variant:
    if not choice.trouble:
        return choice
    complete = [
        variant.quantization or PurePosixPath(variant.stem).name
        for variant in variants
        if not variant.trouble
    ]
    others = (
        f"choose another quantization ({_listed(complete)})"
        if complete
        else "nothing else is whole"
    )
    raise ModelInvalid(choice.trouble, hint=f"{others}, or another repository of the same model")


def _listed(names: list[str]) -> str:
    once = list(dict.fromkeys(names))
    return ", ".join(once[:_MOST_SHOWN]) + (" …" if len(once) > _MOST_SHOWN else "")
