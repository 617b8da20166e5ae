"""LoRA adapters: logits equal merged weights and PEFT, requests do not mix, and bad files are refused early."""

import copy
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localchat.backend_api.interface import (
    LAST,
    Drop,
    Enter,
    LoadRequest,
    LogitsPosition,
    SamplingParams,
    StepPlan,
    StepRow,
)
from localchat.errors import LocalchatError, ModelInvalid, ModelMissing, UsageError
from localchat.fit.load_options import LoadOptions, LoraAdapter
from localchat.model_files.adapter import read_adapter
from localchat.model_files.open_gguf import read_header
from localchat_llamacpp.adapters import open_adapters
from localchat_llamacpp.convert.peft import converted_adapter
from localchat_llamacpp.model import GgufModel
from localchat_llamacpp.quantize import GgufQuantizer
from tests.support.llamacpp_core import Core, Received, request
from tests.support.llamacpp_models import VOCAB
from tests.support.loading import load_model
from tests.support.peft_folders import MODULES, merge, write_peft
from tests.support.tiny_checkpoints import logprobs, write_checkpoint

TOKENS = [(7 * place * place + 11 * place) % VOCAB for place in range(40)]
SECOND = 0.5
"""Scale of the second adapter."""
RANK = 4
ALPHA = 8


