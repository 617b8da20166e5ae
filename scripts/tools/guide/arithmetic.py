"""Tables of the guide's arithmetic: weights, KV cache, speed, download time, and models by memory.

They cover what people ask for, so that every number in an answer was computed here.
"""

from typing import Any, Final

WEIGHT_SIZES: Final = (0.5, 1, 1.5, 3, 4, 7, 8, 14, 32, 70, 72)
WEIGHT_BITS: Final = (16, 8, 4)
# Layers, KV heads and head_dim from their config.json files.
SHAPES: Final = {
    "Qwen2.5-0.5B": (24, 2, 64),
    "Qwen2.5-1.5B": (28, 2, 128),
    "Qwen2.5-3B": (36, 2, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Qwen2.5-14B": (48, 8, 128),
    "Qwen2.5-32B": (64, 8, 128),
    "Llama 3.1 8B": (32, 8, 128),
    "Llama 3.2 1B": (16, 8, 64),
    "Llama 3.2 3B": (28, 8, 128),
    "Llama 3.3 70B": (80, 8, 128),
    "Mistral 7B": (32, 8, 128),
}
KV_TOKENS: Final = (4096, 8192, 16384, 32768, 131072)
KV_BYTES: Final = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
FILE_GB: Final = {
    "3b": 1.9,
    "7b": 4.7,
    "8b": 4.9,
    "14b": 9.0,
    "32b": 19.9,
    "70b": 42.5,
}  # Q4_K_M files
# Common shapes: layers, and (KV heads, head_dim).
USUAL_LAYERS: Final = (
    12,
    16,
    18,
    20,
    22,
    24,
    26,
    28,
    30,
    32,
    36,
    40,
    42,
    48,
    56,
    60,
    62,
    64,
    72,
    80,
)
USUAL_HEADS: Final = (
    (1, 256), (2, 64), (2, 128), (2, 256), (4, 64), (4, 128), (4, 256), (8, 64), (8, 128),
    (8, 256), (16, 64), (16, 128), (32, 64), (32, 128),
)  # fmt: skip
# Memory in GB of cards with only one size.
CARDS: Final = {
    "RTX 2060": 6, "RTX 2070": 8, "RTX 3060 Ti": 8, "RTX 3070": 8, "RTX 3090": 24,
    "RTX 4060": 8, "RTX 4070": 12, "RTX 4080": 16, "RTX 4090": 24,
    "RTX 5070": 12, "RTX 5080": 16, "RTX 5090": 32,
    "RX 6800": 16, "RX 7800 XT": 16, "RX 7900 XTX": 24,
    "T4": 16, "L4": 24, "A10": 24, "P40": 24, "L40S": 48, "RTX A6000": 48, "H100": 80,
}  # fmt: skip
CARDS_OF_SEVERAL: Final = {
    "RTX 3050": (6, 8), "RTX 3060": (8, 12), "RTX 3080": (10, 12), "RTX 4060 Ti": (8, 16),
    "RTX 5060 Ti": (8, 16), "RX 7600": (8, 16), "A100": (40, 80), "V100": (16, 32),
    "MacBook Air": (8, 16, 24, 32), "MacBook Pro": (8, 16, 18, 24, 32, 36, 48, 64, 128),
    "Mac mini": (8, 16, 24, 32, 48, 64), "Mac Studio": (32, 36, 64, 96, 128),
    "M1": (8, 16), "M2": (8, 16, 24), "M3": (8, 16, 24), "M4": (16, 24, 32),
}  # fmt: skip
"""Cards and Macs with several memory sizes, in GB."""
BANDWIDTHS: Final = (25, 50, 80, 100, 200, 300, 400, 500, 800, 900, 1000, 2000, 3350, 4800)
LINE_MBIT: Final = (16, 50, 100, 250, 500, 1000)
MEMORY_CHOICE: Final = {
    2: ("qwen2.5:1.5b-q4_k_m", "1.5B", 1.1, "with a short context"),
    4: ("qwen2.5:3b-q4_k_m", "3B", 1.9, "with a short context"),
    6: ("qwen2.5:3b-q4_k_m", "3B", 1.9, "with a long context; a 7B (4.7 GB) fits only barely"),
    8: ("qwen2.5:7b-q4_k_m", "7B", 4.7, "with room for the KV cache"),
    10: ("qwen2.5:7b-q4_k_m", "7B", 4.7, "with a long context"),
    11: ("qwen2.5:7b-q4_k_m", "7B", 4.7, "with a long context"),
    12: ("qwen2.5:14b-q4_k_m", "14B", 9.0, "with a short context or q8_0 KV"),
    16: ("qwen2.5:14b-q4_k_m", "14B", 9.0, "with a long context"),
    18: ("qwen2.5:14b-q4_k_m", "14B", 9.0, "with a long context"),
    20: ("qwen2.5:14b-q4_k_m", "14B", 9.0, "with a long context"),
    24: ("qwen2.5:32b-q4_k_m", "32B", 19.9, "with a short context or q8_0 KV"),
    32: ("qwen2.5:32b-q4_k_m", "32B", 19.9, "with a long context"),
    36: ("qwen2.5:32b-q4_k_m", "32B", 19.9, "with a long context"),
    40: ("qwen2.5:32b-q4_k_m", "32B", 19.9, "with a long context"),
    48: ("llama3.3:70b-q4_k_m", "70B", 42.5, "with a short context or q8_0 KV"),
    64: ("llama3.3:70b-q4_k_m", "70B", 42.5, "with a long context"),
    80: ("llama3.3:70b-q4_k_m", "70B", 42.5, "with a long context"),
    96: ("llama3.3:70b-q4_k_m", "70B", 42.5, "with a long context"),
    128: ("llama3.3:70b-q4_k_m", "70B", 42.5, "with a long context"),
}


def number(value: float) -> str:
    """A number as the guide writes it: no trailing zeros, commas from 10,000 on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def gigabytes(value_bytes: float) -> str:
    """Decimal gigabytes with two decimals, one from 10 GB on."""
    gb = value_bytes / 1e9
    return f"{gb:.1f} GB" if gb >= 10 else f"{gb:.2f} GB"


def rate(bandwidth_gb_s: float, size_gb: float) -> str:
    """tok/s bound by bandwidth: each token reads all weights."""
    value = bandwidth_gb_s / size_gb
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def weights() -> dict[str, str]:
    """`size/bits` -> gigabytes, for the sizes people ask for."""
    return {
        f"{number(b)}/{bits}": f"{number(b * bits / 8)} GB"
        for b in WEIGHT_SIZES
        for bits in WEIGHT_BITS
    }


def kv() -> dict[str, dict[str, Any]]:
    """KV memory per model: the multiplication, bytes per token at f16, and totals for usual contexts
    and KV types.
    """
    table: dict[str, dict[str, Any]] = {}
    for name, (layers, heads, dim) in SHAPES.items():
        values = 2 * layers * heads * dim
        table[name] = {
            "shape": f"{layers}/{heads}/{dim}",
            "product": f"2 × {layers} × {heads} × {dim} × 2",
            "per_token": f"{values * 2:,} bytes ({values * 2 // 1024} KiB)",
            "totals": {
                kind: {str(n): gigabytes(values * size * n) for n in KV_TOKENS}
                for kind, size in KV_BYTES.items()
            },
        }
    return table


def binary(kib: int) -> str:
    """MiB, and GiB from 1,024 of them on."""
    mib = kib / 1024
    return f"{mib:g} MiB" if mib < 1024 else f"{mib / 1024:.4g} GiB"


def shapes() -> dict[str, dict[str, str]]:
    """`layers/KV heads/head_dim` -> KV memory at f16 per token and for usual contexts."""
    table: dict[str, dict[str, str]] = {}
    for layers in USUAL_LAYERS:
        for heads, dim in USUAL_HEADS:
            kib = layers * heads * dim * 4 // 1024
            row = {str(n): binary(kib * n) for n in KV_TOKENS}
            table[f"{layers}/{heads}/{dim}"] = {"token": f"{kib} KiB", **row}
    return table


def memory() -> dict[str, str]:
    """Gigabytes of memory -> which model, in a sentence."""
    return {
        str(gb): f"For {gb} GB take a {size} at Q4_K_M: `localchat pull {name}`. "
        f"Its weights are {number(file_gb)} GB, so it fits {how}."
        for gb, (name, size, file_gb, how) in MEMORY_CHOICE.items()
    }


def coding() -> dict[str, str]:
    """Gigabytes of memory -> which model for code, in a sentence."""
    table = {}
    for gb, (name, size, file_gb, how) in MEMORY_CHOICE.items():
        if size == "70B":
            name, size, file_gb, how = MEMORY_CHOICE[32]
        coder = name.replace("qwen2.5", "qwen2.5-coder")
        table[str(gb)] = (
            f"For code on {gb} GB take a {size} coder at Q4_K_M: `localchat pull {coder}`. "
            f"Its weights are {number(file_gb)} GB, so it fits {how.split(';')[0]}."
        )
    return table


def size_fits() -> dict[str, str]:
    """`billions/GB` -> whether a model at Q4_K_M fits, in a sentence."""
    table = {}
    for name, file_gb in FILE_GB.items():
        for gb in MEMORY_CHOICE:
            shares = (
                (1.5, "fits with room for the context"),
                (1.1, "fits with a short context or q8_0 KV"),
            )
            verdict = next(
                (
                    words
                    for share, words in (*shares, (1.0, "fits only barely"))
                    if gb / file_gb >= share
                ),
                "does not fit",
            )
            table[f"{name}/{gb}"] = (
                f"{'An' if name[0] == '8' else 'A'} {name.upper()} at Q4_K_M has {number(file_gb)} GB of weights, so on {gb} GB it {verdict}. "
                "`localchat fit MODEL` gives the exact verdict."
            )
    return table


def speeds() -> dict[str, str]:
    """`size GB/bandwidth GB/s` -> tok/s at most."""
    sizes = sorted({*FILE_GB.values(), 3.5, 7.0, 14.0, 40.0})
    return {f"{number(s)}/{b}": rate(b, s) for s in sizes for b in BANDWIDTHS}


def downloads() -> dict[str, str]:
    """`size GB/line Mbit/s` -> how long, in words with the arithmetic."""
    table = {}
    for size in sorted({*FILE_GB.values(), 0.4, 1.0, 2.0, 5.0, 40.0}):
        for line in LINE_MBIT:
            seconds = size * 8000 / line
            length = f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} s"
            table[f"{number(size)}/{line}"] = (
                f"{length}: {number(size)} × 8 / {line / 1000:g} = {seconds:.0f} s"
            )
    return table
