"""What a KV cache of few bits does to a Qwen2 model: KL divergence per token, and needles in long texts.

    PYTHONPATH=.:backends python3 -m scripts.bench.cuda.kv_bits MODEL.gguf [--windows N] [--tokens N]
        [--needles LENGTH ...] [--only WORD]

The model runs in plain torch, on a GPU if there is one. Keys and values are rounded as a cache would store
them, and every token attends to the rounded ones. Texts are the project's documents and code. KIVI: Liu et al.,
2024, keys in groups of a channel over a page. QuaRot: Ashkboos et al., 2024, heads rotated by a Hadamard
matrix.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import gguf
import torch
from torch.nn import functional

from localchat_cuda.gguf_files import open_gguf
from localchat_cuda.tokenizer import CheckpointTokenizer

ROOT = Path(__file__).resolve().parents[3]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEAD = 128
"""Columns of a head."""
TEXTS = (
    *(
        "docs/gpu.md",
        "localchat/session/session.py",
        "docs/serving.md",
        "README.md",
        "docs/models.md",
    ),
    *("backends/localchat_cuda/kernels/attention/decode.py", "localchat/cli/chat/repl.py"),
    *("scripts/bench/LOG.md", "ARCHITECTURE.md", "localchat/core/scheduler/scheduler.py"),
    *("docs/tools.md", "docs/quality.md", "docs/editors.md"),
)
CITIES = (
    *(
        "Lisbon",
        "Madrid",
        "Paris",
        "Berlin",
        "Vienna",
        "Prague",
        "Warsaw",
        "Oslo",
        "Dublin",
        "London",
    ),
    *(
        "Rome",
        "Milan",
        "Geneva",
        "Munich",
        "Hamburg",
        "Tokyo",
        "Kyoto",
        "Seoul",
        "Beijing",
        "Delhi",
    ),
)
ANSWER_TOKENS = 8
_E2M1 = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
_SCALE_SEARCH = (1.0, 0.93, 0.86, 0.8, 0.74)
"""Factors of a scale, of which the one with the least squared error is stored."""

Round = Callable[[torch.Tensor], torch.Tensor]
"""Returns what a cache gives back for heads [..., T, HEAD]."""


def main() -> int:
    """Measure all caches, and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=2048, help="of a window")
    parser.add_argument("--needles", type=int, nargs="*", default=[], help="tokens of each text")
    parser.add_argument("--only", default="", help="caches whose name has this word")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    model = Qwen(options.model)
    texts = [model.encode((ROOT / name).read_text())[: options.tokens] for name in TEXTS]
    windows = [ids for ids in texts if len(ids) == options.tokens][: options.windows]
    usual = [model.log_probabilities(ids, CACHES[0]) for ids in windows]
    haystacks = [haystack(model, length, seed) for length in options.needles for seed in (0, 1)]
    usual_answers = [answers(model, CACHES[0], hay) for hay in haystacks]
    for cache in CACHES[1:]:
        if options.only in cache.name:
            print(
                f"{cache.name:44} {cache.bytes:5.0f} B  {divergence(model, cache, windows, usual)}"
            )
            for hay, expected in zip(haystacks, usual_answers, strict=True):
                right = answers(model, cache, hay)
                lost = sum(was and not now for was, now in zip(expected, right, strict=True))
                print(
                    f"    {len(hay.ids):6} tokens: {sum(right)} right, {sum(expected)} in 16 bits, {lost} lost"
                )
    return 0


# Rounding


def sixteen(x: torch.Tensor) -> torch.Tensor:
    """Numbers in fp16."""
    return x.half().float()


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Numbers of 8 bits without scales."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def hadamard() -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < HEAD:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(HEAD)


def rotated(inner: Round) -> Round:
    """Round heads that were multiplied by a Hadamard matrix, as their queries are."""
    matrix = hadamard().to(DEVICE)
    return lambda x: inner(x @ matrix) @ matrix.t()


def grouped(inner: Round, group: int) -> Round:
    """Round groups of a token's columns, each with a scale of its own."""
    return lambda x: inner(torch.unflatten(x, -1, (-1, group))).flatten(-2)


