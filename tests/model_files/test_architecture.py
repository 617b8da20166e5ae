"""Which layers cost memory, by architecture."""

from collections.abc import Mapping
from dataclasses import replace

from localchat.fit.memory_plan import CacheSpec, kv_layer_bytes, kv_types, weights_split
from localchat.model_files.architecture import ModelShape, model_shape
from localchat.model_files.gguf import Header, read_gguf
from tests.support.bytes_source import BytesSource
from tests.support.gguf_files import Gguf, Size, Value, gemma3, llama, mamba, qwen2


def header(raw: Gguf, extra: Mapping[str, Value] | None = None, name: str = "") -> Header:
    """A header with other metadata, and under another architecture's name."""
    metadata = dict(raw.metadata)
    if name:
        old = metadata["general.architecture"]
        assert isinstance(old, str)
        metadata = {key.replace(f"{old}.", f"{name}.", 1): value for key, value in metadata.items()}
        metadata["general.architecture"] = name
    return read_gguf(BytesSource(replace(raw, metadata=metadata | dict(extra or {})).encode()))


def shape(raw: Gguf, extra: Mapping[str, Value] | None = None, name: str = "") -> ModelShape:
    return model_shape(header(raw, extra, name))


def kv(
    found: ModelShape,
    cells: int = 256,
    kv_type: str = "f16",
    window_cells: int = 0,
    sequences: int = 1,
) -> int:
    return sum(kv_layer_bytes(found, CacheSpec(cells, window_cells or cells, sequences, kv_type)))


def test_plain_attention_is_layers_times_heads_times_width() -> None:
    found = shape(qwen2(Size(layers=3, kv_heads=2, head_width=64)))
    assert kv(found) == 256 * 3 * 2 * 64 * 2 * 2
    assert kv(found, kv_type="q8_0") == 256 * 3 * 2 * (128 // 32 * 34)
    assert kv(found, kv_type="q4_0") == 256 * 3 * 2 * (128 // 32 * 18)
    assert (found.window, found.recurrent, found.vocab_size) == (0, False, 320)


def test_heads_may_differ_from_layer_to_layer() -> None:
    found = shape(llama(Size(layers=3)), {"llama.attention.head_count_kv": [4, 0, 1]})
    assert [layer.keys for layer in found.layers] == [64, 0, 16]


def test_sliding_layers_need_their_window_only() -> None:
    found = shape(gemma3(Size(layers=12, window=64)))
    assert [layer.sliding for layer in found.layers] == ([True] * 5 + [False]) * 2
    row = 2 * 2 * 16 * 2
    assert kv(found, cells=1024, window_cells=256) == 2 * 1024 * row + 10 * 256 * row


def test_windows_follow_the_headers_pattern_and_the_architectures_rule() -> None:
    pattern: dict[str, Value] = {"gemma3.attention.sliding_window_pattern": [True, False, True]}
    assert [x.sliding for x in shape(gemma3(Size(layers=3)), pattern).layers] == [True, False, True]
    window: dict[str, Value] = {"gpt-oss.attention.sliding_window": 128}
    assert [x.sliding for x in shape(llama(Size(layers=3)), window, "gpt-oss").layers] == [
        True,
        False,
        True,
    ]
    dense_first = shape(llama(Size(layers=5)), None, "smallthinker")
    assert [x.sliding for x in dense_first.layers] == [False, True, True, True, False]
    # llama.cpp keeps everything for Mistral (architecture llama) whatever the header says.
    assert shape(llama(Size()), {"llama.attention.sliding_window": 64}).window == 0


def test_later_gemma_layers_reuse_earlier_keys() -> None:
    extra: dict[str, Value] = {
        "gemma4.attention.sliding_window": 64,
        "gemma4.attention.sliding_window_pattern": [True, False, True, False],
        "gemma4.attention.shared_kv_layers": 2,
        "gemma4.attention.key_length_swa": 8,
        "gemma4.attention.value_length_swa": 8,
    }
    found = shape(gemma3(Size(layers=4)), extra, "gemma4")
    assert [layer.keys for layer in found.layers] == [16, 32, 0, 0]


def test_latent_attention_keeps_one_row() -> None:
    extra: dict[str, Value] = {
        "deepseek2.attention.head_count_kv": 1,
        "deepseek2.attention.key_length": 576,
        "deepseek2.attention.value_length": 512,
        "deepseek2.attention.key_length_mla": 192,
        "deepseek2.attention.value_length_mla": 128,
    }
    found = shape(llama(Size()), extra, "deepseek2")
    assert [(layer.keys, layer.values) for layer in found.layers] == [(576, 0)] * 2


def test_recurrent_layers_cost_by_sequence_not_by_token() -> None:
    found = shape(mamba(Size(layers=3)))
    state = (4 - 1) * 128 + 16 * 128
    assert kv(found, cells=10_000, sequences=5) == 3 * 5 * state * 4
    assert found.recurrent


def test_hybrids_have_both_kinds_of_layers() -> None:
    ssm: dict[str, Value] = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16}
    jamba = {f"jamba.{key}": value for key, value in ssm.items()}
    found = shape(
        llama(Size(layers=3)), jamba | {"jamba.attention.head_count_kv": [0, 2, 0]}, "jamba"
    )
    assert [bool(layer.keys) for layer in found.layers] == [False, True, False]
    assert [bool(layer.state) for layer in found.layers] == [True, False, True]
    qwen = {f"qwen3next.{key}": value for key, value in ssm.items()}
    found = shape(llama(Size(layers=8)), qwen, "qwen3next")
    assert [bool(layer.keys) for layer in found.layers] == ([False] * 3 + [True]) * 2


def test_prediction_layers_keep_nothing() -> None:
    found = shape(llama(Size(layers=3)), {"llama.nextn_predict_layers": 1})
    assert (len(found.layers), found.all_layers) == (2, 3)


def test_kv_types_are_those_whose_blocks_divide_a_head() -> None:
    assert kv_types(shape(llama(Size(head_width=64)))) == (
        *("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"),
    )
    assert kv_types(shape(llama(Size(head_width=16)))) == ("f32", "f16", "bf16")


def test_values_are_padded_to_the_widest_layer_where_flash_attention_is_off() -> None:
    found = shape(llama(Size(layers=2)), {"llama.attention.head_count_kv": [1, 4]})
    padded = sum(kv_layer_bytes(found, CacheSpec(256, 256, 1, padded_values=True)))
    assert padded - kv(found) == 256 * 3 * 16 * 2


def test_weights_are_split_by_layer_from_the_end() -> None:
    untied, tied = shape(llama(Size(layers=4))), shape(qwen2(Size(layers=4)))
    embedding = 64 * 320 * 2
    assert weights_split(untied, 0) == (untied.weights_bytes, 0)
    assert weights_split(untied, 5) == (embedding, untied.weights_bytes - embedding)
    # The output goes first, and where it is the embedding too it is copied.
    assert weights_split(untied, 1) == (untied.weights_bytes - embedding - 256, embedding + 256)
    assert weights_split(tied, 1) == (tied.weights_bytes - 256, embedding + 256)
    block = sum(weight.size_bytes for weight in tied.weights if weight.layer == 3)
    assert weights_split(tied, 2).gpu == embedding + 256 + block
