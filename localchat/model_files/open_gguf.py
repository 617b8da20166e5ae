"""Opens a GGUF model: finds all parts, checks the header, and explains every rejection.

`read_header` is the entry point. It returns a `Header` (gguf.py).
"""

import codecs
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from localchat.errors import ModelInvalid, ModelMissing
from localchat.model_files.byte_source import ByteSource, FileSource, file_errors
from localchat.model_files.gguf import Array, GgufTensor, Header, brief, read_gguf
from localchat.suggestions import closest

__all__ = ["Header", "check_model", "join_parts", "read_header", "read_source"]

MAX_LAYERS = 512
"""llama.cpp aborts the process at 0 layers and above this number."""
MAX_CONTEXT_TOKENS = 1 << 24
MAX_WIDTH = 1 << 20
MAX_PARTS = 1024

_PART = re.compile(
    r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE | re.DOTALL
)
_AGAIN = "The download may be cut off or damaged: download it again."

_FOREIGN: tuple[tuple[Callable[[bytes], bool], str, str], ...] = (
    (
        lambda head: head[:4] in (b"FUGG", b"GGUF"[::-1]),
        "a big-endian GGUF",
        "Download the little-endian file.",
    ),
    (
        lambda head: head[:4] in (b"lmgg", b"ggml", b"fmgg", b"tjgg", b"algg"),
        "a model file from before GGUF (GGML)",
        "Download a current conversion of the model: a file named .gguf.",
    ),
    (
        lambda head: head.startswith(b"version https://git-lfs"),
        "a Git LFS pointer, not the model itself",
        "Fetch the real file: `git lfs pull`, or download it again.",
    ),
    (
        lambda head: head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32,
        "a safetensors file",
        "llama.cpp runs GGUF files: take a GGUF of the same model.",
    ),
    (
        lambda head: head[:4] == b"PK\x03\x04",
        "a zip archive or a PyTorch checkpoint",
        "Download a GGUF of the model.",
    ),
    (
        lambda head: head.lstrip()[:1] == b"<",
        "an HTML page, as a failed download leaves one",
        "Download the model again; a gated one needs HF_TOKEN.",
    ),
    (lambda head: _looks_like_text(head), "a text file", "Give the path of a .gguf file."),
)


def _looks_like_text(head: bytes) -> bool:
    try:
        # The first bytes may end inside a character.
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return all(letter.isprintable() or letter.isspace() for letter in text)


def read_header(path: str | Path, strings: Collection[str] = ()) -> Header:
    """Return the checked header of a model. Any part of a split model selects all parts.

    strings: keys whose string arrays are loaded. Raises ModelMissing for a missing file, ModelInvalid for an
    unusable model.
    """
    first = Path(path)
    if part := _PART.match(first.name):
        return _read_split(first, part, strings)
    header = replace(_read_file(first, strings), parts=(first,))
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise ModelInvalid(
            f"{first} is one part of a split model, but its name does not say which.",
            hint="Give the parts their names back: NAME-00001-of-00002.gguf and so on.",
            path=str(first),
        )
    check_model(header)
    return header


def _read_file(path: Path, strings: Collection[str]) -> Header:
    with file_errors(path):
        if path.is_dir():
            raise _folder(path)
        if not path.exists():
            raise _missing(path)
        with FileSource(path) as source:
            return read_source(source, strings)


def read_source(source: ByteSource, strings: Collection[str] = ()) -> Header:
    """Return the header of a source without checking the model (see check_model). Raises ModelInvalid."""
    head = source.read(0, 512)
    if not head:
        raise ModelInvalid(f"{source.name} is empty.", hint=_AGAIN, path=source.name)
    for matches, kind, hint in _FOREIGN:
        if not head.startswith(b"GGUF") and matches(head):
            raise ModelInvalid(f"{source.name} is {kind}.", hint=hint, path=source.name)
    return read_gguf(source, strings)


def _missing(path: Path) -> ModelMissing:
    hint = "Check the path, or see what is here with `localchat list`."
    if path.parent.is_dir():
        names = [file.name for file in path.parent.glob("*.gguf")]
        if near := closest(path.name, names):
            hint = f"Did you mean {path.parent / near[0]}?"
    return ModelMissing(f"There is no file {path}.", hint=hint, path=str(path))


def _folder(path: Path) -> ModelInvalid:
    files = sorted(file for file in path.glob("*.gguf") if file.is_file())
    firsts = [
        file for file in files if not (part := _PART.match(file.name)) or int(part["number"]) == 1
    ]
    if len(firsts) == 1:
        hint = f"It holds one model: give {firsts[0]}"
    elif firsts:
        names = ", ".join(file.name for file in firsts[:5])
        hint = f"It holds {len(firsts)} models: give the path of one of {names}"
    else:
        hint = "It holds no .gguf file."
    return ModelInvalid(f"{path} is a folder.", hint=hint, path=str(path))


