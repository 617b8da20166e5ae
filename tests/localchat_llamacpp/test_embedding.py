"""Embedding models: the vectors of a reference whatever else is in the step; refusals; plans; the engine."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import PoolingType
from msgspec import structs

from localchat.backend_api.interface import LoadRequest
from localchat.engine.interface import Engine
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, TextPrompt
from localchat.errors import ContextExceeded, EngineClosed, UsageError
from localchat.fit.hardware import Gpu, read_machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.model_files.architecture import ModelShape, model_shape
from localchat.model_files.open_gguf import read_header
from localchat.models.info.gguf_info import describe_gguf
from localchat_llamacpp import LlamaCppBackend
from localchat_llamacpp.embedder import LlamaCppEmbedder
from localchat_llamacpp.model import GgufModel
from localchat_llamacpp.plan.embedding_plan import plan_embedding
from tests.support.embedding_reference import bert, pooled, qwen3, weights_of
from tests.support.gguf_files import Size, Value
from tests.support.gguf_files import llama as gguf_llama
from tests.support.llamacpp_models import BEGIN, END, write_bert, write_llama, write_qwen3_embedding

TEXTS = ["hello world", "a", "The quick brown fox jumps over the lazy dog. " * 3, "", "ünïcödé \0"]
Load = Callable[..., tuple[GgufModel, LlamaCppEmbedder]]


@pytest.fixture
def load() -> Iterator[Load]:
    opened: list[tuple[GgufModel, LlamaCppEmbedder]] = []

    def begin(path: Path, tokens: int = 256) -> tuple[GgufModel, LlamaCppEmbedder]:
        model = GgufModel(path)
        options = LoadRequest(
            model.plan(LoadOptions(context_tokens=tokens)), LoadOptions(threads=1), safe_mode=True
        )
        embedder = model.load_embedder(options, lambda done, total: True, print)
        assert isinstance(embedder, LlamaCppEmbedder)
        opened.append((model, embedder))
        return opened[-1]

    yield begin
    for model, embedder in opened:
        embedder.close()
        embedder.close()
        model.close()


@pytest.mark.parametrize(
    ("stated", "pooling"),
    [
        (PoolingType.MEAN, "mean"),
        (PoolingType.CLS, "cls"),
        (PoolingType.LAST, "last"),
        (PoolingType.NONE, "mean"),
        (None, "mean"),
    ],
)
def test_encoder_gives_the_vectors_of_the_reference_pooled_as_its_file_says(
    tmp_path: Path, load: Load, stated: PoolingType | None, pooling: str
) -> None:
    path = write_bert(tmp_path / "bert.gguf", pooling=stated)
    model, embedder = load(path)
    assert model.info.pooling == pooling
    tokens = [model.text_tokens(text) for text in TEXTS]
    weights = weights_of(path)
    for found, text in zip(embedder.embed(tokens), tokens, strict=True):
        np.testing.assert_allclose(found, pooled(bert(weights, text), pooling), atol=2e-3)


def test_decoder_gives_the_vectors_of_the_reference(tmp_path: Path, load: Load) -> None:
    path = write_qwen3_embedding(tmp_path / "qwen.gguf")
    model, embedder = load(path)
    tokens = [model.text_tokens(text) for text in TEXTS]
    weights = weights_of(path)
    for found, text in zip(embedder.embed(tokens), tokens, strict=True):
        np.testing.assert_allclose(found, pooled(qwen3(weights, text), "last"), atol=2e-3)


@pytest.mark.parametrize("write", [write_bert, write_qwen3_embedding])
def test_vector_of_a_text_does_not_depend_on_its_neighbours(
    write: Callable[[Path], Path], tmp_path: Path, load: Load
) -> None:
    model, embedder = load(write(tmp_path / "m.gguf"))
    many = [model.text_tokens(f"text {number} " * (1 + number % 7)) for number in range(40)]
    together = np.array(embedder.embed(many))
    alone = np.array([embedder.embed([text])[0] for text in many])
    np.testing.assert_allclose(together, alone, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-9)
    assert embedder.embed([]) == []


def test_text_as_long_as_the_model_reads_is_embedded(tmp_path: Path, load: Load) -> None:
    for tokens in (1, 7, 100):
        path = write_bert(tmp_path / "bert.gguf")
        _, embedder = load(path, tokens)
        assert embedder.context_tokens == tokens
        text = [(3 * place) % 200 for place in range(tokens)]
        found = embedder.embed([text, text[:1]])[0]
        np.testing.assert_allclose(found, pooled(bert(weights_of(path), text), "mean"), atol=2e-3)


def test_texts_begin_and_end_as_the_model_was_trained(tmp_path: Path, load: Load) -> None:
    model, _ = load(write_bert(tmp_path / "bert.gguf"))
    assert model.text_tokens("a") == [BEGIN, 97, END]
    assert model.text_tokens("") == [BEGIN, END]
    written = model.text_tokens("<|im_end|>")
    assert written.count(END) == 1  # markup in a text is text


def test_aborted_embedder_ends(tmp_path: Path, load: Load) -> None:
    model, embedder = load(write_bert(tmp_path / "bert.gguf"))
    embedder.abort()
    with pytest.raises(EngineClosed):
        embedder.embed([model.text_tokens("a")])


# ---------------------------------------------------------------------------- which models, and what they take


def read_shape(path: Path) -> ModelShape:
    return model_shape(read_header(path))


def test_backend_takes_embedding_models_and_no_rerankers(tmp_path: Path) -> None:
    objections = []
    for pooling in (PoolingType.MEAN, PoolingType.RANK):
        path = write_bert(tmp_path / f"{pooling.name}.gguf", pooling=pooling)
        objections.append(LlamaCppBackend().objection(read_shape(path)))
    assert objections == ["", "it is a reranker, which scores texts and writes none"]
    reranker = describe_gguf(read_header(tmp_path / "RANK.gguf"))
    assert (reranker.abilities, reranker.can) == (frozenset(), ())


@pytest.mark.parametrize(
    ("architecture", "said", "pooling"),
    [
        ("llama", {"pooling_type": 0}, ""),
        ("llama", {"pooling_type": 3}, "last"),
        ("llama", {"attention.causal": False}, "mean"),
        ("llama", {"attention.causal": True}, ""),
        ("dream", {"attention.causal": False}, ""),
        ("llama-embed", {}, "mean"),
    ],
)
def test_decoder_writes_unless_its_file_says_how_to_pool_or_that_it_sees_all(
    tmp_path: Path, architecture: str, said: dict[str, Value], pooling: str
) -> None:
    whole = gguf_llama(Size())
    metadata = {key.replace("llama", architecture): value for key, value in whole.metadata.items()}
    metadata |= {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": value for key, value in said.items()}
    shape = read_shape(replace(whole, metadata=metadata).write(tmp_path / "x.gguf"))
    assert shape.pooling == pooling


def _plan(folder: Path) -> MemoryPlan:
    return GgufModel(folder / "b.gguf").plan(LoadOptions())


def test_plan_of_an_encoder_has_no_cache_and_one_of_a_decoder_has(tmp_path: Path) -> None:
    machine = read_machine()
    for write, cached in ((write_bert, False), (write_qwen3_embedding, True)):
        shape = read_shape(write(tmp_path / "m.gguf"))
        plan = plan_embedding(shape, LoadOptions(), machine, can_offload=False)
        assert plan.fits and (plan.kv_bytes > 0) == cached
        assert plan.context_tokens == 4096
        assert plan.total_bytes < plan.free_bytes


def test_longest_text_follows_the_memory_and_too_little_is_no_fit(tmp_path: Path) -> None:
    shape = read_shape(write_bert(tmp_path / "b.gguf"))
    machine = replace(read_machine(), ram_total_bytes=4_000_000_000)
    most = plan_embedding(shape, LoadOptions(), machine, can_offload=False)
    tight = replace(machine, ram_free_bytes=250_000_000 + most.total_bytes - 1_000_000)
    less = plan_embedding(shape, LoadOptions(), tight, can_offload=False)
    assert less.fits and 512 <= less.context_tokens < most.context_tokens
    none = plan_embedding(
        shape, LoadOptions(), replace(machine, ram_free_bytes=0), can_offload=False
    )
    assert not none.fits
    asked = plan_embedding(shape, LoadOptions(context_tokens=4096), tight, can_offload=False)
    assert not asked.fits and asked.max_context_tokens >= 512
    beyond = plan_embedding(shape, LoadOptions(context_tokens=5000), machine, can_offload=False)
    assert beyond.fits and beyond.context_tokens == 4096


def test_a_gpu_that_is_required_and_not_used_is_no_fit(tmp_path: Path) -> None:
    shape = read_shape(write_bert(tmp_path / "b.gguf"))
    machine, requested = read_machine(), LoadOptions(require_gpu=True)
    refused = plan_embedding(shape, requested, machine, can_offload=False)
    assert not refused.fits and "a GPU is required" in refused.missing
    card = Gpu(0, "a card", 8_000_000_000, 7_000_000_000)
    with_card = replace(machine, gpus=(card,))
    assert plan_embedding(shape, requested, with_card, can_offload=True).fits
    little = structs.replace(requested, gpu_limit_bytes=1_000_000)
    assert not plan_embedding(shape, little, with_card, can_offload=True).fits


@pytest.mark.parametrize("write", [write_bert, write_qwen3_embedding])
def test_a_user_is_told_that_it_embeds_and_does_not_chat(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    facts = describe_gguf(read_header(write(tmp_path / "m.gguf")))
    assert facts.abilities == {"embedding"}
    assert "embeddings" in facts.can[0]
    assert any("generate text" in sentence for sentence in facts.cannot)
    assert (facts.kv_bytes_per_token == 0) == (write is write_bert)
    assert "embedding" not in describe_gguf(read_header(write_llama(tmp_path / "l.gguf"))).abilities


# ---------------------------------------------------------------------------- through the engine


@pytest.fixture
def engine_of() -> Iterator[Callable[[Path], Engine]]:
    engines: list[LocalEngine] = []

    def begin(path: Path) -> Engine:
        options = EngineOptions(
            path, load=LoadOptions(context_tokens=64, threads=1), name="the model"
        )
        engines.append(LocalEngine(options, notify=lambda text: None))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def test_engine_embeds_counts_tokens_and_writes_no_text(
    tmp_path: Path, engine_of: Callable[[Path], Engine]
) -> None:
    path = write_bert(tmp_path / "bert.gguf")
    engine = engine_of(path)
    vectors = engine.embed(["a", "hello world"])
    assert vectors.tokens == (3, 4)
    expected = pooled(bert(weights_of(path), [BEGIN, 97, END]), "mean")
    np.testing.assert_allclose(vectors[0], expected, atol=2e-3)
    with pytest.raises(UsageError, match="embedding model"):
        list(engine.generate(GenerateRequest(prompt=TextPrompt("hello"))))
    with pytest.raises(ContextExceeded, match="text 2 of 2") as caught:
        engine.embed(["a", "b" * 100])
    assert caught.value.details == {
        "prompt_tokens": 102,
        "context_tokens": 64,
        "embeds": True,
    }
    cut = engine.embed(["a", "b" * 100], truncate=True)
    assert cut.tokens == (3, 64)
    expected = pooled(bert(weights_of(path), [BEGIN, *[98] * 62, END]), "mean")
    np.testing.assert_allclose(cut[1], expected, atol=2e-3)
    info = engine.info()
    assert info.loaded and info.context_tokens == 64 and info.actual_bytes > 0
    assert "embeddings" in info.limits[0]
    stats = engine.stats()
    assert (stats.finished, stats.prompt_tokens) == (2, 7 + 67)
    assert stats.failed == {"usage": 1, "context_exceeded": 1}
    assert engine.embed([]) == []


def test_model_that_writes_refuses_to_embed(
    tmp_path: Path, engine_of: Callable[[Path], Engine]
) -> None:
    engine = engine_of(write_llama(tmp_path / "llama.gguf"))
    with pytest.raises(UsageError, match="cannot compute embeddings"):
        engine.embed(["a"])
