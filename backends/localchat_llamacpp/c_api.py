"""llama.cpp's C API as far as this package calls it, bound to a loaded library.

Structs that are passed by value have no version and change every few releases. A field at a wrong offset causes
a crash or a wrong answer. So this module lists the known layouts as tables of fields with their defaults, and
rejects a library that reports other defaults.
"""

import ctypes
import platform
from collections.abc import Mapping, Sequence
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_size_t,
    c_uint32,
    c_void_p,
)
from ctypes import c_uint8 as c_flag
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeAlias

from localchat.errors import LocalchatError

_LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_ProgressCallback = ctypes.CFUNCTYPE(c_bool, c_float, c_void_p)
_AbortCallback = ctypes.CFUNCTYPE(c_bool, c_void_p)
_Tokens = POINTER(c_int32)
_Bytes = POINTER(ctypes.c_uint8)
_Floats = POINTER(c_float)


class NativeBatch(ctypes.Structure):
    """llama_batch."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", _Tokens),
        ("embd", _Floats),
        ("pos", _Tokens),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(_Tokens)),
        ("logits", POINTER(c_int8)),
    )


class BufferOverride(ctypes.Structure):
    """llama_model_tensor_buft_override: tensors whose names match go to this type of buffer."""

    _fields_ = (("pattern", c_char_p), ("buft", c_void_p))


_Default: TypeAlias = int | float | range | None


class Field(NamedTuple):
    """A field of a parameter struct."""

    name: str
    kind: Any
    default: _Default
    """Value that the library reports: a number, any of a range, or None for a null pointer."""


_NULL: Final = None
_ENUM: Final = range(-1, 16)
_THREADS: Final = range(1, 4097)

_MODEL: Final = (
    Field("devices", c_void_p, _NULL),
    Field("tensor_buft_overrides", c_void_p, _NULL),
    Field("n_gpu_layers", c_int32, range(-1, 1000)),
    Field("split_mode", c_int, _ENUM),
    Field("load_mode", c_int, _ENUM),
    Field("lazy_mode", c_int, _ENUM),
    Field("main_gpu", c_int32, 0),
    Field("tensor_split", c_void_p, _NULL),
    Field("progress_callback", _ProgressCallback, _NULL),
    Field("progress_callback_user_data", c_void_p, _NULL),
    Field("kv_overrides", c_void_p, _NULL),
    Field("vocab_only", c_flag, 0),
    Field("check_tensors", c_flag, 0),
    Field("use_extra_bufts", c_flag, 1),
    Field("no_host", c_flag, 0),
    Field("no_alloc", c_flag, 0),
    Field("load_mtp", c_flag, range(2)),
)
_CONTEXT_BEGIN: Final = (
    Field("n_ctx", ctypes.c_uint32, 512),
    Field("n_batch", ctypes.c_uint32, 2048),
    Field("n_ubatch", ctypes.c_uint32, 512),
    Field("n_seq_max", ctypes.c_uint32, 1),
    Field("n_rs_seq", ctypes.c_uint32, 0),
    Field("n_outputs_max", ctypes.c_uint32, 0),
    Field("n_outputs_max_per_seq", ctypes.c_uint32, range(2)),
    Field("n_threads", c_int32, _THREADS),
    Field("n_threads_batch", c_int32, _THREADS),
    Field("ctx_type", c_int, _ENUM),
    Field("rope_scaling_type", c_int, _ENUM),
    Field("pooling_type", c_int, _ENUM),
    Field("attention_type", c_int, _ENUM),
    Field("flash_attn_type", c_int, range(-1, 2)),
    Field("rope_freq_base", c_float, 0.0),
    Field("rope_freq_scale", c_float, 0.0),
    Field("yarn_ext_factor", c_float, -1.0),
    Field("yarn_attn_factor", c_float, -1.0),
    Field("yarn_beta_fast", c_float, -1.0),
    Field("yarn_beta_slow", c_float, -1.0),
    Field("yarn_orig_ctx", ctypes.c_uint32, 0),
    Field("defrag_thold", c_float, -1.0),
    Field("cb_eval", c_void_p, _NULL),
    Field("cb_eval_user_data", c_void_p, _NULL),
    Field("type_k", c_int, 1),
    Field("type_v", c_int, 1),
)
_CONTEXT_END: Final = (
    Field("abort_callback", c_void_p, _NULL),
    Field("abort_callback_data", c_void_p, _NULL),
    Field("embeddings", c_flag, 0),
    Field("offload_kqv", c_flag, 1),
    Field("no_perf", c_flag, 1),
    Field("op_offload", c_flag, 1),
    Field("swa_full", c_flag, 1),
    Field("kv_unified", c_flag, 0),
    Field("samplers", c_void_p, _NULL),
    Field("n_samplers", c_size_t, 0),
    Field("ctx_other", c_void_p, _NULL),
)
_CACHE_OF_EXPERTS: Final = (Field("moe_cache_size", c_size_t, 0),)


class Layout(NamedTuple):
    """The parameter structs of some releases."""

    releases: str
    """Releases that the layout was tested with."""
    model: Sequence[Field]
    context: Sequence[Field]


LAYOUTS: Final = (
    Layout(
        "llama.cpp 0.5.0 (llama-cpp-python 0.3.36)",
        _MODEL,
        (*_CONTEXT_BEGIN, *_CONTEXT_END),
    ),
    Layout(
        "llama.cpp 0.6.0 (xllamacpp 2026.10)",
        _MODEL,
        (*_CONTEXT_BEGIN, *_CACHE_OF_EXPERTS, *_CONTEXT_END),
    ),
)

_SPARE_BYTES: Final = 256
"""Bytes after the known fields, which pass on the defaults of a library's longer struct."""


