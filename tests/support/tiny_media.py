"""Models with random weights that see pictures or hear sound: a language model and its projector (mmproj).

Each tiny file takes well under a megabyte, and llama.cpp runs it like the real one. The families cover what
differs: pictures in several tiles (`smolvlm`), positions of several dimensions (`qwen2vl`), tokens that attend
to each other (`gemma3`), and sound (`ultravox`). `SMALL` has the size of a small real model, for measurements.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from tests.support.gguf_files import (
    F16,
    F32,
    SPECIALS,
    Gguf,
    Size,
    Tensor,
    Typed,
    Value,
    gemma3,
    llama,
    qwen2,
)

_UINT32: Final = 4
_ARRAY_INT32: Final = 5
_AUDIO_POSITIONS: Final = 1500
_MARKERS: Final = (
    *("<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>"),
    *("<start_of_image>", "<end_of_image>", "<|vision_start|>", "<|vision_end|>"),
)


class EncoderSize(NamedTuple):
    """Dimensions of a projector's encoder."""

    width: int = 48
    layers: int = 2
    heads: int = 3
    image: int = 64
    """Pixels of the side of a tile."""
    patch: int = 8
    """Pixels of the side of a patch."""


class MediaSize(NamedTuple):
    """Dimensions of a model and its projector."""

    text: Size
    encoder: EncoderSize


TINY: Final = MediaSize(
    Size(layers=2, width=64, context=2048, vocab=384, feed_forward=128), EncoderSize()
)
SMALL: Final = MediaSize(
    Size(layers=18, width=1024, heads=16, kv_heads=4, context=8192, vocab=384, feed_forward=2816),
    EncoderSize(width=768, layers=12, heads=12, image=256, patch=16),
)
"""200 million parameters, and 85 million in the encoder. A step on a CPU takes far longer than its overhead."""


class TinyMedia(NamedTuple):
    """Paths of a model and its projector."""

    model: Path
    projector: Path


def write_media_model(
    folder: Path, family: str, *, seed: int = 1, size: MediaSize = TINY
) -> TinyMedia:
    """Write a model and its projector. family: `smolvlm`, `qwen2vl`, `gemma3` or `ultravox`."""
    text, projector = FAMILIES[family](size)
    folder.mkdir(parents=True, exist_ok=True)
    model = with_markers(_untied(text)).write(folder / f"tiny-{family}-F16.gguf", seed, _drawn)
    encoder = projector.write(folder / f"mmproj-tiny-{family}-F16.gguf", seed + 1, _drawn)
    return TinyMedia(model, encoder)


def _untied(text: Gguf) -> Gguf:
    """Return a model with an output of its own. With that of its embedding, it repeats its last token."""
    embedding = next(tensor for tensor in text.tensors if tensor.name == "token_embd.weight")
    names = {tensor.name for tensor in text.tensors}
    if "output.weight" in names:
        return text
    return replace(text, tensors=[*text.tensors, embedding._replace(name="output.weight")])


