"""Converts LoRA adapters in the format of PEFT to GGUF files in the cache."""

import hashlib
import math
import os
import re
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localchat.config.paths import file_state, find_paths
from localchat.errors import LocalchatError, ModelInvalid, ModelMissing, reason
from localchat.model_files.adapter import PEFT_CONFIG, PEFT_WEIGHTS
from localchat.model_files.checkpoint import read_object
from localchat.model_files.gguf import Header
from localchat_llamacpp.convert.names import name_map, reordered, reorders
from localchat_llamacpp.convert.tensor_files import (
    StoredTensor,
    expected_values,
    read_tensors,
)
from localchat_llamacpp.gguf_writer import ALIGNMENT, entry, head, tensor_to_write

_VERSION: Final = 2
"""Increases when the same folder converts to another file."""
_LORA: Final = re.compile(
    r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.weight)?$"
)
_COPY: Final = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+?)(?:\.base_layer)?\.weight$")
"""Name of one of the model's own weights, which some adapters contain."""
_HEADS: Final = {False: "attention.head_count", True: "attention.head_count_kv"}
"""Number of heads in a model's header, of queries and of keys."""
_EMBEDDING: Final = "token_embd.weight"
_OUTPUT: Final = "output.weight"
_PLAIN_STARTS: Final = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the weights of the model as they are."""
_MAX_PATTERNS: Final = 1000
_MAX_PATTERN: Final = 500
_OTHER_METHODS: Final = {
    "use_dora": "DoRA",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "lora_bias": "biases of LoRA matrices (lora_bias)",
    "modules_to_save": "whole modules (modules_to_save)",
    "trainable_token_indices": "trainable tokens (trainable_token_indices)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "target_parameters": "LoRA of bare parameters (target_parameters)",
    "layer_replication": "replicated layers (layer_replication)",
}
"""Fields of adapter_config.json whose effect an adapter in GGUF cannot have."""


class _Pair(NamedTuple):
    """Matrices of one module: A is (rank, inputs), B is (outputs, rank)."""

    name: str
    a: NDArray[np.float32]
    b: NDArray[np.float32]


def converted_adapter(folder: Path, model: Header) -> Path:
    """Convert the adapter of a folder for a model, unless the cache has it, and return the file.

    Raises ModelMissing, ModelInvalid, LocalchatError.
    """
    weights = folder / PEFT_WEIGHTS
    if not (folder / PEFT_CONFIG).is_file():
        raise ModelMissing(
            f"{folder} is not a LoRA adapter: it has no {PEFT_CONFIG}.",
            hint="Give the folder that PEFT saved, or an adapter in GGUF.",
            path=str(folder),
        )
    if not weights.is_file():
        raise ModelMissing(
            f"{folder} has no {PEFT_WEIGHTS}.",
            hint="Save the adapter as safetensors: save_pretrained does that by default.",
            path=str(folder),
        )
    target = find_paths(os.environ).cache_dir / "adapters" / f"{_key(folder, model)}.gguf"
    if target.is_file():
        return target
    with expected_values(folder):
        config = read_object(folder / PEFT_CONFIG)
        _check_config(folder, config)
        pairs = list(_pairs(folder, config, model))
        entries = [
            entry("general.architecture", model.architecture),
            entry("general.type", "adapter"),
            entry("general.name", folder.name),
            entry("adapter.type", "lora"),
            entry("adapter.lora.alpha", float(config["lora_alpha"])),
        ]
    matrices = [(f"{pair.name}.lora_a", pair.a) for pair in pairs]
    matrices += [(f"{pair.name}.lora_b", pair.b) for pair in pairs]
    try:
        _write(target, entries, matrices)
    except OSError as problem:
        # The home folder may be missing or read-only.
        try:
            target = _temporary_folder() / target.name
            _write(target, entries, matrices)
        except OSError:
            raise LocalchatError(f"{target} cannot be written: {reason(problem)}") from problem
    return target


def _temporary_folder() -> Path:
    """Return this user's own folder for temporary adapters. Raises OSError."""
    folder = Path(tempfile.gettempdir()) / f"localchat-adapters-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    # Another user may have made it first, to replace the files in it.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def _write(
    target: Path, entries: list[bytes], matrices: list[tuple[str, NDArray[np.float32]]]
) -> None:
    """Write a GGUF file, which is complete or missing. Raises OSError."""
    table = [tensor_to_write(name, matrix.shape[::-1], "F32") for name, matrix in matrices]
    partial = target.with_suffix(f".{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(head(entries, table))
            for _, matrix in matrices:
                file.write(np.ascontiguousarray(matrix).data)
                file.write(bytes(-file.tell() % ALIGNMENT))
        _remove_older(target)
        partial.replace(target)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


def _key(folder: Path, model: Header) -> str:
    """Return the name of a conversion: the folder, then everything that the content depends on."""
    origin = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=8).hexdigest()
    states = [file_state(folder / name) for name in (PEFT_CONFIG, PEFT_WEIGHTS)]
    shape = [model.architecture, *map(model.number, ("block_count", *_HEADS.values()))]
    content = hashlib.blake2b(repr((_VERSION, states, shape)).encode(), digest_size=8).hexdigest()
    return f"{origin}-{content}"