def parameter_struct(name: str, fields: Sequence[Field]) -> Any:  # noqa: ANN401 - a class of ctypes made here
    """Return the struct of these fields, with spare bytes at its end."""
    members = [(field.name, field.kind) for field in fields]
    return type(
        name, (ctypes.Structure,), {"_fields_": [*members, ("spare", c_flag * _SPARE_BYTES)]}
    )


_Signature: TypeAlias = tuple[Any, Sequence[Any]]
_TOKEN_OF: Final = (c_int32, (c_void_p,))
_BOOL_OF: Final = (c_bool, (c_void_p,))
_DROP: Final = (None, (c_void_p,))

_GET_STATES: Final = "_Z26llama_get_embeddings_nextnP13llama_context"
_SET_STATES: Final = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
"""Symbols of the functions for prediction heads, which src/llama-ext.h declares in C++."""
_FUNCTIONS: Final[Mapping[str, _Signature]] = {
    _GET_STATES: (c_void_p, (c_void_p,)),
    _SET_STATES: (None, (c_void_p, c_bool, c_bool)),
    "ggml_backend_cpu_buffer_type": (c_void_p, ()),
    "ggml_backend_dev_count": (c_size_t, ()),
    "ggml_backend_dev_description": (c_char_p, (c_void_p,)),
    "ggml_backend_dev_get": (c_void_p, (c_size_t,)),
    "ggml_backend_dev_memory": (None, (c_void_p, POINTER(c_size_t), POINTER(c_size_t))),
    "ggml_backend_dev_name": (c_char_p, (c_void_p,)),
    "ggml_backend_dev_type": (c_int, (c_void_p,)),
    "llama_adapter_lora_init": (c_void_p, (c_void_p, c_char_p)),
    "llama_backend_init": (None, ()),
    "llama_batch_free": (None, (NativeBatch,)),
    "llama_batch_init": (NativeBatch, (c_int32, c_int32, c_int32)),
    "llama_decode": (c_int32, (c_void_p, NativeBatch)),
    "llama_encode": (c_int32, (c_void_p, NativeBatch)),
    "llama_free": _DROP,
    "llama_get_embeddings_seq": (_Floats, (c_void_p, c_int32)),
    "llama_get_logits": (c_void_p, (c_void_p,)),
    "llama_get_logits_ith": (_Floats, (c_void_p, c_int32)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_log_set": (None, (_LogCallback, c_void_p)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_memory_seq_cp": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_pos_max": (c_int32, (c_void_p, c_int32)),
    "llama_memory_seq_pos_min": (c_int32, (c_void_p, c_int32)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_model_free": _DROP,
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_has_decoder": _BOOL_OF,
    "llama_model_has_encoder": _BOOL_OF,
    "llama_model_is_diffusion": _BOOL_OF,
    "llama_model_is_hybrid": _BOOL_OF,
    "llama_model_is_recurrent": _BOOL_OF,
    "llama_model_n_embd_out": (c_int32, (c_void_p,)),
    "llama_model_n_head": (c_int32, (c_void_p,)),
    "llama_model_n_swa": (c_int32, (c_void_p,)),
    "llama_model_rope_type": (c_int, (c_void_p,)),
    "llama_print_system_info": (c_char_p, ()),
    "llama_set_abort_callback": (None, (c_void_p, _AbortCallback, c_void_p)),
    "llama_set_adapters_lora": (c_int32, (c_void_p, POINTER(c_void_p), c_size_t, _Floats)),
    "llama_set_n_threads": (None, (c_void_p, c_int32, c_int32)),
    "llama_state_seq_get_data": (c_size_t, (c_void_p, _Bytes, c_size_t, c_int32)),
    "llama_state_seq_get_data_ext": (c_size_t, (c_void_p, _Bytes, c_size_t, c_int32, c_uint32)),
    "llama_state_seq_get_size": (c_size_t, (c_void_p, c_int32)),
    "llama_state_seq_get_size_ext": (c_size_t, (c_void_p, c_int32, c_uint32)),
    "llama_state_seq_set_data": (c_size_t, (c_void_p, _Bytes, c_size_t, c_int32)),
    "llama_state_seq_set_data_ext": (c_size_t, (c_void_p, _Bytes, c_size_t, c_int32, c_uint32)),
    "llama_supports_gpu_offload": (c_bool, ()),
    "llama_synchronize": _DROP,
    "llama_token_to_piece": (c_int32, (c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool)),
    "llama_tokenize": (c_int32, (c_void_p, c_char_p, c_int32, _Tokens, c_int32, c_bool, c_bool)),
    "llama_version": (c_char_p, ()),
    "llama_vocab_bos": _TOKEN_OF,
    "llama_vocab_eos": _TOKEN_OF,
    "llama_vocab_eot": _TOKEN_OF,
    "llama_vocab_fim_mid": _TOKEN_OF,
    "llama_vocab_fim_pad": _TOKEN_OF,
    "llama_vocab_fim_pre": _TOKEN_OF,
    "llama_vocab_fim_rep": _TOKEN_OF,
    "llama_vocab_fim_sep": _TOKEN_OF,
    "llama_vocab_fim_suf": _TOKEN_OF,
    "llama_vocab_get_add_bos": _BOOL_OF,
    "llama_vocab_get_attr": (c_int, (c_void_p, c_int32)),
    "llama_vocab_get_text": (c_char_p, (c_void_p, c_int32)),
    "llama_vocab_is_eog": (c_bool, (c_void_p, c_int32)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_vocab_sep": _TOKEN_OF,
    "llama_vocab_type": (c_int, (c_void_p,)),
}
"""Result and arguments of each function. `bind` binds those that take or return parameter structs."""
_WITH_STRUCTS: Final = (
    *("llama_context_default_params", "llama_init_from_model"),
    *("llama_model_default_params", "llama_model_load_from_file"),
)


def bind(native: ctypes.CDLL, name: str) -> SimpleNamespace:
    """Return the functions and structs by their names in llama.h. name: the library, for errors.

    Raises LocalchatError for a library that lacks a function, or whose structs are unknown.
    """
    missing = [
        function for function in (*_FUNCTIONS, *_WITH_STRUCTS) if not hasattr(native, function)
    ]
    if missing:
        more = ""
        if len(missing) > 3:
            more = f" and {len(missing) - 3} more"
        raise LocalchatError(
            f"{name} cannot be used: it has no function {', '.join(missing[:3])}{more}.",
            hint=OTHER_LIBRARY,
        )
    for function, (result, arguments) in _FUNCTIONS.items():
        set_prototype(native, function, result, arguments)
    text = (native.llama_version() or b"").decode("utf-8", "replace")
    layout = _layout(native, f"{name} (llama.cpp {text or 'of unknown version'})")
    model = parameter_struct("ModelParams", layout.model)
    context = parameter_struct("ContextParams", layout.context)
    set_prototype(native, "llama_model_default_params", model, ())
    set_prototype(native, "llama_context_default_params", context, ())
    set_prototype(native, "llama_model_load_from_file", c_void_p, (c_char_p, model))
    set_prototype(native, "llama_init_from_model", c_void_p, (c_void_p, context))
    return SimpleNamespace(
        **{function: getattr(native, function) for function in (*_FUNCTIONS, *_WITH_STRUCTS)},
        llama_get_embeddings_nextn=getattr(native, _GET_STATES),
        llama_set_embeddings_nextn=getattr(native, _SET_STATES),
        llama_batch=NativeBatch,
        llama_token_p=_Tokens,
        llama_log_callback=_LogCallback,
        llama_progress_callback=_ProgressCallback,
        ggml_abort_callback=_AbortCallback,
    )


OTHER_LIBRARY = (
    "Update localchat, or set LOCALCHAT_LLAMACPP_LIBRARY to another library: a path, xllamacpp, or "
    "llama-cpp-python."
)


def set_prototype(native: ctypes.CDLL, name: str, result: Any, arguments: Sequence[Any]) -> None:  # noqa: ANN401
    """Set the result and the arguments of a function."""
    function = getattr(native, name)
    function.restype = result
    function.argtypes = list(arguments)


def _layout(native: ctypes.CDLL, name: str) -> Layout:
    """Return the layout whose defaults this library reports. Raises LocalchatError."""
    problems = [_batch_problem(native)]
    if not problems[0]:
        model, context = (
            DefaultsReport(native, f"llama_{kind}_default_params") for kind in ("model", "context")
        )
        problems.clear()
        for layout in LAYOUTS:
            problem = model.problem(layout.model) or context.problem(layout.context)
            if not problem:
                return layout
            problems.append(f"of {layout.releases}: {problem}")
    raise LocalchatError(
        f"{name} cannot be used: localchat does not know its structs ({'; '.join(problems)}).",
        hint=OTHER_LIBRARY,
    )


class DefaultsReport:
    """The default parameters as the library wrote them."""

    def __init__(self, native: ctypes.CDLL, function: str) -> None:
        self._function = function
        self._bytes, self._written = _returned(native, function)

    def problem(self, fields: Sequence[Field]) -> str:
        """Return the first mismatch with a layout, or an empty text."""
        kind = parameter_struct("Checked", fields)
        values = kind.from_buffer_copy(self._bytes)
        for field in fields:
            value = getattr(values, field.name)
            if not _is_default(value, field.default):
                shown = "a pointer"
                if isinstance(value, int | float):
                    shown = str(value)
                return f"{self._function} reports {field.name} = {shown}"
        if self._written is None:
            return ""
        ranges = [
            (getattr(kind, member.name).offset, ctypes.sizeof(member.kind)) for member in fields
        ]
        for field, (start, width) in zip(fields, ranges, strict=True):
            if not self._written.issuperset(range(start, start + width)):
                return f"{self._function} reports no {field.name}"
        end = max(self._written) + 1
        spare_offset = kind.spare.offset
        if end > -(-spare_offset // 8) * 8:
            return f"{self._function} writes {end} bytes, and {spare_offset} are known"
        return ""


def _is_default(value: object, default: _Default) -> bool:
    if default is None:
        return not value
    if isinstance(default, range):
        return value in default
    return value == default


def _returned(
    native: ctypes.CDLL, name: str, *arguments: int
) -> tuple[bytes, frozenset[int] | None]:
    """Return a struct that a function returns by value, and the offsets that it wrote.

    x86-64 returns it through the address in the first argument. Calls over two different patterns show which
    bytes were not written. Elsewhere the offsets are None, and bytes after the struct mean nothing.
    """
    function = native[name]  # an object of its own, apart from the bound one
    size = 1024
    if platform.machine().lower() not in ("x86_64", "amd64"):
        function.restype = type("Room", (ctypes.Structure,), {"_fields_": [("all", c_flag * size)]})
        return bytes(function(*map(c_int32, arguments)).all), None
    function.restype, function.argtypes = c_void_p, [c_void_p, *[c_int32] * len(arguments)]
    rooms = [(c_flag * size)(*[pattern] * size) for pattern in (0xAA, 0x55)]
    for room in rooms:
        function(room, *arguments)
    first, second = map(bytes, rooms)
    return first, frozenset(index for index in range(size) if first[index] == second[index])


def _batch_problem(native: ctypes.CDLL) -> str:
    """Return a mismatch in a batch that the library creates, or an empty text."""
    room, written = _returned(native, "llama_batch_init", 4, 0, 1)
    batch = NativeBatch.from_buffer_copy(room)
    lists = batch.token, batch.pos, batch.n_seq_id, batch.seq_id, batch.logits
    if batch.n_tokens or batch.embd or not all(lists):
        return "llama_batch_init creates another kind of batch"
    if written is not None and max(written) >= ctypes.sizeof(NativeBatch):
        return (
            f"llama_batch has {max(written) + 1} bytes, and {ctypes.sizeof(NativeBatch)} are known"
        )
    native.llama_batch_free(batch)
    return ""
