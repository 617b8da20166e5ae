"""Small shared libraries that tests compile: false llama.cpps with one thing changed each."""

import shutil
import subprocess
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

from localchat_llamacpp.c_api import _FUNCTIONS

_NUMBERS = count()
_OWN = (
    *("llama_version", "llama_batch_init", "llama_batch_free"),
    *("llama_model_default_params", "llama_context_default_params"),
)
_SOURCE = r"""
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* What a release may change; each is a piece of text of its own. */
#ifndef IN_MODEL
#define IN_MODEL
#endif
#ifndef IN_SIZES
#define IN_SIZES
#endif
#ifndef IN_CONTEXT
#define IN_CONTEXT
#endif
#ifndef AT_CONTEXT_END
#define AT_CONTEXT_END
#endif
#ifndef IN_BATCH
#define IN_BATCH
#endif
#ifndef N_CTX
#define N_CTX 512
#endif

struct model_params {
    void * devices; const void * overrides;
    int32_t gpu_layers; int split, load, lazy; int32_t main_gpu;
    IN_MODEL
    const float * split_of; void * progress; void * progress_data; const void * kv;
    bool vocab_only, check, extra_bufts, no_host, no_alloc, load_mtp;
};
struct context_params {
    uint32_t ctx, batch, ubatch;
    IN_SIZES
    uint32_t seq_max, rs_seq, outputs, outputs_per_seq;
    int32_t threads, threads_batch;
    int type, rope, pooling, attention, flash;
    float base, scale, ext, attn, fast, slow; uint32_t orig; float defrag;
    void * eval; void * eval_data; int k, v;
    IN_CONTEXT
    void * abort; void * abort_data;
    bool embeddings, kqv, no_perf, op, swa, unified;
    void * samplers; size_t n_samplers; void * other;
    AT_CONTEXT_END
};
struct batch {
    int32_t n; int32_t * token; float * embd; int32_t * pos; int32_t * n_seq; int32_t ** seq;
    int8_t * logits;
    IN_BATCH
};

const char * llama_version(void) { return "9.9.9"; }
struct model_params llama_model_default_params(void) {
    struct model_params p = { .gpu_layers = -1, .split = 1, .load = -1, .lazy = 1, .extra_bufts = true };
    return p;
}
struct context_params llama_context_default_params(void) {
    struct context_params p = {
        .ctx = N_CTX, .batch = 2048, .ubatch = 512, .seq_max = 1, .threads = 4, .threads_batch = 4,
        .rope = -1, .pooling = -1, .attention = -1, .flash = -1, .ext = -1, .attn = -1, .fast = -1,
        .slow = -1, .defrag = -1, .k = 1, .v = 1, .kqv = true, .no_perf = true, .op = true, .swa = true };
    return p;
}
struct batch llama_batch_init(int32_t n, int32_t embd, int32_t seqs) {
    struct batch b = { 0 };
    b.token = malloc(4); b.pos = malloc(4); b.n_seq = malloc(4); b.seq = malloc(8); b.logits = malloc(1);
    return b;
}
void llama_batch_free(struct batch b) {
    free(b.token); free(b.pos); free(b.n_seq); free(b.seq); free(b.logits);
}
"""


def compiler(name: str = "gcc") -> str:
    """The path of a compiler; skips the test where there is none."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here to build the library of this test")
    return found


def build(path: Path, source: str, *options: str, language: str = "c", by: str = "") -> Path:
    """Compile text in `c` or `cpp` into a shared library. by: the compiler, if not that of the language."""
    text = path.with_suffix(f".{language}")
    text.write_text(source)
    name = by or ("gcc" if language == "c" else "g++")
    subprocess.run(
        [compiler(name), "-shared", "-fPIC", "-O1", "-o", str(path), str(text), *options],
        check=True,
    )
    return path


def fake_llamacpp(path: Path, *changes: str, without: Sequence[str] = ()) -> Path:
    """A library with the functions and structs of llama.cpp 0.5.0, none of which does anything.

    changes: macros of its source as `-D` takes them. without: functions that it lacks. Each has a name of its
    own: the system's loader returns an earlier library of the same path, even if that file is gone.
    """
    path = path.with_stem(f"{path.stem}-{next(_NUMBERS)}")
    stubs = [*_FUNCTIONS, "llama_init_from_model", "llama_model_load_from_file"]
    source = _SOURCE + "".join(
        f"void * {name}(void) {{ return 0; }}\n" for name in stubs if name not in (*_OWN, *without)
    )
    return build(path, source, *(f"-D{change}" for change in changes))
