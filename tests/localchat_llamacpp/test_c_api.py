"""Which libraries are taken, by their functions and the layout of their structs."""

import ctypes
import platform
from pathlib import Path

import pytest

from localchat.errors import LocalchatError
from localchat_llamacpp.c_api import LAYOUTS, bind
from localchat_llamacpp.native import library
from localchat_llamacpp.shared_object import load
from tests.support.fake_llamacpp import fake_llamacpp

X86_64 = platform.machine().lower() in ("x86_64", "amd64")


def _refusal(file: Path) -> LocalchatError:
    with pytest.raises(LocalchatError) as caught:
        bind(load(file), "the fake")
    return caught.value


@pytest.mark.parametrize("changes", [(), ("IN_CONTEXT=size_t experts;",)], ids=["0.5", "0.6"])
def test_a_library_of_a_known_layout_is_bound(changes: tuple[str, ...], tmp_path: Path) -> None:
    api = bind(load(fake_llamacpp(tmp_path / "fake.so", *changes)), "the fake")
    wish = api.llama_context_default_params()
    assert (wish.n_ctx, wish.no_perf, wish.swa_full, wish.kv_unified) == (512, 1, 1, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("IN_SIZES=uint32_t one_more;", "llama_context_default_params"),
        ("IN_CONTEXT=void *two_more[2];", "llama_context_default_params"),
        ("IN_MODEL=void *one_more;", "llama_model_default_params"),
        ("N_CTX=4096", "n_ctx = 4096"),
        pytest.param("AT_CONTEXT_END=void *one_more;", "writes 168 bytes, and 160 are known",
                     marks=pytest.mark.skipif(not X86_64, reason="the end of a struct is not seen here")),
        pytest.param("IN_BATCH=void *one_more;", "llama_batch has 64 bytes, and 56 are known",
                     marks=pytest.mark.skipif(not X86_64, reason="the end of a struct is not seen here")),
    ],
)  # fmt: skip
def test_a_struct_with_one_field_more_or_other_defaults_is_refused(
    change: str, words: str, tmp_path: Path
) -> None:
    problem = _refusal(fake_llamacpp(tmp_path / "fake.so", change))
    assert problem.message.startswith(
        "the fake (llama.cpp 9.9.9) cannot be used: localchat does not know"
    )
    assert words in problem.message
    assert "LOCALCHAT_LLAMACPP_LIBRARY" in problem.hint


def test_missing_functions_are_named(tmp_path: Path) -> None:
    one = _refusal(fake_llamacpp(tmp_path / "one.so", without=["llama_decode"]))
    assert one.message == "the fake cannot be used: it has no function llama_decode."
    four = ["llama_decode", "llama_encode", "llama_free", "llama_get_logits"]
    many = _refusal(fake_llamacpp(tmp_path / "four.so", without=four))
    assert "llama_decode, llama_encode, llama_free and 1 more" in many.message


def test_the_library_of_this_machine_has_a_layout_of_the_table() -> None:
    """What is bound is what the header of that release says, by the sizes that its compiler gave them."""
    api = library().api
    sizes = [
        (ctypes.sizeof(type(params)) - ctypes.sizeof(params.spare))
        for params in (api.llama_model_default_params(), api.llama_context_default_params())
    ]
    assert sizes in ([80, 160], [80, 168])
    assert len({layout.releases for layout in LAYOUTS}) == len(LAYOUTS)


def test_where_the_end_of_a_struct_cannot_be_seen_its_values_still_decide(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = load(fake_llamacpp(tmp_path / "known.so", "IN_CONTEXT=size_t experts;"))
    longer = load(fake_llamacpp(tmp_path / "longer.so", "AT_CONTEXT_END=void *one_more;"))
    other = load(fake_llamacpp(tmp_path / "other.so", "IN_SIZES=uint32_t one_more;"))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert bind(known, "known").llama_context_default_params().no_perf == 1
    # What comes after the fields that are known goes back as the library wrote it, and does no harm.
    assert bind(longer, "longer").llama_context_default_params().no_perf == 1
    with pytest.raises(LocalchatError, match="localchat does not know its structs"):
        bind(other, "other")
