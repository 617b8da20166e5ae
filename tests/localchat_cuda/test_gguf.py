"""GGUF files on the CUDA backend: names, order of rows, tokenizer, refusals, and a whole model."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from localchat.errors import ModelInvalid, UsageError
from localchat.fit.hardware import Gpu, Machine
from localchat.fit.load_options import LoadOptions
from localchat.model_files.architecture import model_shape
from localchat.model_files.open_gguf import read_header
from localchat_cuda.config.gguf import TOKENIZER_KINDS, config_of, layer_formats
from localchat_cuda.config.reader import parse_config
from localchat_cuda.gguf_files import open_gguf
from localchat_cuda.gguf_tokenizer import ARRAYS, tokenizer_files
from localchat_cuda.kernels.ggml import FEW_ROWS, GgmlWeight
from localchat_cuda.kernels.launch import interpreted
from localchat_cuda.plan import draft_plan, preflight
from localchat_cuda.plan.draft_plan import read_draft
from localchat_cuda.tokenizer import CheckpointTokenizer
from localchat_cuda.weights.gguf_source import GgufWeights
from localchat_cuda.weights.loader import load
from localchat_llamacpp.backend import LlamaCppBackend
from tests.support.gguf_files import Size, Value, llama, phi3
from tests.support.tiny_models import CPU, Tiny

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "localchat" / "guide" / "guide.gguf"
TEXTS = (
    "Hello, how's it going? 1234 x+y\n\n  def f():\n\treturn 3",
    "ñ 日本語 🎉 <|im_end|>",
    "  a ",
)

needs_guide = pytest.mark.skipif(not GUIDE.is_file(), reason="this checkout has no guide")


def _tiny_llama(path: Path, kind: gguf.GGMLQuantizationType) -> dict[str, npt.NDArray[np.float32]]:
    """Two projections as a checkpoint has them, written as llama.cpp's converter orders them."""
    draw, heads, key_heads, d, hidden = np.random.default_rng(0), 4, 2, 64, 256
    q, k = (draw.standard_normal((n * d, hidden)).astype(np.float32) for n in (heads, key_heads))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(256)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"t{number}" for number in range(8)])
    embedding = np.zeros((8, hidden), np.float32)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, d // 2, dtype=np.float32))
    for name, rows, count in (("attn_q", q, heads), ("attn_k", k, key_heads)):
        turned = rows.reshape(count, 2, d // 2, hidden).swapaxes(1, 2).reshape(rows.shape)
        stored = gguf.quants.quantize(turned, kind)
        writer.add_tensor(f"blk.0.{name}.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"q_proj": q, "k_proj": k}


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0])
def test_rows_of_queries_and_keys_are_in_the_order_of_a_checkpoint(
    tmp_path: Path, kind: gguf.GGMLQuantizationType
) -> None:
    path = tmp_path / "tiny.gguf"
    expected = _tiny_llama(path, kind)
    source = GgufWeights(read_header(path), CPU)
    for name, rows in expected.items():
        held = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
        full = f"model.layers.0.self_attn.{name}.weight"
        found = source.tensor(full, rows.shape, torch.float32)
        assert np.array_equal(found.numpy(), held)
    with pytest.raises(ModelInvalid, match=r"should have the shape \(1, 1\)"):
        source.tensor("model.embed_tokens.weight", (1, 1), torch.float32)