def channels(page: int) -> Round:
    """Round each channel over a page of tokens. The last page stays as it is until it is full."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        full = x.shape[-2] // page * page
        pages = torch.unflatten(x[..., :full, :], -2, (-1, page)).transpose(-1, -2)
        stored = lowest_and_step(pages).transpose(-1, -2).flatten(-3, -2)
        return torch.cat([stored, sixteen(x[..., full:, :])], -2)

    return rounded


def whole_numbers(largest: int, *, search: bool = False, byte_scales: bool = False) -> Round:
    """Round to whole numbers times a scale in fp16, or in a byte with 3 bits of mantissa."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        peak = x.abs().amax(-1, keepdim=True).clamp_min(1e-6) / largest
        best = torch.full_like(x, math.inf)
        for factor in _SCALE_SEARCH if search else _SCALE_SEARCH[:1]:
            scale = peak * factor
            if byte_scales:
                # Rounded to the nearest, and up for 8 bits, whose largest number must fit.
                added = 0xFFFFF if largest > 7 else 0x7FFFF
                scale = (((scale.view(torch.int32) + added) >> 20) << 20).view(torch.float32)
            else:
                scale = scale.half().float().clamp_min(6e-8)
            low = -largest - (largest == 7)
            stored = (x / scale).round().clamp(low, largest) * scale
            is_better = _error(stored, x) < _error(best, x)
            best = torch.where(is_better, stored, best)
        return best

    return rounded