def _remove_older(target: Path) -> None:
    """Remove conversions of an earlier state of the same folder."""
    origin = target.name.partition("-")[0]
    for path in target.parent.glob(f"{origin}-*.gguf"):
        path.unlink(missing_ok=True)


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelInvalid for an adapter that is not a plain LoRA."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise _unsupported(folder, f"its peft_type is {kind}; only LORA is supported")
    for key, what in _OTHER_METHODS.items():
        if config.get(key):
            raise _unsupported(folder, f"it uses {what}")
    if config.get("bias", "none") != "none":
        raise _unsupported(folder, f"it trains biases (bias: {config['bias']})")
    start = config.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise _unsupported(
            folder,
            f"it starts from changed weights of the model (init_lora_weights: {start}); PEFT saves it as a "
            "plain LoRA with save_pretrained(…, path_initial_model_for_weight_conversion=…)",
        )
    alphas = [config.get("lora_alpha"), *_patterns(folder, config).values()]
    for alpha in alphas:
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise _unsupported(folder, f"its lora_alpha is {alpha}")
    if not config["lora_alpha"]:
        raise _unsupported(folder, "its lora_alpha is 0")


def _patterns(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the alphas of some modules by regular expression. Raises ModelInvalid for one that may be slow."""
    patterns: Mapping[str, Any] = config.get("alpha_pattern") or {}
    if len(patterns) > _MAX_PATTERNS:
        raise _unsupported(folder, f"its alpha_pattern has {len(patterns):,} patterns")
    for pattern in patterns:
        # Each repetition may multiply the time of a search.
        if len(pattern) > _MAX_PATTERN or re.search(r"[*+{]", pattern.replace(".*", "", 2)):
            raise _unsupported(folder, f"its alpha_pattern has the pattern {pattern[:80]!a}")
    return patterns


def _pairs(folder: Path, config: Mapping[str, Any], model: Header) -> Iterator[_Pair]:
    """Yield the matrices of each module under llama.cpp's names. Raises ModelInvalid."""
    mapped = name_map(model.architecture, model.number("block_count"), folder.name)
    modules: dict[str, dict[str, StoredTensor]] = {}
    copies: dict[str, StoredTensor] = {}
    for name, tensor in read_tensors([folder / PEFT_WEIGHTS]).items():
        match = _LORA.match(name)
        if len(tensor.shape) != 2 or (match is None and not _COPY.match(name)):
            raise _unsupported(folder, f"its tensor {name} is not a matrix of a LoRA")
        if match is None:
            copies[name] = tensor
        else:
            modules.setdefault(match["module"], {})[match["side"]] = tensor
    changed = {mapped(f"{module}.weight") for module in modules}
    for name, tensor in copies.items():
        _check_copy(
            folder, name, mapped(_COPY.sub(r"\g<module>.weight", name)), tensor, changed, model
        )
    for module, sides in modules.items():
        target = mapped(f"{module}.weight")
        if target is None:
            layers = model.number("block_count")
            raise _unsupported(
                folder,
                f"it changes {module}, which is not a part of this model ({model.architecture}, {layers} "
                "layers) that llama.cpp has a name for",
            )
        if len(sides) != 2 or sides["A"].shape[0] != sides["B"].shape[1]:
            raise _unsupported(folder, f"its matrices of {module} do not belong together")
        a = sides["A"].floats()
        b = sides["B"].floats()
        rank = len(a)
        # llama.cpp scales by alpha / rank, with the same alpha for all modules. B contains the rest.
        b *= _scale(config, module, rank) * rank / float(config["lora_alpha"])
        if reorders(target, model.architecture):
            heads = model.number(_HEADS[".attn_k." in target]) or model.number(_HEADS[False])
            if not heads or len(b) % (2 * heads):
                raise _unsupported(folder, f"its {module} does not have the heads of the model")
            b = reordered(b, heads).astype(np.float32, copy=False)
        if target == _EMBEDDING:
            a = np.ascontiguousarray(a.T)
        yield _Pair(target, a, b)


def _check_copy(
    folder: Path,
    name: str,
    target: str | None,
    tensor: StoredTensor,
    changed: Collection[str | None],
    model: Header,
) -> None:
    """Raise ModelInvalid unless a tensor is an unchanged weight of the model.

    PEFT saves embedding and output with an adapter that changes one of them. Without such an adapter, they are
    saved because they were trained or have new tokens. changed: llama.cpp's names of what the adapter changes.
    """
    ends = (_EMBEDDING, _OUTPUT)
    if target not in ends or not any(end in changed for end in ends):
        raise _unsupported(folder, f"its tensor {name} is not a matrix of a LoRA")
    shapes = {item.name: item.shape[::-1] for item in model.tensors}
    expected = shapes.get(target, shapes.get(_EMBEDDING))
    if tensor.shape != expected:
        raise _unsupported(
            folder, f"its {name} has the shape {tensor.shape}, and the model's has {expected}"
        )


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of B A in a module, as PEFT computes it."""
    alpha = float(config["lora_alpha"])
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = float(value)
            break
    if config.get("use_rslora"):
        return alpha / math.sqrt(rank)
    return alpha / rank


def _unsupported(folder: Path, cause: str) -> ModelInvalid:
    return ModelInvalid(
        f"The adapter {folder} cannot be converted: {cause}.",
        hint="If the adapter was trained on this model, merge it with PEFT (merge_and_unload), and convert the "
        "result with localchat quantize.",
        path=str(folder),
    )
