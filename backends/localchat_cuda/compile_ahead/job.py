"""Steps for which a model's kernels are compiled, and their order."""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import product
from typing import NamedTuple

from localchat.backend_api.interface import Capabilities, SamplingParams
from localchat_cuda.config.gguf import LayerFormats
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.kernels.attention.decode import LONG_TOKENS
from localchat_cuda.kernels.launch import Traits
from localchat_cuda.runner.input_batch import (
    DECODE_BUCKETS,
    MAX_DECODE_WIDTH,
    MIXED_BUCKETS,
    MIXED_DECODE_BUCKETS,
    PREFILL_BUCKETS,
)

FEW_ROWS = 8
"""Row limit of Phase.FEW_ROWS."""
SHORT_PROMPT = 16
"""Token limit of Phase.SHORT_PROMPT."""
_GREEDY = SamplingParams(temperature=0.0)
_PENALISED = SamplingParams(temperature=0.7, frequency_penalty=0.1)
_TOP_K = SamplingParams(temperature=0.7, frequency_penalty=0.1, top_k=20)
"""Sampling that likely tokens decide (kernels/sampling/rescore.py), unlike `_PENALISED`."""
_DRAFTS = (0, 1, 3, 7, 15)
_SHORT_PROMPTS = (4, 8, SHORT_PROMPT)
"""Prompts that take the gemms of decode steps, one length for each of these."""
_HISTORIES = (1, 70, 130, 260, 520)
"""Histories in tokens, one for each number of ranges into which attention divides them."""
_LONG_HISTORIES = 1_040, 2_080, LONG_TOKENS
"""Histories of a single sequence: over latents, and in long contexts."""
_SHARED_TOKENS = 512
"""Tokens of a step that several prompts share."""
_MIXED_TOKENS = 192, 640, 2048
"""Tokens of steps with prompts and decoding rows that drop rows after the last attention.

The first two are for packed int4 weights with and without copies in e4m3, the last for unpacked ones."""


class Phase(IntEnum):
    """Steps whose kernels are compiled together, in this order."""

    ONE_ROW = 0
    """A single sequence without drafts."""
    SHORT_PROMPT = 1
    """A single sequence with a prompt of 2 to `SHORT_PROMPT` tokens.

    Its gemms are those of as many sequences, which compile longest. Few first prompts are so short."""
    FEW_ROWS = 2
    """Up to `FEW_ROWS` sequences, and drafts."""
    ALL = 3

    @staticmethod
    def of(widths: Sequence[int], *, drafts: bool) -> "Phase":
        """Return the phase that compiles the kernels of a step. `widths`: tokens of its sequences."""
        if len(widths) <= 1 and not drafts:
            if any(1 < width <= SHORT_PROMPT for width in widths):
                return Phase.SHORT_PROMPT
            return Phase.ONE_ROW
        if len(widths) <= FEW_ROWS:
            return Phase.FEW_ROWS
        return Phase.ALL


def phase_line(phase: Phase, *, ok: bool) -> str:
    """Return the line with which a process reports the end of a phase."""
    return f"{phase.name}\n" if ok else f"{phase.name} failed\n"


class CompileJob(NamedTuple):
    """Model and GPU to compile kernels for."""

    config: ModelConfig
    capabilities: Capabilities
    gpu: Traits
    unpacked: bool = False
    """Memory also contains unpacked copies of packed layers."""
    head_bounds: bool = False
    formats: LayerFormats = ()
    """Kinds of layers of a GGUF file."""
    claims: str = ""
    """Folder with a file for each claimed kernel; empty: this process compiles all kernels."""
    processes: int = 1


class CompileShape(NamedTuple):
    """Step that needs kernels of its own."""

    rows: tuple[tuple[int, int, int], ...]
    """Start, new tokens, and draft tokens among them, for each row."""
    sampling: SamplingParams = _GREEDY
    masked: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the step's sequences in the KV cache."""
        return sum(start + width for start, width, _ in self.rows)

    @property
    def phase(self) -> Phase:
        widths = [width for _, width, _ in self.rows]
        return Phase.of(widths, drafts=any(drafts for _, _, drafts in self.rows))


def compile_shapes(capabilities: Capabilities) -> Iterator[CompileShape]:
    """Return a step for each set of kernels, if it fits in the KV cache."""
    return (shape for shape in all_shapes(capabilities) if shape.tokens <= capabilities.kv_tokens)


def all_shapes(capabilities: Capabilities) -> Iterator[CompileShape]:
    """Yield a step for each set of kernels, whatever the size of the KV cache."""
    room = min(capabilities.context_tokens, capabilities.kv_tokens) - 1
    widest = min(capabilities.max_step_tokens, room)
    histories = [history for history in _HISTORIES if history + max(_DRAFTS) < room]
    writers = sorted({min(rows, capabilities.max_slots) for rows in DECODE_BUCKETS})
    for drafts, rows, history in product(_DRAFTS, writers, histories):
        if not drafts or rows * (1 + drafts) <= DECODE_BUCKETS[-1]:
            yield CompileShape(((history, 1 + drafts, drafts),) * rows)
    for history in _LONG_HISTORIES:
        if history < room:
            yield CompileShape(((history, 1, 0),))
            # Steps with and without a graph divide the history into different numbers of ranges.
            for drafts, size in product((0, _DRAFTS[-1]), (_SHARED_TOKENS, widest)):
                size -= 1 + drafts
                if capabilities.max_slots > 1 and size > MAX_DECODE_WIDTH:
                    yield CompileShape(((history, 1 + drafts, drafts), (0, size, 0)))
    for size in _SHORT_PROMPTS:
        if size <= widest:
            yield CompileShape(((0, size, 0),))
    for size in sorted({widest, *(bucket for bucket in PREFILL_BUCKETS if bucket <= widest)}):
        if size > MAX_DECODE_WIDTH:
            yield CompileShape(((0, size, 0),))
            yield CompileShape(((room - size, size, 0),))
    # After the last attention, each prompt that ends leaves one row.
    for size, count in product((_SHARED_TOKENS, widest), writers):
        if MAX_DECODE_WIDTH < size // count <= widest // count:
            yield CompileShape(((0, size // count, 0),) * count)
    decode_rows = (*MIXED_DECODE_BUCKETS[1:], 2 * MIXED_DECODE_BUCKETS[-1])
    mixed = product(decode_rows, (*_MIXED_TOKENS, widest), (0, *_DRAFTS[-2:]))
    few_rows = ((MIXED_DECODE_BUCKETS[1], tokens, 0) for tokens in MIXED_BUCKETS)
    for decode_tokens, tokens, drafts in (*mixed, *few_rows):
        rows = min(decode_tokens // (1 + drafts), capabilities.max_slots - 1)
        size = tokens - decode_tokens
        for history in histories:
            if rows > 0 and MAX_DECODE_WIDTH < size <= widest - decode_tokens:
                yield CompileShape((*((history, 1 + drafts, drafts),) * rows, (0, size, 0)))
    yield CompileShape(((1, 1, 0),), _PENALISED)
    yield CompileShape(((1, 1, 0),), _TOP_K)
    yield CompileShape(((1, 1, 0),), masked=True)