def _error(stored: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (stored - x).square().sum(-1, keepdim=True)


def lowest_and_step(x: torch.Tensor) -> torch.Tensor:
    """4 bits between the lowest and the highest number of a group, which are stored in fp16."""
    low = x.amin(-1, keepdim=True)
    step = ((x.amax(-1, keepdim=True) - low) / 15).clamp_min(1e-6).half().float()
    low = low.half().float()
    return ((x - low) / step).round().clamp(0, 15) * step + low


def q4_0(x: torch.Tensor) -> torch.Tensor:
    """llama.cpp's blocks: the number of largest size is -8."""
    low = x.amin(-1, keepdim=True)
    high = x.amax(-1, keepdim=True)
    scale = (torch.where(-low > high, low, high) / -8).half().float()
    return (x / torch.where(scale == 0, 1.0, scale)).round().clamp(-8, 7) * scale


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    """E2M1 with a scale in e4m3, and one for the whole tensor."""
    whole = x.abs().max() / (448 * 6)
    scale = (
        (x.abs().amax(-1, keepdim=True) / 6 / whole)
        .clamp(2**-9, 448)
        .to(torch.float8_e4m3fn)
        .float()
    )
    table = _E2M1.to(x.device)
    codes = torch.bucketize((x / (scale * whole)).contiguous(), (table[1:] + table[:-1]) / 2)
    return table[codes] * scale * whole


class Cache(NamedTuple):
    """A way to store keys and values."""

    name: str
    bytes: float
    """Of a key and a value of a head, with their scales."""
    keys: Round
    values: Round
    page: int = 1
    """Tokens whose keys are rounded together. Until the last one comes, those are in 16 bits."""


def _caches() -> Iterator[Cache]:
    eight = whole_numbers(127, byte_scales=True)
    four = rotated(grouped(whole_numbers(7), 32))
    searched = rotated(grouped(whole_numbers(7, search=True, byte_scales=True), 64))
    asymmetric = grouped(lowest_and_step, 32)
    yield Cache("16 bits", 512, sixteen, sixteen)
    yield Cache("8 bits of localchat, keys rotated", 258, rotated(eight), eight)
    yield Cache("e4m3 without scales, as vLLM's default", 256, e4m3, e4m3)
    yield Cache("q4_0, as llama.cpp's", 144, grouped(q4_0, 32), grouped(q4_0, 32))
    yield Cache("nvfp4", 144, grouped(nvfp4, 16), grouped(nvfp4, 16))
    yield Cache(
        "4 bits of a head, rotated, as QuaRot",
        136,
        rotated(lowest_and_step),
        rotated(lowest_and_step),
    )
    yield Cache("KIVI, pages of 32", 160, channels(32), asymmetric, 32)
    yield Cache("KIVI, pages of 64", 152, channels(64), asymmetric, 64)
    yield Cache("KIVI, pages of 64, all rotated", 144, rotated(channels(64)), four, 64)
    yield Cache("keys in 8 bits, values in 4", 195, rotated(eight), searched)
    yield Cache(
        "keys in 16 bits, values in 4", 336, sixteen, rotated(grouped(whole_numbers(7), 16))
    )


CACHES = tuple(_caches())


# Model


class Layer(NamedTuple):
    """Weights of a layer, with q, k and v joined, and gate and up."""

    norm: torch.Tensor
    qkv: torch.Tensor
    bias: torch.Tensor
    output: torch.Tensor
    feed_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Qwen:
    """A Qwen2 model in fp32, whose keys and values go through a cache."""

    def __init__(self, path: Path) -> None:
        opened = open_gguf(path)
        self.config = config = opened.config
        self._tokenizer = CheckpointTokenizer(opened.tokenizer, config.vocabulary)
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

        def read(*names: str) -> torch.Tensor:
            parts = [
                torch.tensor(gguf.dequantize(tensors[name].data, tensors[name].tensor_type))
                for name in names
            ]
            return torch.cat(parts).float().to(DEVICE)

        self.embedding = read("token_embd.weight")
        self.head = self.embedding
        if "output.weight" in tensors:
            self.head = read("output.weight")
        self.norm = read("output_norm.weight")
        self.layers = [
            Layer(
                read(f"blk.{n}.attn_norm.weight"),
                read(*(f"blk.{n}.attn_{part}.weight" for part in "qkv")),
                read(*(f"blk.{n}.attn_{part}.bias" for part in "qkv")),
                read(f"blk.{n}.attn_output.weight"),
                read(f"blk.{n}.ffn_norm.weight"),
                read(f"blk.{n}.ffn_gate.weight", f"blk.{n}.ffn_up.weight"),
                read(f"blk.{n}.ffn_down.weight"),
            )
            for n in range(config.layers)
        ]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=True)

    def decode(self, ids: list[int]) -> str:
        return b"".join(map(self._tokenizer.piece, ids)).decode(errors="replace")

    def log_probabilities(self, ids: list[int], cache: Cache) -> torch.Tensor:
        """Return those of all tokens [T, vocabulary], in fp16 to save memory."""
        states = self.run(ids, cache, [])
        return torch.cat(
            [(part @ self.head.t()).log_softmax(-1).half() for part in torch.split(states, 512)]
        )

    def run(
        self, ids: list[int], cache: Cache, stored: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Return the last states [T, hidden] of tokens that follow the stored ones, and store theirs."""
        past = 0
        if stored:
            past = stored[0][0].shape[1]
        turns = self._turns(past, len(ids))
        x = self.embedding[torch.tensor(ids, device=DEVICE)]
        for number, layer in enumerate(self.layers):
            normed = functional.rms_norm(x, x.shape[-1:], layer.norm, self.config.eps)
            columns = functional.linear(normed, layer.qkv, layer.bias)
            qkv = columns.view(len(ids), -1, HEAD).transpose(0, 1)
            kv_heads = self.config.key_heads
            q = turned(qkv[: self.config.heads], turns)
            k = turned(qkv[-2 * kv_heads : -kv_heads], turns)
            v = qkv[-kv_heads:]
            if past:
                # Few tokens after a long text: theirs are not rounded.
                k = torch.cat([stored[number][0], k], 1)
                v = torch.cat([stored[number][1], v], 1)
                stored[number] = k, v
                attended = attention(q, k, v, k, 1, past)
            else:
                rounded = cache.keys(k), cache.values(v)
                stored.append(rounded)
                attended = attention(q, *rounded, sixteen(k), cache.page, 0)
            x = x + attended.transpose(0, 1).flatten(1) @ layer.output.t()
            normed = functional.rms_norm(x, x.shape[-1:], layer.feed_norm, self.config.eps)
            gate, up = (normed @ layer.gate_up.t()).chunk(2, -1)
            x = x + (functional.silu(gate) * up) @ layer.down.t()
        return functional.rms_norm(x, x.shape[-1:], self.norm, self.config.eps)

    def _turns(self, past: int, count: int) -> torch.Tensor:
        radians = self.config.rotation.radians(HEAD, past + count)
        positions = torch.arange(past, past + count, dtype=torch.float64, device=DEVICE)
        angles = positions[:, None] * torch.tensor(radians, dtype=torch.float64, device=DEVICE)
        return torch.polar(torch.ones_like(angles), angles)


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to heads [heads, T, HEAD]."""
    low, high = x.double().chunk(2, -1)
    result = torch.complex(low, high) * turns
    return torch.cat([result.real, result.imag], -1).float()


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    recent_k: torch.Tensor,
    page: int,
    past: int,
) -> torch.Tensor:
    """Attend to k and v [kv heads, T, HEAD], but to recent_k in a page that is not full yet."""
    shared = len(q) // len(k)
    out = torch.zeros_like(q)
    columns = torch.arange(k.shape[1], device=q.device)
    for start in range(0, q.shape[1], 1024):
        part = slice(start, start + 1024)
        rows = past + torch.arange(start, min(start + 1024, q.shape[1]), device=q.device)[:, None]
        hidden = columns > rows
        # In a page of one token, none is recent.
        is_recent = columns // page * page + page - 1 > rows
        for head in range(len(q)):
            group = head // shared
            logits = q[head, part] @ k[group].t()
            if page > 1:
                logits = torch.where(is_recent, q[head, part] @ recent_k[group].t(), logits)
            weights = (logits / math.sqrt(HEAD)).masked_fill_(hidden, -torch.inf).softmax(-1)
            out[head, part] = weights @ v[group]
    return out


