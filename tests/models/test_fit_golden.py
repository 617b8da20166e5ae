"""`fit` for the whole catalogue on simulated machines, beside a table that is kept.

`python -m tests.models.test_fit_golden` writes the table anew; the difference is to be read.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from localchat.config.paths import find_paths
from localchat.fit.hardware import Gpu, Machine
from localchat.fit.load_options import LoadOptions
from localchat.model_files.architecture import ModelShape
from localchat.model_files.checkpoint import Checkpoint
from localchat.models.catalog import CatalogEntry, read_catalog
from localchat.models.names import parse
from localchat.models.published_shapes import gguf_shape, published_model, read_published_shapes
from localchat.units import size
from localchat_llamacpp.plan.memory_plan import plan
from tests.models.test_catalog import WITHOUT_SHAPE
from tests.support.published_checkpoints import published_checkpoint

TABLE = Path(__file__).with_name("fit_golden.txt")
GB = 10**9
X86 = frozenset({"avx2"})


def card(number: int, total: int, free: int) -> Gpu:
    return Gpu(number, "card", total * GB, free * GB)


MACHINES: dict[str, Machine] = {
    "laptop, 8 GB": Machine("laptop", X86, 4, 8 * GB, 6 * GB),
    "Mac, 16 GB": Machine("Mac", frozenset({"asimddp"}), 8, 16 * GB, 12 * GB, unified_memory=True),
    "24 GB card, 3 GB in use": Machine("desk", X86, 8, 32 * GB, 28 * GB, gpus=(card(0, 24, 21),)),
    "two 24 GB cards": Machine(
        "desk", X86, 16, 64 * GB, 58 * GB, gpus=(card(0, 24, 24), card(1, 24, 24))
    ),
    "141 GB card": Machine("server", X86, 16, 128 * GB, 120 * GB, gpus=(card(0, 141, 141),)),
}


def rows() -> Iterator[str]:
    shapes = read_published_shapes()
    catalogue = read_catalog(find_paths(os.environ))
    for name, machine in MACHINES.items():
        yield f"{name}"
        for entry in catalogue.values():
            if entry.name in shapes:
                yield _row(entry, machine)
        yield ""


def _row(entry: CatalogEntry, machine: Machine) -> str:
    found = entry.source(None)
    assert found is not None
    shape = gguf_shape(entry, read_published_shapes()[entry.name], found[1])
    assert shape is not None
    offload = bool(machine.gpus or machine.unified_memory)
    verdict = plan(shape, LoadOptions(max_slots=2), machine, can_offload=offload)
    word = "fits" if verdict.fits else "no"
    cells = (
        f"{entry.name}-{found[1].lower()}".ljust(38),
        word.ljust(4),
        f"{verdict.gpu_layers}/{verdict.layers} layers".rjust(13),
        f"{verdict.context_tokens:,} tokens".rjust(15),
        f"of {verdict.max_context_tokens:,}".rjust(11),
        verdict.kv_type.rjust(5),
        f"{size(verdict.total_bytes)} of {size(verdict.free_bytes)}".rjust(19),
    )
    return "  ".join(cells).rstrip()


def test_the_verdicts_are_those_of_the_table() -> None:
    assert list(rows()) == TABLE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", sorted(read_published_shapes()))
def test_a_shape_has_the_parameters_that_the_catalogue_says(name: str) -> None:
    entry = read_catalog(find_paths(os.environ))[name]
    found = entry.source(None)
    assert found is not None
    shape = gguf_shape(entry, read_published_shapes()[name], found[1])
    assert shape is not None
    # The makers of some models count the part that sees images, which is a file of its own.
    share = {"gemma3": 0.1, "smolvlm": 0.5, "smolvlm2": 0.3}.get(entry.family, 0.001)
    assert shape.parameters == pytest.approx(entry.parameters, rel=share)


def test_chat_models_without_a_shape_are_known() -> None:
    catalogue = read_catalog(find_paths(os.environ))
    chatting = {name for name, entry in catalogue.items() if "chat" in entry.uses}
    missing = chatting - read_published_shapes().keys()
    assert missing == {name for name in WITHOUT_SHAPE if "chat" in catalogue[name].uses}


@pytest.mark.parametrize(
    ("name", "quantization", "gigabytes"),
    [
        ("qwen2.5:7b", "Q4_K_M", 4.68),
        ("qwen2.5:7b", "Q8_0", 8.10),
        ("qwen2.5:14b", "Q4_K_M", 8.99),
        ("llama3.1:8b", "Q4_K_M", 4.92),
        ("llama3.1:8b", "Q6_K", 6.60),
        ("llama3.3:70b", "Q4_K_M", 42.52),
        ("llama3.2:1b", "Q4_K_M", 0.81),
        ("qwen3:30b-a3b", "Q4_K_M", 18.56),
        ("gemma3:12b", "Q4_K_M", 7.30),
        ("phi4:14b", "Q4_K_M", 9.05),
        ("gpt-oss:20b", "MXFP4", 12.11),
        ("qwen3.5:2b", "Q4_K_M", 1.281),
        ("qwen3.5:4b", "Q4_K_M", 2.740),
        ("qwen3.6:27b", "Q4_K_M", 19.096),
        ("gemma4:26b-a4b", "Q4_0", 14.618),
        ("gemma4:31b", "Q4_0", 17.992),
        ("granite4:h-micro", "Q4_K_M", 1.943),
        ("glm-4.7-flash:30b-a3b", "Q4_K_M", 18.312),
        ("glm-4.7-flash:30b-a3b", "Q8_0", 31.843),
        ("ministral3:3b", "Q4_K_M", 2.147),
        ("ministral3:14b", "Q4_K_M", 8.240),
        ("devstral-small-2:24b", "Q4_K_M", 14.334),
        ("muse-glimmer:30b", "UD-Q4_K_XL", 15.878),
        ("seed-oss:36b", "Q4_K_M", 21.762),
    ],
)
def test_gguf_shapes_are_as_large_as_the_published_ones(
    name: str, quantization: str, gigabytes: float
) -> None:
    entry = read_catalog(find_paths(os.environ))[name]
    shape = gguf_shape(entry, read_published_shapes()[name], quantization)
    assert shape is not None
    assert shape.file_bytes / 1e9 == pytest.approx(gigabytes, rel=0.045)


@pytest.mark.parametrize(
    ("word", "gigabytes"),
    [
        # The repositories' files of weights.
        ("qwen2.5:7b-awq", 5.57),
        ("qwen2.5:7b-gptq-int4", 5.58),
        ("qwen2.5:7b-bf16", 15.23),
        ("llama3.1:70b-awq", 39.77),
        ("qwen3:8b-fp8", 9.44),
    ],
)
def test_checkpoints_are_as_large_as_the_published_ones(word: str, gigabytes: float) -> None:
    name, _, quantization = word.rpartition("-" if "gptq" not in word else "-gptq")
    quantization = word.removeprefix(f"{name}-")
    entry = read_catalog(find_paths(os.environ))[name]
    built = published_checkpoint(entry, read_published_shapes()[name], quantization)
    assert isinstance(built, Checkpoint)
    assert built.weights_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_an_embedding_model_has_its_pooling() -> None:
    built = published_model(parse("qwen3-embedding:0.6b", read_catalog(find_paths(os.environ))))
    assert isinstance(built, ModelShape)
    assert built.pooling == "last"


def test_a_checkpoint_has_no_published_shape() -> None:
    catalogue = read_catalog(find_paths(os.environ))
    assert published_model(parse("qwen2.5:7b-awq", catalogue)) is None


if __name__ == "__main__":
    TABLE.write_text("\n".join(rows()) + "\n", encoding="utf-8")
