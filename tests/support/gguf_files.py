"""Small valid GGUF files of several architectures, written byte by byte, and ways to mutilate them.

`write_model(path, "llama")` writes a file that llama.cpp loads and runs: random weights, a byte-level
vocabulary, a ChatML template. `Gguf` is the raw form, for headers of any shape; `sparse` writes a model of
any size that takes no disk.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from localchat.model_files.ggml_types import NUMBER_FORMATS

Scalar: TypeAlias = "int | float | bool | str"
Value: TypeAlias = "Scalar | list[int] | list[float] | list[str] | list[bool] | Typed | bytes"

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_FORMS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
F32, F16, Q4_0, Q8_0, Q4_K, Q6_K = 0, 1, 2, 8, 12, 14


class Typed(NamedTuple):
    """A metadata value with its type number said."""

    kind: int
    value: Scalar


class Tensor(NamedTuple):
    """`shape`: fastest dimension first. `code`: ggml's number of the format. `offset` None: its place."""

    name: str
    shape: tuple[int, ...]
    code: int = F32
    offset: int | None = None

    @property
    def size_bytes(self) -> int:
        known = NUMBER_FORMATS.get(self.code)
        block, block_bytes = (known.block, known.block_bytes) if known else (1, 1)
        return int(np.prod(self.shape, dtype=object)) // block * block_bytes