# Measurements


def divergence(
    model: Qwen, cache: Cache, windows: list[list[int]], usual: list[torch.Tensor]
) -> str:
    """Compare with the log probabilities that 16 bits give for the windows."""
    kl: list[torch.Tensor] = []
    same: list[torch.Tensor] = []
    for ids, log_p in zip(windows, usual, strict=True):
        log_q = model.log_probabilities(ids, cache)
        for p_part, q_part in zip(torch.split(log_p, 512), torch.split(log_q, 512), strict=True):
            kl.append((p_part.float().exp() * (p_part.float() - q_part.float())).sum(-1))
            same.append(p_part.argmax(-1) == q_part.argmax(-1))
    each = torch.cat(kl)
    agreement = 100 * torch.cat(same).float().mean()
    return (
        f"KL {each.mean():.5f}, median {each.median():.5f}, p99 {each.quantile(0.99):.4f}, "
        f"same first token {agreement:.2f} %"
    )


class Haystack(NamedTuple):
    """A long text with a sentence about each city, and the code in it."""

    ids: list[int]
    codes: dict[str, str]


def haystack(model: Qwen, length: int, seed: int) -> Haystack:
    """Make a text of nearly `length` tokens."""
    draw = random.Random(1000 * length + seed)
    codes = {city: str(draw.randrange(10_000, 99_999)) for city in draw.sample(CITIES, len(CITIES))}
    documents = sorted((ROOT / "docs").glob("*.md"))
    text = "\n\n".join(path.read_text() for path in documents)
    filler = model.encode(text[draw.randrange(len(text) // 4) :][: 6 * length])
    start = "<|im_start|>user\nRead the following text and remember the secret codes in it.\n\n"
    ids = model.encode(start)
    share = (length - 200 - len(ids)) // len(codes) - 16
    for number, (city, code) in enumerate(codes.items()):
        ids += filler[number * share : (number + 1) * share]
        ids += model.encode(f"\n\nThe secret code of {city} is {code}.\n\n")
    return Haystack(ids, codes)


def answers(model: Qwen, cache: Cache, hay: Haystack) -> list[bool]:
    """Ask for each code, and return which answers are right."""
    text: list[tuple[torch.Tensor, torch.Tensor]] = []
    model.run(hay.ids, cache, text)
    right = []
    for city, code in hay.codes.items():
        stored = list(text)
        ids = model.encode(
            f"\n\nWhat is the secret code of {city}? Answer with the code alone.<|im_end|>\n"
            f"<|im_start|>assistant\nThe secret code of {city} is"
        )
        answer: list[int] = []
        for _ in range(ANSWER_TOKENS):
            state = model.run(answer[-1:] or ids, cache, stored)[-1]
            answer.append(int((model.head @ state).argmax()))
        right.append(model.decode(answer).strip().startswith(code))
    return right


if __name__ == "__main__":
    raise SystemExit(main())