class Scene:
    """A tiny model with two adapters."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.model = write_checkpoint(folder / "in", kind)
        self.path = folder / "model.gguf"
        GgufQuantizer().write(folder / "in", self.path, "F32", 2, lambda done, total: None)
        first = write_peft(folder / "first", self.model, seed=1, rank=RANK, lora_alpha=ALPHA)
        second = write_peft(folder / "second", self.model, seed=2, rank=RANK, use_rslora=True)
        self.folders = first, second
        self.lora = (LoraAdapter(str(first)), LoraAdapter(str(second), SECOND))

    def opened(self) -> GgufModel:
        """Return the model with its adapters checked."""
        model = GgufModel(self.path)
        model.plan(LoadOptions(context_tokens=512, gpu_layers=0, lora=self.lora))
        model.close()
        return model


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALCHAT_DATA_DIR", str(tmp_path / "data"))


def say(core: Core, **fields: Any) -> Received:
    return core.say(request(TOKENS, max_tokens=12, prompt_logprobs=20, **fields))


def worst(received: Received, expected: Any) -> float:
    """Return the largest difference of a log probability of the prompt."""
    pairs = [
        (value, float(expected[place, token]))
        for place, entry in enumerate(received.prompt_logprobs)
        for token, _, value in entry.top
    ]
    assert pairs
    return max(abs(ours - theirs) for ours, theirs in pairs)


def test_logits_equal_those_of_merged_weights(scene: Scene) -> None:
    adapters = scene.opened().info.adapters
    expected: dict[tuple[tuple[int, float], ...], Any] = {(): logprobs(scene.model, TOKENS)}
    scales = ALPHA / RANK, ALPHA / RANK**0.5
    for number, folder in enumerate(scene.folders):
        merge(scene.model, folder, scales[number])
        expected[((number, 1.0),)] = logprobs(scene.model, TOKENS)
        merge(scene.model, folder, -scales[number])
    with load_model(scene.path, lora=scene.lora) as runner:
        core = Core(runner, adapters=adapters)
        for lora, reference in expected.items():
            # The KV cache is in f16.
            assert worst(say(core, lora=lora), reference) < 0.03
        merge(scene.model, scene.folders[0], scales[0])
        merge(scene.model, scene.folders[1], scales[1] * SECOND)
        both = logprobs(scene.model, TOKENS)
        merge(scene.model, scene.folders[0], -scales[0])
        merge(scene.model, scene.folders[1], -scales[1] * SECOND)
        assert worst(say(core), both) < 0.03
    spread = abs(expected[()] - expected[((0, 1.0),)]).max()
    assert spread > 1, "the adapter changes too little for this test"


# Of names that PEFT uses and transformers has deprecated.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}], ids=["plain", "rslora"])
def test_logits_and_text_equal_those_of_peft_until_it_unloads_the_adapter(
    scene: Scene, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The adapter is random, and PEFT itself writes it."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=8 * ALPHA,
        target_modules=list(MODULES),
        init_lora_weights=False,
        **changes,
    )
    adapted = peft.get_peft_model(copy.deepcopy(scene.model), config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    model = GgufModel(scene.path)
    lora = (LoraAdapter(str(tmp_path / "adapter")),)
    model.plan(LoadOptions(context_tokens=512, gpu_layers=0, lora=lora))
    adapters = model.info.adapters
    model.close()
    prompt = torch.tensor([TOKENS])
    with load_model(scene.path, lora=lora, kv_type="f32") as runner:
        core = Core(runner, adapters=adapters)
        received = say(core, temperature=0.0)
        unloaded = say(core, lora=(), temperature=0.0)
    with load_model(scene.path, kv_type="f32") as runner:
        base = say(Core(runner), temperature=0.0)
    with_adapter = logprobs(adapted, TOKENS)
    # Gemma's GELU comes from a table in f16; the others are below 0.0001.
    assert worst(received, with_adapter) < 0.01
    text = adapted.generate(input_ids=prompt, max_new_tokens=12, do_sample=False)
    assert received.tokens == text[0, len(TOKENS) :].tolist()
    without_adapter = logprobs(adapted.unload(), TOKENS)
    assert abs(with_adapter - without_adapter).max() > 1, "the adapter changes too little"
    assert worst(unloaded, without_adapter) < 0.01
    assert unloaded.tokens == base.tokens != received.tokens


def test_without_adapters_and_at_scale_zero_the_text_is_the_base_models(llama: Scene) -> None:
    adapters = llama.opened().info.adapters
    with load_model(llama.path) as runner:
        base = say(Core(runner)).tokens
    with load_model(llama.path, lora=llama.lora) as runner:
        core = Core(runner, adapters=adapters)
        changed = say(core, lora=((0, 1.0),)).tokens
        assert say(core, lora=()).tokens == base
        assert say(core, lora=((0, 0.0), (1, 0.0))).tokens == base
        assert say(core, lora=((0, 1.0),)).tokens == changed != base


def test_neighbors_with_other_adapters_do_not_mix_and_share_no_cache(llama: Scene) -> None:
    adapters = llama.opened().info.adapters
    kinds: list[tuple[tuple[int, float], ...]] = [(), ((0, 1.0),), ((0, 0.5),), ((1, 1.0),), ()]
    with load_model(llama.path, lora=llama.lora) as runner:
        core = Core(runner, adapters=adapters)
        alone = [say(core, lora=lora).tokens for lora in kinds]
    assert len(set(map(tuple, alone))) == 4
    with load_model(llama.path, lora=llama.lora) as runner:
        core = Core(runner, adapters=adapters)
        for _ in range(2):
            ids = [core.ask(request(TOKENS, max_tokens=12, lora=lora)) for lora in kinds]
            core.run_until_idle()
            assert [core.received[id_].tokens for id_ in ids] == alone
        # The cache now has the prompt under each set of adapters, but not under this one.
        fresh = say(core, lora=((1, 0.25),))
        assert fresh.done.usage.cached_tokens == 0
        assert core.say(request(TOKENS, lora=((1, 1.0),))).done.usage.cached_tokens > 0


def test_a_sequence_that_leaves_and_enters_with_one_plan_keeps_its_adapters(llama: Scene) -> None:
    def tokens(leave: tuple[int, ...]) -> list[int]:
        prompt = tuple(TOKENS)
        sampling = SamplingParams(temperature=0.0)
        enter = Enter(0, 0, prompt, len(prompt), sampling, adapters=(1.0, 0.0))
        row = StepRow(0, 0, 0, prompt)
        position = LogitsPosition(0, len(prompt) - 1, 0)
        plans = [StepPlan(1, (row,), (position,), memory=(Drop(0),), enter=(enter,), leave=leave)]
        plans += [
            StepPlan(number, (StepRow(0, 0, len(prompt) + number - 2, LAST),), (first,))
            for number, first in enumerate([LogitsPosition(0, 0, 0)] * 8, 2)
        ]
        sampled = []
        for plan in plans:
            runner.launch(plan)
            sampled.append(runner.collect().samples[0].token)
        return sampled

    with load_model(llama.path, lora=llama.lora) as runner:
        expected = tokens(())
        assert tokens((0,)) == expected


def test_an_unknown_adapter_and_a_bad_scale_are_refused(llama: Scene) -> None:
    with load_model(llama.path, lora=llama.lora) as runner:
        core = Core(runner, adapters=llama.opened().info.adapters)
        for lora in ((2, 1.0),), ((-1, 1.0),), ((0, float("nan")),), ((0, 1e39),):
            with pytest.raises(UsageError, match="LoRA adapter"):
                core.ask(request(TOKENS, lora=lora))


def test_the_plan_counts_the_bytes_of_the_adapters(llama: Scene) -> None:
    model = GgufModel(llama.path)
    options = LoadOptions(context_tokens=512, gpu_layers=0)
    plain = model.plan(options)
    adapted = model.plan(LoadOptions(context_tokens=512, gpu_layers=0, lora=llama.lora))
    header = read_header(llama.path)
    sizes = sum(adapter.size_bytes for adapter in open_adapters(llama.lora, header))
    assert adapted.weights_bytes - plain.weights_bytes == sizes > 0
    runner = model.load(
        LoadRequest(adapted, LoadOptions(lora=llama.lora), safe_mode=True),
        lambda _done, _total: True,
        lambda _note: None,
    )
    # llama.cpp logs hundredths of a MiB.
    assert runner.memory().weights_bytes - header.weights_bytes > sizes - 20_000
    runner.close()
    model.close()


def test_a_conversion_is_reused_until_the_adapter_changes(llama: Scene, tmp_path: Path) -> None:
    header = read_header(llama.path)
    folder = shutil.copytree(llama.folders[0], tmp_path / "adapter")
    first = converted_adapter(folder, header)
    written = first.stat().st_mtime_ns
    assert converted_adapter(folder, header) == first
    assert first.stat().st_mtime_ns == written
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 2}))
    second = converted_adapter(folder, header)
    assert second != first
    assert not first.exists()
    adapter = read_adapter(second)
    assert adapter.header.metadata["adapter.lora.alpha"] == 2
    assert {b.shape[0] for _, b in adapter.pairs.values()} == {RANK}


def test_a_read_only_home_does_not_prevent_a_conversion(
    llama: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = read_header(llama.path)
    expected = converted_adapter(llama.folders[0], header).read_bytes()
    monkeypatch.setenv("LOCALCHAT_DATA_DIR", "/proc/nowhere")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = converted_adapter(llama.folders[0], header)
    assert path.read_bytes() == expected
    assert path.parent.parent == tmp_path
    path.parent.chmod(0o777)
    with pytest.raises(LocalchatError, match="cannot be written"):
        converted_adapter(llama.folders[0], header)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "unexpected value"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"alpha_pattern": {"q_proj": "4"}}, "lora_alpha"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "lora_alpha"),
        ({"alpha_pattern": ["q_proj"]}, "unexpected value"),
        ({"alpha_pattern": {"(": 4}}, "unexpected value"),
        ({"alpha_pattern": {"(.*.*.*.*.*.*.*.*.*)+x": 4}}, "alpha_pattern"),
        ({"alpha_pattern": {"x" * 600: 4}}, "alpha_pattern"),
    ],
)
def test_other_methods_of_peft_are_refused(
    changes: dict[str, Any], expected: str, llama: Scene, tmp_path: Path
) -> None:
    folder = shutil.copytree(llama.folders[0], tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelInvalid, match=expected):
        converted_adapter(folder, read_header(llama.path))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_embedding_and_output_may_be_adapted(
    targets: list[str], llama: Scene, tmp_path: Path
) -> None:
    """PEFT saves both weights of the model with such an adapter."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=RANK, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(llama.model), config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    model = GgufModel(llama.path)
    lora = (LoraAdapter(str(tmp_path / "adapter")),)
    model.plan(LoadOptions(context_tokens=512, gpu_layers=0, lora=lora))
    with load_model(llama.path, lora=lora) as runner:
        core = Core(runner, adapters=model.info.adapters)
        assert worst(say(core), logprobs(adapted, TOKENS)) < 0.03
    model.close()