@dataclass(frozen=True)
class Gguf:
    """A file to be. The counts lie where they are given."""

    metadata: Mapping[str, Value]
    tensors: Sequence[Tensor] = ()
    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32
    tensor_count: int | None = None
    key_count: int | None = None

    def header(self) -> bytes:
        """Everything before the data, padded to the alignment."""
        tensor_count = len(self.tensors) if self.tensor_count is None else self.tensor_count
        key_count = len(self.metadata) if self.key_count is None else self.key_count
        parts = [self.magic, struct.pack("<IQQ", self.version, tensor_count, key_count)]
        for key, value in self.metadata.items():
            parts += [_text(key), _value(value)]
        place = 0
        for tensor in self.tensors:
            offset = place if tensor.offset is None else tensor.offset
            parts.append(_text(tensor.name) + struct.pack("<I", len(tensor.shape)))
            parts.append(struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape))
            parts.append(struct.pack("<IQ", tensor.code, offset))
            place += self._padded(tensor.size_bytes)
        header = b"".join(parts)
        return header + bytes(self._padded(len(header)) - len(header))

    def data_bytes(self) -> int:
        """Bytes of the padded tensors."""
        return sum(self._padded(tensor.size_bytes) for tensor in self.tensors)

    def encode(self) -> bytes:
        """The whole file, weights zero."""
        return self.header() + bytes(self.data_bytes())

    def write(
        self, path: Path, seed: int | None = None, drawn: "Draw | None" = None
    ) -> Path:  # fmt: skip
        """The whole file; `seed` draws small weights (F32 and F16 alone), or has `drawn` do so, otherwise they
        are zero."""
        with path.open("wb") as file:
            file.write(self.header())
            draw = np.random.default_rng(seed)
            for tensor in self.tensors:
                make = drawn or _weights
                body = make(tensor, draw) if seed is not None else bytes(tensor.size_bytes)
                file.write(body + bytes(self._padded(len(body)) - len(body)))
        return path

    def sparse(self, path: Path) -> Path:
        """The whole length with a hole for the weights: a model of any size."""
        header = self.header()
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + self.data_bytes())
        return path

    def _padded(self, count: int) -> int:
        return -(-count // self.alignment) * self.alignment


Draw: TypeAlias = Callable[[Tensor, np.random.Generator], bytes]
"""Bytes of a tensor."""


def _text(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _kind(value: Scalar) -> int:
    if isinstance(value, bool):
        return 7
    if isinstance(value, int):
        return 4 if 0 <= value < 1 << 32 else 11
    return 6 if isinstance(value, float) else 8


def _bare(kind: int, value: Scalar) -> bytes:
    return _text(str(value)) if kind == 8 else struct.pack(_FORMS[kind], value)


def _value(value: Value) -> bytes:
    if isinstance(value, bytes):  # type number and all, as given
        return value
    if isinstance(value, Typed):
        return struct.pack("<I", value.kind) + _bare(value.kind, value.value)
    if isinstance(value, list):
        first = value[0] if value else 0
        kind = 5 if isinstance(first, int) and not isinstance(first, bool) else _kind(first)
        body = b"".join(_bare(kind, one) for one in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + body
    kind = _kind(value)
    return struct.pack("<I", kind) + _bare(kind, value)


def _weights(tensor: Tensor, draw: np.random.Generator) -> bytes:
    if tensor.name.endswith("norm.weight"):
        numbers = np.ones(tensor.shape[::-1], np.float32)
    elif tensor.name.endswith(("ssm_a", "ssm_d")):
        numbers = np.full(tensor.shape[::-1], -1.0, np.float32)
    else:
        numbers = draw.normal(0, 0.06, tensor.shape[::-1]).astype(np.float32)
    if tensor.code == F16:
        return numbers.astype(np.float16).tobytes()
    if tensor.code == F32:
        return numbers.tobytes()
    raise ValueError(f"weights of format {tensor.code} are not drawn here: use sparse")


# ---------------------------------------------------------------------------- vocabulary


def byte_alphabet() -> list[str]:
    """GPT-2's printable letters for the 256 bytes, in byte order (Radford et al. 2019)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte if byte in plain else next(rest)) for byte in range(256)]


SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tokenizer(size: int = 320) -> dict[str, Value]:
    """A byte-level vocabulary: 256 bytes, pairs, three control tokens at the end."""
    letters = byte_alphabet()
    pairs = [(first, second) for first in "etaoinsrh" for second in "etaoinsrhl "]
    pairs = [(first, letters[ord(second)]) for first, second in pairs][: size - 256 - len(SPECIALS)]
    plain = letters + [first + second for first, second in pairs]
    filler = [f"<fill{number}>" for number in range(size - len(plain) - len(SPECIALS))]
    names = [*plain, *filler, *SPECIALS]
    kinds = [1] * len(plain) + [5] * len(filler) + [3] * len(SPECIALS)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [f"{first} {second}" for first, second in pairs],
        "tokenizer.ggml.bos_token_id": size - 3,
        "tokenizer.ggml.eos_token_id": size - 1,
        "tokenizer.chat_template": CHATML,
    }


# ---------------------------------------------------------------------------- architectures


@dataclass(frozen=True)
class Size:
    """Dimensions of a model. `code`: format of the matrices; vectors are F32."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 0
    feed_forward: int = 128
    vocab: int = 320
    context: int = 512
    code: int = F16
    window: int = 64
    extra: Mapping[str, Value] = field(default_factory=dict)

    @property
    def head(self) -> int:
        return self.head_width or self.width // self.heads


def _common(name: str, size: Size) -> dict[str, Value]:
    return {
        "general.architecture": name,
        "general.name": f"tiny {name}",
        "general.file_type": 1,
        f"{name}.block_count": size.layers,
        f"{name}.context_length": size.context,
        f"{name}.embedding_length": size.width,
        f"{name}.feed_forward_length": size.feed_forward,
        f"{name}.attention.layer_norm_rms_epsilon": 1e-6,
        **tokenizer(size.vocab),
    }


def _attention(name: str, size: Size) -> dict[str, Value]:
    return {
        f"{name}.attention.head_count": size.heads,
        f"{name}.attention.head_count_kv": size.kv_heads,
        f"{name}.attention.key_length": size.head,
        f"{name}.attention.value_length": size.head,
        f"{name}.rope.dimension_count": size.head,
    }


def _block(size: Size, number: int, norms: Sequence[str] = ()) -> list[Tensor]:
    at, q, kv = f"blk.{number}.", size.heads * size.head, size.kv_heads * size.head
    matrices = {
        "attn_q": (size.width, q),
        "attn_k": (size.width, kv),
        "attn_v": (size.width, kv),
        "attn_output": (q, size.width),
        "ffn_gate": (size.width, size.feed_forward),
        "ffn_up": (size.width, size.feed_forward),
        "ffn_down": (size.feed_forward, size.width),
    }
    vectors = {"attn_norm": size.width, "ffn_norm": size.width} | dict.fromkeys(norms, size.width)
    return [Tensor(f"{at}{name}.weight", shape, size.code) for name, shape in matrices.items()] + [
        Tensor(f"{at}{name}.weight", (width,)) for name, width in vectors.items()
    ]


def _ends(size: Size, *, tied: bool = False) -> list[Tensor]:
    ends = [
        Tensor("token_embd.weight", (size.width, size.vocab), size.code),
        Tensor("output_norm.weight", (size.width,)),
    ]
    return ends if tied else [*ends, Tensor("output.weight", (size.width, size.vocab), size.code)]


def llama(size: Size) -> Gguf:
    """Plain attention, untied output."""
    blocks = [tensor for number in range(size.layers) for tensor in _block(size, number)]
    metadata = _common("llama", size) | _attention("llama", size) | {"llama.vocab_size": size.vocab}
    return Gguf(metadata | dict(size.extra), _ends(size) + blocks)


def qwen2(size: Size) -> Gguf:
    """Plain attention with biases, tied output."""
    tensors = _ends(size, tied=True)
    for number in range(size.layers):
        tensors += _block(size, number)
        widths = (size.heads * size.head, size.kv_heads * size.head, size.kv_heads * size.head)
        tensors += [
            Tensor(f"blk.{number}.attn_{name}.bias", (width,))
            for name, width in zip("qkv", widths, strict=True)
        ]
    metadata = _common("qwen2", size) | _attention("qwen2", size)
    return Gguf(metadata | dict(size.extra), tensors)


def _head_norms(size: Size, number: int) -> list[Tensor]:
    return [Tensor(f"blk.{number}.attn_{name}_norm.weight", (size.head,)) for name in ("q", "k")]


def qwen3(size: Size) -> Gguf:
    """Norms of heads, tied output."""
    tensors = _ends(size, tied=True)
    for number in range(size.layers):
        tensors += [*_block(size, number), *_head_norms(size, number)]
    metadata = _common("qwen3", size) | _attention("qwen3", size)
    return Gguf(metadata | dict(size.extra), tensors)


def granite(size: Size) -> Gguf:
    """A llama with factors."""
    plain = llama(size)
    scales = {
        "embedding_scale": 6.0,
        "residual_scale": 0.4,
        "attention.scale": 0.02,
        "logit_scale": 0.8,
    }
    names = {key.replace("llama.", "granite."): value for key, value in plain.metadata.items()}
    named = {f"granite.{key}": value for key, value in scales.items()}
    return Gguf(names | named | {"general.architecture": "granite"}, plain.tensors)


def smollm3(size: Size) -> Gguf:
    """A llama of which every fourth layer has no rotations, tied output."""
    tensors = _ends(size, tied=True)
    for number in range(size.layers):
        tensors += _block(size, number)
    metadata = _common("smollm3", size) | _attention("smollm3", size)
    return Gguf(metadata | dict(size.extra), tensors)


def seed_oss(size: Size) -> Gguf:
    """A qwen2 with an untied output and another name of a norm."""
    plain = qwen2(size)
    tensors = [
        one._replace(name=one.name.replace(".ffn_norm.", ".post_attention_norm."))
        for one in plain.tensors
    ]
    output = Tensor("output.weight", (size.width, size.vocab), size.code)
    names = {key.replace("qwen2.", "seed_oss."): value for key, value in plain.metadata.items()}
    return Gguf(names | {"general.architecture": "seed_oss"}, [*tensors, output])


def phi3(size: Size) -> Gguf:
    """Merged projections; a part of each head is rotated."""
    tensors, left = _ends(size), ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
    both = (size.heads + 2 * size.kv_heads) * size.head
    for number in range(size.layers):
        at = f"blk.{number}."
        kept = [one for one in _block(size, number) if one.name.split(".")[2] not in left]
        merged = {"attn_qkv": both, "ffn_up": 2 * size.feed_forward}
        tensors += [
            *kept,
            *(
                Tensor(f"{at}{name}.weight", (size.width, n), size.code)
                for name, n in merged.items()
            ),
        ]
    metadata = _common("phi3", size) | _attention("phi3", size)
    metadata["phi3.rope.dimension_count"] = size.head * 3 // 4
    # Of models that are named so llama.cpp expects control tokens of their own.
    metadata["general.name"] = "tiny"
    return Gguf(metadata | dict(size.extra), tensors)


def gemma2(size: Size) -> Gguf:
    """A sliding window on every second layer, soft caps."""
    norms = ("post_attention_norm", "post_ffw_norm")
    tensors = _ends(size, tied=True)
    for number in range(size.layers):
        tensors += _block(size, number, norms)
    metadata = _common("gemma2", size) | _attention("gemma2", size)
    metadata |= {
        "gemma2.attention.sliding_window": size.window,
        "gemma2.attn_logit_softcapping": 50.0,
        "gemma2.final_logit_softcapping": 30.0,
    }
    return Gguf(metadata | dict(size.extra), tensors)


def gemma3(size: Size) -> Gguf:
    """A sliding window on five layers of six."""
    norms = ("post_attention_norm", "post_ffw_norm")
    tensors = _ends(size, tied=True)
    for number in range(size.layers):
        tensors += [*_block(size, number, norms), *_head_norms(size, number)]
    metadata = _common("gemma3", size) | _attention("gemma3", size)
    metadata["gemma3.attention.sliding_window"] = size.window
    return Gguf(metadata | dict(size.extra), tensors)


def mamba(size: Size) -> Gguf:
    """No attention: a recurrent state on every layer."""
    inner, state, rank, kernel = 2 * size.width, 16, 8, 4
    tensors = _ends(size)
    for number in range(size.layers):
        at = f"blk.{number}."
        tensors += [
            Tensor(f"{at}attn_norm.weight", (size.width,)),
            Tensor(f"{at}ssm_in.weight", (size.width, 2 * inner), size.code),
            Tensor(f"{at}ssm_conv1d.weight", (kernel, inner)),
            Tensor(f"{at}ssm_conv1d.bias", (inner,)),
            Tensor(f"{at}ssm_x.weight", (inner, rank + 2 * state), size.code),
            Tensor(f"{at}ssm_dt.weight", (rank, inner)),
            Tensor(f"{at}ssm_dt.bias", (inner,)),
            Tensor(f"{at}ssm_a", (state, inner)),
            Tensor(f"{at}ssm_d", (inner,)),
            Tensor(f"{at}ssm_out.weight", (inner, size.width), size.code),
        ]
    metadata = _common("mamba", size) | {
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
        "mamba.ssm.conv_kernel": kernel,
        "mamba.ssm.inner_size": inner,
        "mamba.ssm.state_size": state,
        "mamba.ssm.time_step_rank": rank,
    }
    return Gguf(metadata | dict(size.extra), tensors)


ARCHITECTURES: dict[str, Callable[[Size], Gguf]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "granite": granite,
    "smollm3": smollm3,
    "seed_oss": seed_oss,
    "phi3": phi3,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "mamba": mamba,
}


def write_model(
    path: Path, architecture: str = "llama", size: Size | None = None, seed: int = 1
) -> Path:
    """A small model with random weights that llama.cpp loads and runs (0.1 MB as it comes)."""
    return ARCHITECTURES[architecture](size or Size()).write(path, seed)


def write_split(folder: Path, stem: str, parts: int, size: Size | None = None) -> list[Path]:
    """A llama of random weights cut into `parts` files as llama.cpp's splitter names them."""
    whole = llama(size or Size())
    share = -(-len(whole.tensors) // parts)
    paths = []
    for number in range(parts):
        metadata: dict[str, Value] = dict(whole.metadata) if number == 0 else {}
        metadata |= {
            "split.no": Typed(2, number),
            "split.count": Typed(2, parts),
            "split.tensors.count": Typed(5, len(whole.tensors)),
        }
        chunk = whole.tensors[number * share : (number + 1) * share]
        path = folder / f"{stem}-{number + 1:05}-of-{parts:05}.gguf"
        paths.append(replace(whole, metadata=metadata, tensors=chunk).write(path, seed=number))
    return paths