def test_kinds_of_layers_are_known_before_the_load(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    _tiny_llama(path, gguf.GGMLQuantizationType.Q8_0)
    stored = (("self_attn.k_proj", "Q8_0"), ("self_attn.q_proj", "Q8_0"))
    assert layer_formats(read_header(path)) == (stored,)


def test_stored_rope_factors_slow_each_pair(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    _tiny_llama(path, gguf.GGMLQuantizationType.F32)
    factors = tuple(float(each) for each in np.linspace(1, 8, 32, dtype=np.float32))
    config = parse_config(config_of(read_header(path), factors), "m")
    plain = replace(config.rotation, scaling=None).radians(64, 512)
    assert config.rotation.radians(64, 512) == pytest.approx(
        [each / factor for each, factor in zip(plain, factors, strict=True)]
    )


def test_a_draft_model_uses_the_rope_factors_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    _tiny_llama(path, gguf.GGMLQuantizationType.F32)
    monkeypatch.setattr(draft_plan, "tokenizer_kind", lambda header: "llama-bpe")
    plain = parse_config(config_of(read_header(path)), "m")
    draft = read_draft(str(path), plain)
    assert draft.config.rotation.radians(64, 512) != plain.rotation.radians(64, 512)


def test_other_architectures_formats_and_tokenizers_are_refused_for_llamacpp(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tiny.gguf"
    _tiny_llama(path, gguf.GGMLQuantizationType.F32)
    header = read_header(path)
    with pytest.raises(ModelInvalid, match="tokenizer") as caught:
        tokenizer_files(header)
    assert "Leave out --backend cuda" in caught.value.hint
    other = replace(header, metadata={**header.metadata, "general.architecture": "mamba"})
    with pytest.raises(ModelInvalid, match="the architecture mamba"):
        config_of(other)
    mixture = replace(header, metadata={**header.metadata, "llama.expert_count": 8})
    with pytest.raises(ModelInvalid, match="a mixture of experts from a GGUF file"):
        config_of(mixture)
    headless = replace(header, metadata={**header.metadata, "llama.attention.head_count": 0})
    with pytest.raises(ModelInvalid, match="without a common number of query heads"):
        config_of(headless)
    foreign = header.tensors[0]._replace(format=header.tensors[0].format._replace(name="IQ2_XS"))
    with pytest.raises(ModelInvalid, match="weights in IQ2_XS"):
        config_of(replace(header, tensors=(foreign, *header.tensors[1:])))


@needs_guide
def test_the_tokenizer_is_llamacpps() -> None:
    ours = CheckpointTokenizer(tokenizer_files(read_header(GUIDE, ARRAYS)))
    opened = LlamaCppBackend().open(GUIDE, print)
    theirs = opened.tokenizer
    for text in TEXTS:
        for special in (False, True):
            tokens = theirs.encode(text, special=special)
            assert ours.encode(text, special=special) == tokens
            assert [ours.piece(each) for each in tokens] == [theirs.piece(each) for each in tokens]
    assert (ours.bos, ours.eos, ours.add_bos) == (theirs.bos, theirs.eos, theirs.add_bos)
    opened.close()


def _sentencepiece(*, prefix: bool) -> dict[str, Value]:
    """Bytes, letters, and words whose merges are ranked by score alone."""
    marked = "\u2581"
    words = [
        *(
            marked,
            "he",
            "ll",
            "hell",
            "hello",
            f"{marked}h",
            f"{marked}hello",
            "lo",
            "wor",
            "ld",
            "or",
        ),
        *(
            "world",
            f"{marked}w",
            f"{marked}world",
            f"{marked}{marked}",
            "é",
            "日",
            "日本",
            "\n\n",
            "a" * 8,
        ),
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|im_end|>"]
    kinds = [2, 3, 3, *[6] * 256, 3]
    letters = sorted(set("".join(words)) - set(words))
    plain = [*words, *letters]
    scores = [0.0] * len(tokens) + [-float(rank * 7 % 41) for rank in range(len(plain))]
    tokens, kinds = [*tokens, *plain], [*kinds, *[1] * len(plain)]
    filler = [f"<fill{number}>" for number in range(320 - len(tokens))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*tokens, *filler],
        "tokenizer.ggml.token_type": [*kinds, *[5] * len(filler)],
        "tokenizer.ggml.scores": [*scores, *[0.0] * len(filler)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


@pytest.mark.parametrize(
    "vocabulary",
    [
        _sentencepiece(prefix=True),
        _sentencepiece(prefix=False),
        *({"tokenizer.ggml.pre": kind} for kind in TOKENIZER_KINDS if kind != "sentencepiece"),
    ],
    ids=["sentencepiece", "without a first space", *TOKENIZER_KINDS[:-1]],
)
def test_each_kind_of_tokenizer_cuts_as_llamacpp_does(
    tmp_path: Path, vocabulary: dict[str, Value]
) -> None:
    path = llama(Size(layers=1, extra=vocabulary)).write(tmp_path / "tiny.gguf")
    ours = CheckpointTokenizer(tokenizer_files(read_header(path, ARRAYS)))
    opened = LlamaCppBackend().open(path, print)
    theirs = opened.tokenizer
    texts = ("hello world", " hello  helloworld", "hé 日本語\n\n\n", "x" * 3 + "aaaaaaaaaaaa", "")
    marked = ("hello<|im_end|> hello", "a<unk> b", "Ko\u0308ln <|im_end|>e\u0301")
    for text in (*TEXTS, *texts, "HelloWorld isn't THE'S 123456 a//b\r\n", *marked):
        for special in (False, True):
            tokens = theirs.encode(text, special=special)
            assert ours.encode(text, special=special) == tokens, text
            assert [ours.piece(each) for each in tokens] == [theirs.piece(each) for each in tokens]
    assert (ours.bos, ours.eos, ours.add_bos) == (theirs.bos, theirs.eos, theirs.add_bos)
    opened.close()


def test_control_tokens_of_phi3_drop_the_white_space_after_them(tmp_path: Path) -> None:
    vocabulary = {**_sentencepiece(prefix=True), "general.name": "Phi-3 mini"}
    names = [*vocabulary["tokenizer.ggml.tokens"]]  # type: ignore[misc]
    names[names.index("<|im_end|>")] = "<|endoftext|>"
    vocabulary["tokenizer.ggml.tokens"] = names
    path = phi3(Size(layers=1, extra=vocabulary)).write(tmp_path / "tiny.gguf")
    ours = CheckpointTokenizer(tokenizer_files(read_header(path, ARRAYS)))
    opened = LlamaCppBackend().open(path, print)
    for text in ("hello</s> \n hello", "<s> hello", "hello<|endoftext|>\nhello"):
        tokens = ours.encode(text, special=True)
        assert tokens == opened.tokenizer.encode(text, special=True)
        assert tokens != ours.encode(text)
    strips = {token.text: token.rstrip for token in opened.tokenizer.special_tokens}
    assert strips == {token.text: token.rstrip for token in ours.special_tokens}
    assert strips == {"<unk>": False, "<s>": False, "</s>": True, "<|endoftext|>": False}
    opened.close()


def _first_rows(weight: object, rows: int) -> torch.Tensor | GgmlWeight:
    """The first rows of a weight; of a packed one, whole tiles of 16."""
    if not isinstance(weight, GgmlWeight):
        assert isinstance(weight, torch.Tensor)
        return weight[:rows]
    (part,) = weight.parts
    fewer: dict[str, Any] = {
        name: value[: rows // 16]
        for name, value in part._asdict().items()
        if isinstance(value, torch.Tensor)
    }
    return weight._replace(parts=(part._replace(features_out=rows, **fewer),))


@needs_guide
@pytest.mark.skipif(not interpreted(), reason="runs in Triton's interpreter")
def test_kernels_compute_the_logits_of_the_dequantized_model(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "tools" / "guide" / "checkpoint.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True)
    plain, model = Tiny(tmp_path, torch.float32), Tiny(tmp_path, torch.float32, kernels=True)
    config = open_gguf(GUIDE).config
    source = GgufWeights(read_header(GUIDE), CPU)
    model.weights = load(config, source, CPU, dtype=torch.float32)
    linears = model.weights.layers[0].linears
    assert all(isinstance(weight, GgmlWeight) for weight in linears.values())
    assert model.weights.packed_rows(CPU) == FEW_ROWS
    assert isinstance(model.weights.head, GgmlWeight)
    assert not source.unread()
    for each in (
        plain,
        model,
    ):  # one layer, and few tokens of the vocabulary: the interpreter is slow
        each.config = replace(each.config, layers=1)
        each.weights = replace(
            each.weights, layers=each.weights.layers[:1], head=_first_rows(each.weights.head, 512)
        )
    tokens = (5, 900, 31)
    exact = plain.prompt(tokens, 256).log_softmax(-1)
    for found in (model.prompt(tokens, 256), model.prompt(tokens, 3, packed=True)):
        error = (found.log_softmax(-1) - exact).norm() / exact.norm()
        assert error < 3e-5  # of activations in 16 bits


@needs_guide
def test_a_file_is_planned_before_it_is_opened() -> None:
    shape, gpu = model_shape(read_header(GUIDE)), Gpu(0, "H200", 141 << 30, 140 << 30, (9, 0))
    machine = Machine("cpu", frozenset(), 4, 1 << 34, 1 << 34, gpus=(gpu,))
    assert preflight.objection(shape) == ""
    plan = preflight.plan_for(shape, LoadOptions(context_tokens=512), machine)
    opened = open_gguf(GUIDE)
    assert plan.fits
    assert plan.weights_bytes >= sum(each.size_bytes for each in opened.headers[0].tensors)
    without = preflight.plan_for(shape, LoadOptions(), replace(machine, gpus=()))
    assert without.advice == ("Leave out --backend cuda: llama.cpp runs it on the CPU.",)
    with pytest.raises(UsageError, match="already quantized"):
        preflight.plan_for(shape, LoadOptions(quantize="int4"), machine)


def test_what_only_the_file_tells_is_left_to_llamacpp(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    _tiny_llama(path, gguf.GGMLQuantizationType.Q8_0)
    shape = model_shape(read_header(path))
    assert "tokenizer" in preflight.objection(shape)
    assert "only the file" in preflight.objection(replace(shape, header=None))