def add_copy(folder: Path, name: str, weight: torch.Tensor) -> None:
    """Add a weight of the model to an adapter, and a LoRA of the output."""
    file = folder / "adapter_model.safetensors"
    stem = "base_model.model.lm_head.lora"
    rows, width = weight.shape
    pair = {
        f"{stem}_A.weight": torch.ones(RANK, width),
        f"{stem}_B.weight": torch.ones(rows, RANK),
    }
    save_file({**load_file(file), **pair, name: weight.contiguous()}, file)


def test_a_copy_of_the_models_own_output_is_skipped_unless_it_has_new_tokens(
    llama: Scene, tmp_path: Path
) -> None:
    header = read_header(llama.path)
    weight = llama.model.lm_head.weight.detach()
    name = "base_model.model.lm_head.base_layer.weight"
    folder = shutil.copytree(llama.folders[0], tmp_path / "same")
    add_copy(folder, name, weight)
    assert "output.weight" in read_adapter(converted_adapter(folder, header)).pairs
    folder = shutil.copytree(llama.folders[0], tmp_path / "more")
    add_copy(folder, name, torch.cat([weight, weight[:8]]))
    with pytest.raises(ModelInvalid, match="has the shape"):
        converted_adapter(folder, header)
    folder = shutil.copytree(llama.folders[0], tmp_path / "trained")
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.weight"] = weight.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ModelInvalid, match="is not a matrix of a LoRA"):
        converted_adapter(folder, header)


