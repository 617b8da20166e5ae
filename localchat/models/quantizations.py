"""Parses quantizations in file names, and groups the files of each."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from localchat.errors import ModelInvalid, ModelMissing, UsageError
from localchat.models.gguf_files import PART_NUMBER
from localchat.models.hub.manifest import Format

DEFAULT_QUANTIZATION: Final = "Q4_K_M"
"""The smallest mix (4.5 bits) whose answers are hard to tell from the unquantized model's."""

_GGUF: Final = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q[1-8]|TQ[12])(?:_[0-9A-Z]+)*|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32|FP16|FP32)"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_SAFETENSORS: Final = re.compile(
    r"(?<![A-Za-z])(AWQ|GPTQ|NVFP4|MXFP8|FP8|BF16)(?![A-Za-z])", re.IGNORECASE
)
_ACCESSORY: Final = re.compile(r"mmproj|imatrix|(^|/)mtp[-/]|dflash|eagle-?3", re.IGNORECASE)
"""Files that are not models. A head that only drafts is called `mtp-NAME.gguf` and has the quantization of its
model. A model whose name mentions such a head later is complete."""
_MAX_LISTED: Final = 20


class Variant(NamedTuple):
    """Files of a repository that form one model."""

    quantization: str
    """Empty if the names do not state it."""
    format: Format
    stem: str
    files: tuple[str, ...]
    """Parts of a split model in order."""
    trouble: str = ""
    """Sentence on the part that the repository lacks."""


def canonical(quantization: str) -> str:
    """Return the form for comparison: upper case, underscores, F16 for the older FP16."""
    written = quantization.upper().replace("-", "_")
    if written in ("FP16", "FP32"):
        return written[:1] + written[2:]
    return written


def same_quantization(first: str, second: str) -> bool:
    """Return True if two spellings mean the same."""
    return canonical(first) == canonical(second)


def is_quantization(name: str) -> bool:
    """Return True for the name of a GGUF quantization."""
    return _GGUF.fullmatch(name.replace("-", "_").replace("UD_", "UD-", 1)) is not None


def quantization_of(path: str) -> str:
    """Return the quantization in a file's name, in upper case. Empty if the name has none."""
    matches = _GGUF.findall(PurePosixPath(path).stem)
    if matches:
        return str(matches[-1]).upper()
    return ""


def safetensors_quantization(repository: str) -> str:
    """Return the quantization in a safetensors repository's name. Empty for the makers' own weights."""
    match = _SAFETENSORS.search(repository)
    if match:
        return match[0].upper()
    return ""


def gguf_variants(paths: Iterable[str]) -> list[Variant]:
    """Return the models among these files, without image projectors, importance matrices and drafting heads."""
    groups: dict[str, dict[int, str]] = {}
    counts: dict[str, set[int]] = {}
    for path in sorted(paths):
        pure = PurePosixPath(path)
        if pure.suffix.lower() != ".gguf" or _ACCESSORY.search(path):
            continue
        part = PART_NUMBER.search(pure.stem)
        stem = str(pure.with_name(pure.stem[: part.start()] if part else pure.stem))
        number, count = (int(part["number"]), int(part["count"])) if part else (1, 1)
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
    """Return the variant of a quantization or file name. Without one, the default or the only one.

    Raises ModelMissing if none matches, UsageError if several match, ModelInvalid for an incomplete one.
    """
    if not variants:
        raise ModelMissing(
            f"{repository} has no GGUF model",
            hint="repositories with GGUF files mostly end in -GGUF",
        )
    matches = _matches(variants, quantization)
    matches = [variant for variant in matches if not variant.trouble] or matches
    if len(matches) == 1:
        return _complete(matches[0], variants)
    if matches:
        raise _ambiguous(matches, repository)
    offers = _listed([_label(variant) for variant in variants])
    if quantization is not None:
        raise ModelMissing(f"{repository} has no {quantization}", hint=f"it has {offers}")
    if len({variant.quantization for variant in variants}) == 1:
        raise _ambiguous(variants, repository)
    raise UsageError(
        f"{repository} holds {len(variants)} quantizations, and none is {DEFAULT_QUANTIZATION}",
        hint=f"name one after a colon, as hf.co/{repository}:QUANT; it has {offers}",
    )


def _matches(variants: list[Variant], quantization: str | None) -> list[Variant]:
    if quantization is None:
        default = [
            variant
            for variant in variants
            if same_quantization(variant.quantization, DEFAULT_QUANTIZATION)
        ]
        return default or (variants if len(variants) == 1 else [])
    file_name = quantization.lower().removesuffix(".gguf")
    return [
        variant
        for variant in variants
        if same_quantization(variant.quantization, quantization)
        or PurePosixPath(variant.stem).name.lower() == file_name
    ]


def _ambiguous(variants: list[Variant], repository: str) -> UsageError:
    names = [PurePosixPath(variant.stem).name for variant in variants]
    kind = variants[0].quantization or "the same kind"
    return UsageError(
        f"{repository} holds {len(variants)} files of {kind}",
        hint=f"name one of them after a colon: {_listed(names)}",
    )


def _label(variant: Variant) -> str:
    return variant.quantization or PurePosixPath(variant.stem).name


def _complete(choice: Variant, variants: list[Variant]) -> Variant:
    if not choice.trouble:
        return choice
    complete = [_label(variant) for variant in variants if not variant.trouble]
    others = "no other quantization is complete"
    if complete:
        others = f"choose another quantization ({_listed(complete)})"
    raise ModelInvalid(choice.trouble, hint=f"{others}, or another repository of the same model")


def _listed(names: list[str]) -> str:
    once = list(dict.fromkeys(names))
    return ", ".join(once[:_MAX_LISTED]) + (" …" if len(once) > _MAX_LISTED else "")
