"""llama.cpp's library of pictures and sound, mtmd, as far as this package calls it.

Its functions are in the same shared object as llama.cpp's own, or in `libmtmd` beside it. The library calls its
interface experimental, so everything is checked as in c_api.py. A library that lacks a part can still run text.
"""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_void_p
from ctypes import c_uint8 as c_flag
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from localchat.errors import LocalchatError
from localchat_llamacpp.c_api import (
    OTHER_LIBRARY,
    DefaultsReport,
    Field,
    parameter_struct,
    set_prototype,
)
from localchat_llamacpp.native import library
from localchat_llamacpp.shared_object import load

EvalCallback: Final = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)
"""(tensor, ask, user data): whether to stop after the tensor, or whether to continue."""
TEXT, IMAGE, AUDIO = range(3)
"""Types of chunks."""
_MROPE_TYPES: Final = (8, 40)
"""llama.cpp's numbers of rotary embeddings whose positions have several dimensions."""
_LIBRARY_NAMES: Final = ("libmtmd.so", "libmtmd.dylib", "mtmd.dll")
_CONTEXT: Final = (
    Field("use_gpu", c_flag, 1),
    Field("device", c_void_p, None),
    Field("print_timings", c_flag, 1),
    Field("n_threads", c_int32, 4),
    Field("image_marker", c_void_p, None),
    Field("media_marker", c_size_t, range(1, 1 << 63)),
    Field("flash_attn_type", c_int, -1),
    Field("warmup", c_flag, 1),
    Field("image_min_tokens", c_int32, -1),
    Field("image_max_tokens", c_int32, -1),
    Field("cb_eval", EvalCallback, None),
    Field("cb_eval_user_data", c_void_p, None),
    Field("batch_max_tokens", c_int32, 1024),
    Field("progress_callback", c_void_p, None),
    Field("progress_callback_user_data", c_void_p, None),
)


class DecoderPosition(ctypes.Structure):
    """mtmd_decoder_pos: the position of a token of a picture."""

    _fields_ = (("t", c_uint32), ("x", c_uint32), ("y", c_uint32), ("z", c_uint32))


class InputPart(ctypes.Structure):
    """mtmd_input_part: a picture or a recording. Its text is never set here."""

    _fields_ = (("text", c_void_p), ("bitmap", c_void_p))


_FUNCTIONS: Final[Mapping[str, tuple[Any, Sequence[Any]]]] = {
    "mtmd_bitmap_free": (None, (c_void_p,)),
    "mtmd_bitmap_init": (c_void_p, (c_uint32, c_uint32, c_char_p)),
    "mtmd_bitmap_init_from_audio": (c_void_p, (c_size_t, POINTER(c_float))),
    "mtmd_decode_use_non_causal": (c_bool, (c_void_p, c_void_p)),
    "mtmd_encode_chunk": (c_int32, (c_void_p, c_void_p)),
    "mtmd_free": (None, (c_void_p,)),
    "mtmd_get_audio_sample_rate": (c_int, (c_void_p,)),
    "mtmd_get_output_embd": (POINTER(c_float), (c_void_p,)),
    "mtmd_helper_image_get_decoder_pos": (None, (c_void_p, c_int32, POINTER(DecoderPosition))),
    "mtmd_input_chunk_copy": (c_void_p, (c_void_p,)),
    "mtmd_input_chunk_free": (None, (c_void_p,)),
    "mtmd_input_chunk_get_n_pos": (c_int32, (c_void_p,)),
    "mtmd_input_chunk_get_n_tokens": (c_size_t, (c_void_p,)),
    "mtmd_input_chunk_get_placeholder": (c_void_p, (c_void_p,)),
    "mtmd_input_chunk_get_tokens_image": (c_void_p, (c_void_p,)),
    "mtmd_input_chunk_get_tokens_text": (POINTER(c_int32), (c_void_p, POINTER(c_size_t))),
    "mtmd_input_chunk_get_type": (c_int, (c_void_p,)),
    "mtmd_input_chunks_free": (None, (c_void_p,)),
    "mtmd_input_chunks_get": (c_void_p, (c_void_p, c_size_t)),
    "mtmd_input_chunks_init": (c_void_p, ()),
    "mtmd_input_chunks_size": (c_size_t, (c_void_p,)),
    "mtmd_log_set": (None, (c_void_p, c_void_p)),
    "mtmd_tokenize_from_parts": (
        c_int32,
        (c_void_p, c_void_p, POINTER(POINTER(InputPart)), c_size_t, c_bool),
    ),
}
_LLAMA_FUNCTIONS: Final[Mapping[str, tuple[Any, Sequence[Any]]]] = {
    "llama_model_n_embd_inp": (c_int32, (c_void_p,)),
    "llama_set_causal_attn": (None, (c_void_p, c_bool)),
}
_WITH_STRUCTS: Final = ("mtmd_context_params_default", "mtmd_init_from_file")


@cache
def media_library() -> SimpleNamespace:
    """Return the functions by their names in mtmd.h, once per process.

    Raises LocalchatError if this llama.cpp cannot read pictures and sound.
    """
    text = library()
    origin = text.origin.file
    llama = load(origin, text.origin.again)
    native = llama
    if not hasattr(llama, "mtmd_init_from_file"):
        native = load(_beside(origin), text.origin.again)
    functions = [*_FUNCTIONS, *_WITH_STRUCTS]
    missing = [name for name in functions if not hasattr(native, name)]
    missing += [name for name in _LLAMA_FUNCTIONS if not hasattr(llama, name)]
    if missing:
        raise LocalchatError(
            f"{origin} cannot read pictures and sound: it has no function {', '.join(missing[:3])}.",
            hint=OTHER_LIBRARY,
        )
    problem = DefaultsReport(native, "mtmd_context_params_default").problem(_CONTEXT)
    if problem:
        raise LocalchatError(
            f"{origin} cannot read pictures and sound: localchat does not know its structs ({problem}).",
            hint=OTHER_LIBRARY,
        )
    for source, table in ((native, _FUNCTIONS), (llama, _LLAMA_FUNCTIONS)):
        for name, (result, arguments) in table.items():
            set_prototype(source, name, result, arguments)
    parameters = parameter_struct("MediaParams", _CONTEXT)
    set_prototype(native, "mtmd_context_params_default", parameters, ())
    set_prototype(native, "mtmd_init_from_file", c_void_p, (c_char_p, c_void_p, parameters))
    callback: Any = text.callback
    native.mtmd_log_set(ctypes.cast(callback, c_void_p), None)
    return SimpleNamespace(
        **{name: getattr(native, name) for name in functions},
        **{name: getattr(llama, name) for name in _LLAMA_FUNCTIONS},
    )


def has_media_library() -> bool:
    """Return whether this llama.cpp can read pictures and sound."""
    try:
        media_library()
    except LocalchatError:
        return False
    return True


def uses_mrope(model: int) -> bool:
    """Return whether the positions of a model's tokens have several dimensions."""
    llama = library().api
    return int(llama.llama_model_rope_type(model)) in _MROPE_TYPES


def _beside(file: Path) -> Path:
    """Return the library of pictures and sound beside a library of llama.cpp."""
    paths = (file.with_name(name) for name in _LIBRARY_NAMES)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise LocalchatError(
            f"{file} cannot read pictures and sound: there is no libmtmd beside it.",
            hint=OTHER_LIBRARY,
        )
    return path