def test_the_output_of_a_tied_model_cannot_be_adapted_and_the_error_names_the_folder(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, "qwen3")
    add_copy(
        scene.folders[0],
        "base_model.model.lm_head.base_layer.weight",
        scene.model.lm_head.weight.detach(),
    )
    lora = (LoraAdapter(str(scene.folders[0])),)
    with pytest.raises(ModelInvalid, match=r"^first changes the token embedding or the output"):
        open_adapters(lora, read_header(scene.path))


def test_an_adapter_that_does_not_fit_is_refused_before_the_load(
    llama: Scene, tmp_path: Path
) -> None:
    header = read_header(llama.path)
    good = converted_adapter(llama.folders[0], header)

    def opened(path: Path) -> None:
        open_adapters((LoraAdapter(str(path)),), header)

    opened(good)
    (tmp_path / "other").mkdir()
    other = Scene(tmp_path / "other", "qwen3")
    with pytest.raises(ModelInvalid, match="architecture qwen3, and this is llama"):
        opened(converted_adapter(other.folders[0], read_header(other.path)))
    with pytest.raises(ModelInvalid, match=r"general\.type is 'model'"):
        opened(llama.path)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(good.read_bytes()[:-5000])
    with pytest.raises(ModelInvalid):
        opened(cut)
    with pytest.raises(ModelMissing):
        opened(tmp_path / "nothing.gguf")
    with pytest.raises(ModelMissing, match="adapter_config"):
        opened(tmp_path)
    folder = shutil.copytree(llama.folders[0], tmp_path / "narrow")
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    narrow = {
        name: tensor[:, :100] if "lora_A" in name else tensor for name, tensor in tensors.items()
    }
    save_file({name: tensor.contiguous() for name, tensor in narrow.items()}, weights)
    with pytest.raises(ModelInvalid, match="does not fit this model"):
        opened(folder)
    save_file({**tensors, "base_model.model.odd.lora_A.weight": torch.ones(2, 2)}, weights)
    with pytest.raises(ModelInvalid, match="odd"):
        opened(folder)