def with_markers(text: Gguf) -> Gguf:
    """Return a model whose vocabulary has the markers around pictures as control tokens."""
    metadata = dict(text.metadata)
    names = list(metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    kinds = list(metadata["tokenizer.ggml.token_type"])  # type: ignore[arg-type]
    fillers = [index for index, name in enumerate(names) if str(name).startswith("<fill")]
    for index, marker in zip(fillers, _MARKERS, strict=False):
        names[index] = marker
        kinds[index] = 3
    # SmolVLM looks up the token of two line breaks.
    names[fillers[len(_MARKERS)]] = "\u010a\u010a"
    kinds[fillers[len(_MARKERS)]] = 1
    metadata["tokenizer.ggml.tokens"] = names  # type: ignore[assignment]
    metadata["tokenizer.ggml.token_type"] = kinds  # type: ignore[assignment]
    return replace(text, metadata=metadata)


def _drawn(tensor: Tensor, draw: np.random.Generator) -> bytes:
    """Draw weights with which the answer depends on the picture, and no two tokens are nearly equal."""
    shape = tensor.shape[::-1]
    name = tensor.name
    if name.endswith("norm.weight") or (".ln" in name and name.endswith("weight")):
        values = draw.normal(1.0, 0.1, shape)
    elif name in ("token_embd.weight", "output.weight"):
        values = draw.normal(0.0, 0.5, shape)
        # Answers consist of printable ASCII, because a piece of a letter would be no text.
        for rows in (slice(0, 32), slice(127, 256), slice(-len(SPECIALS), None)):
            values[rows] /= 100
    else:
        gain = 3.0 if "attn_output" in name or "ffn_down" in name else 1.0
        values = draw.normal(0.0, gain / np.sqrt(tensor.shape[0]), shape)
    return values.astype(np.float16 if tensor.code == F16 else np.float32).tobytes()


def _encoder(prefix: str, size: EncoderSize, *, key_bias: bool = True) -> list[Tensor]:
    """Return the transformer of an encoder. prefix: `v` or `a`."""
    width = size.width
    tensors = [
        Tensor(f"{prefix}.post_ln.weight", (width,)),
        Tensor(f"{prefix}.post_ln.bias", (width,)),
    ]
    for number in range(size.layers):
        begin = f"{prefix}.blk.{number}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            tensors.append(Tensor(f"{begin}{name}.weight", (width, width), F16))
            if key_bias or name != "attn_k":
                tensors.append(Tensor(f"{begin}{name}.bias", (width,)))
        for name in ("ln1", "ln2"):
            tensors += [
                Tensor(f"{begin}{name}.{part}", (width,), F32) for part in ("weight", "bias")
            ]
        tensors += [
            Tensor(f"{begin}ffn_up.weight", (width, 2 * width), F16),
            Tensor(f"{begin}ffn_up.bias", (2 * width,)),
            Tensor(f"{begin}ffn_down.weight", (2 * width, width), F16),
            Tensor(f"{begin}ffn_down.bias", (width,)),
        ]
    return tensors


def _clip(encoder: str, kind: str, size: MediaSize, extra: Mapping[str, Value]) -> dict[str, Value]:
    """Return the metadata of a projector. encoder: `vision` or `audio`."""
    begin = f"clip.{encoder}."
    numbers = {
        "embedding_length": size.encoder.width,
        "feed_forward_length": 2 * size.encoder.width,
        "block_count": size.encoder.layers,
        "attention.head_count": size.encoder.heads,
        "projection_dim": size.text.width,
    }
    return {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.name": f"tiny {kind}",
        f"clip.has_{encoder}_encoder": True,
        "clip.projector_type": kind,
        "clip.use_gelu": True,
        f"{begin}attention.layer_norm_epsilon": 1e-6,
        **{begin + name: Typed(_UINT32, number) for name, number in numbers.items()},
        **{begin + name: value for name, value in extra.items()},
    }


def _pixels(size: EncoderSize) -> dict[str, Value]:
    return {
        "image_size": Typed(_UINT32, size.image),
        "patch_size": Typed(_UINT32, size.patch),
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _patches(size: EncoderSize) -> list[Tensor]:
    count = (size.image // size.patch) ** 2
    return [
        Tensor("v.patch_embd.weight", (size.patch, size.patch, 3, size.width), F16),
        Tensor("v.patch_embd.bias", (size.width,)),
        Tensor("v.position_embd.weight", (size.width, count), F32),
    ]


def _smolvlm(size: MediaSize) -> tuple[Gguf, Gguf]:
    encoder = size.encoder
    extra = _pixels(encoder) | {
        "projector.scale_factor": Typed(_UINT32, 2),
        "preproc_image_size": Typed(_UINT32, 2 * encoder.image),
    }
    tensors = [
        *_patches(encoder),
        *_encoder("v", encoder),
        Tensor("mm.model.fc.weight", (4 * encoder.width, size.text.width), F16),
    ]
    return llama(size.text), Gguf(_clip("vision", "idefics3", size, extra), tensors)


def _qwen2vl(size: MediaSize) -> tuple[Gguf, Gguf]:
    text = qwen2(size.text)
    metadata = {
        key.replace("qwen2.", "qwen2vl."): value
        for key, value in text.metadata.items()
        if key != "general.architecture"
    }
    head = size.text.head
    metadata |= {
        "general.architecture": "qwen2vl",
        "qwen2vl.rope.dimension_sections": [head // 8, head * 3 // 16, head * 3 // 16, 0],
    }
    encoder = size.encoder
    width = encoder.width
    patch = (encoder.patch, encoder.patch, 3, width)
    tensors = [
        *(Tensor(f"v.patch_embd.weight{end}", patch, F16) for end in ("", ".1")),
        *_encoder("v", encoder),
        Tensor("mm.0.weight", (4 * width, 4 * width), F16),
        Tensor("mm.0.bias", (4 * width,)),
        Tensor("mm.2.weight", (4 * width, size.text.width), F16),
        Tensor("mm.2.bias", (size.text.width,)),
    ]
    clip = _clip("vision", "qwen2vl_merger", size, _pixels(encoder))
    return replace(text, metadata=metadata), Gguf(clip, tensors)


def _gemma3(size: MediaSize) -> tuple[Gguf, Gguf]:
    encoder = size.encoder
    tensors = [
        *_patches(encoder),
        *_encoder("v", encoder),
        Tensor("mm.input_projection.weight", (size.text.width, encoder.width), F16),
        Tensor("mm.soft_emb_norm.weight", (encoder.width,)),
    ]
    extra = _pixels(encoder) | {"projector.scale_factor": Typed(_UINT32, 2)}
    text = gemma3(replace(size.text, layers=max(6, size.text.layers)))
    return text, Gguf(_clip("vision", "gemma3", size, extra), tensors)


def _ultravox(size: MediaSize) -> tuple[Gguf, Gguf]:
    stack = 4
    width = size.encoder.width
    text_width = size.text.width
    tensors = [
        *_encoder("a", size.encoder, key_bias=False),
        Tensor("a.position_embd.weight", (width, _AUDIO_POSITIONS), F32),
        Tensor("a.conv1d.1.weight", (3, 80, width), F16),
        Tensor("a.conv1d.1.bias", (1, width)),
        Tensor("a.conv1d.2.weight", (3, width, width), F16),
        Tensor("a.conv1d.2.bias", (1, width)),
        Tensor("mm.a.mlp.1.weight", (stack * width, 2 * text_width), F16),
        Tensor("mm.a.mlp.2.weight", (text_width, text_width), F16),
        Tensor("mm.a.norm_pre.weight", (stack * width,)),
        Tensor("mm.a.norm_mid.weight", (text_width,)),
    ]
    extra: dict[str, Value] = {
        "num_mel_bins": Typed(_UINT32, 80),
        "projector.stack_factor": Typed(_UINT32, stack),
    }
    return llama(size.text), Gguf(_clip("audio", "ultravox", size, extra), tensors)


FAMILIES: Final = {
    "smolvlm": _smolvlm,
    "qwen2vl": _qwen2vl,
    "gemma3": _gemma3,
    "ultravox": _ultravox,
}