def _read_split(path: Path, part: re.Match[str], strings: Collection[str]) -> Header:
    count = int(part["count"])
    if not 1 <= int(part["number"]) <= count <= MAX_PARTS:
        raise ModelInvalid(
            f"{path.name} is named as part {int(part['number'])} of {count}.", path=str(path)
        )
    suffix = path.name[-5:]
    paths = [
        path.with_name(f"{part['stem']}-{number:05}-of-{count:05}{suffix}")
        for number in range(1, count + 1)
    ]
    if missing := [path.name for path in paths if not path.exists()]:
        raise ModelMissing(
            f"{path.name}: {len(missing)} of the {count} parts of this model are missing: "
            f"{', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}.",
            hint=f"Download them into {path.parent}.",
            path=str(path),
        )
    headers = [_read_file(paths[0], strings)]
    headers += [_read_file(path, ()) for path in paths[1:]]
    return replace(join_parts(headers, path.name), parts=tuple(paths))


def join_parts(headers: Sequence[Header], name: str) -> Header:
    """Join the headers of all parts of a split model, in order, and check it. Raises ModelInvalid."""
    count = len(headers)
    for number, header in enumerate(headers):
        _check_part(header, number, count)
    tensors = tuple(
        tensor._replace(part=number)
        for number, header in enumerate(headers)
        for tensor in header.tensors
    )
    _check_whole(headers[0], tensors, name)
    joined = replace(
        headers[0],
        tensors=tensors,
        file_bytes=sum(header.file_bytes for header in headers),
    )
    check_model(joined)
    return joined


def _check_part(header: Header, number: int, count: int) -> None:
    stated = header.metadata.get("split.count"), header.metadata.get("split.no")
    # llama.cpp writes both into every part. A complete file with the name of an only part has neither.
    if stated != (count, number) and not (count == 1 and stated == (None, None)):
        raise ModelInvalid(
            f"{header.name} is named as part {number + 1} of {count}, but its header says: "
            f"{brief(f'split.count {stated[0]}, split.no {stated[1]}')}.",
            hint="The parts may be of different models, or renamed: download them again.",
            path=header.name,
        )


def _check_whole(first: Header, tensors: tuple[GgufTensor, ...], name: str) -> None:
    names = {tensor.name for tensor in tensors}
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if len(names) != len(tensors) or expected != len(tensors):
        raise ModelInvalid(
            f"{name}: the parts hold {len(names)} different tensors; {expected} are expected.",
            hint="The parts may be of different models: download them again.",
            path=name,
        )


_SIZES = ("block_count", "context_length", "embedding_length")


def check_model(header: Header) -> None:
    """Raise ModelInvalid unless this is a language model with safe numbers.

    Native code trusts these numbers.
    """
    name = header.architecture
    if not name:
        raise _unusable(header, "it names no architecture (general.architecture)")
    kind = header.metadata.get("general.type", "model")
    if name == "clip" or kind in ("mmproj", "adapter", "imatrix"):
        noun = "a vision projector" if name == "clip" or kind == "mmproj" else f"an {kind}"
        hint = "Give the path of the model itself."
        if kind == "adapter":
            hint = "Give the path of the model itself, and this one with --lora."
        raise _unusable(header, f"it is {noun}, a part that goes with a model", hint)
    if not header.tensors:
        raise _unusable(
            header, "it holds a vocabulary and no weights", "Give the path of the whole model."
        )
    if not any(f"{name}.{key}" in header.metadata for key in _SIZES):
        raise _unusable(
            header,
            f"its architecture is {name}, and it has none of the numbers of a language model; models for "
            "images or speech look like that",
            "Give the path of a model that writes text.",
        )
    layers = _within(header, "block_count", 1, MAX_LAYERS)
    _within(header, "context_length", 1, MAX_CONTEXT_TOKENS)
    _within(header, "embedding_length", 1, MAX_WIDTH)
    for key, limit in (("nextn_predict_layers", layers), ("expert_count", 1 << 16)):
        if f"{name}.{key}" in header.metadata:
            _within(header, key, 0, limit)
    _check_experts(header, layers)
    _check_heads(header, layers)


def _check_experts(header: Header, layers: int) -> None:
    used = max(header.numbers("expert_used_count", layers))
    if used > header.number("expert_count"):
        raise _unusable(header, f"it uses {used} experts of {header.number('expert_count')}")


def _check_heads(header: Header, layers: int) -> None:
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        array = header.metadata.get(f"{header.architecture}.{key}")
        if isinstance(array, Array) and (array.values is None or array.length < layers):
            raise _unusable(header, f"{key} has {array.length} values for {layers} layers")
        low = min(header.numbers(key, layers))
        high = max(header.numbers(key, layers))
        if low < 0:
            raise _unusable(header, f"{key} is {low:,}")
        if high > MAX_WIDTH:
            raise _unusable(header, f"{key} is {high:,}")


def _within(header: Header, key: str, low: int, high: int) -> int:
    value = header.metadata.get(f"{header.architecture}.{key}")
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        stated = "is missing" if value is None else f"is {value!r}"
        raise _unusable(
            header, f"{header.architecture}.{key} {stated}; it must be {low:,} to {high:,}"
        )
    return value


def _unusable(header: Header, cause: str, hint: str = _AGAIN) -> ModelInvalid:
    cause = brief(cause)
    return ModelInvalid(
        f"{header.name} is not a usable model: {cause}.", hint=hint, path=header.name, reason=cause
    )
