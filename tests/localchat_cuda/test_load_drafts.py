"""A load with what drafts: planned, refused where it cannot draft, and attached to the runner."""

import json
import shutil
from pathlib import Path
from typing import cast

import pytest

from localchat.backend_api.interface import LoadRequest
from localchat.errors import ModelInvalid, UsageError
from localchat.fit.load_options import LoadOptions
from localchat.model_files.safetensors import SafetensorsHeader, Tensor
from localchat_cuda.backend import ReferenceBackend
from localchat_cuda.config.reader import parse_config
from localchat_cuda.plan import draft_plan
from localchat_cuda.plan.memory_plan import plan
from localchat_cuda.runner.runner import CudaRunner
from tests.support import tiny_models
from tests.support.cuda_machines import GB, gpu, header
from tests.support.hub_configs import CONFIGS
from tests.support.speaking_checkpoint import write_speaking
from tests.support.tiny_assistant import Assistant
from tests.support.tiny_heads import Eagle, Head

SLOTS = LoadOptions(max_slots=2, context_tokens=256)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaking(tmp_path_factory.mktemp("speaking"))


def with_draft(folder: Path) -> LoadOptions:
    return LoadOptions(max_slots=2, context_tokens=256, draft=str(folder))


def loaded(folder: Path, options: LoadOptions) -> CudaRunner:
    model = ReferenceBackend().open(folder, print)
    request = LoadRequest(model.plan(options), options)
    return cast(CudaRunner, model.load(request, lambda _done, _all: True, print))


def test_a_draft_model_is_planned_and_drafts(speaking: Path) -> None:
    model = ReferenceBackend().open(speaking, print)
    plain, drafting = model.plan(SLOTS), model.plan(with_draft(speaking))
    assert drafting.draft_bytes == drafting.compute_bytes - plain.compute_bytes > 0
    assert any(note.startswith("The draft model") for note in drafting.notes)
    runner = loaded(speaking, with_draft(speaking))
    assert runner.capabilities.draft_model
    assert runner.drafter.token_s > 0
    own = runner.drafter.runner.capabilities
    assert (own.context_tokens, own.kv_tokens) == (256, 512)
    runner.close()
    assert not loaded(speaking, SLOTS).capabilities.draft_model


def test_a_draft_model_with_other_tokens_is_refused_by_the_first_that_differs(
    speaking: Path, tmp_path: Path
) -> None:
    shutil.copytree(speaking, tmp_path, dirs_exist_ok=True)
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    words = made["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(
        ModelInvalid, match=r"its token .* is 'b', and the model's is 'a'"
    ) as refused:
        loaded(speaking, with_draft(tmp_path))
    assert "same family" in refused.value.hint


def test_a_hybrid_cannot_be_a_draft_model(speaking: Path, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("qwen3.5"), tmp_path)
    with pytest.raises(ModelInvalid, match="running state"):
        ReferenceBackend().open(speaking, print).plan(with_draft(tmp_path))


def test_the_head_of_a_checkpoint_is_loaded_unless_drafts_are_off(
    speaking: Path, tmp_path: Path
) -> None:
    Head("qwen3.5", vocab_size=257).save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(speaking / name, tmp_path)
    runner = loaded(tmp_path, SLOTS)
    assert runner.capabilities.draft_model
    assert "head" in runner.drafter.name
    off = LoadOptions(max_slots=2, context_tokens=256, speculation=False)
    assert not loaded(tmp_path, off).capabilities.draft_model


def test_an_eagle_head_is_planned_and_drafts_for_its_model_alone(
    speaking: Path, tmp_path: Path
) -> None:
    eagle, model, head = Eagle(vocab_size=257), tmp_path / "model", tmp_path / "head"
    head.mkdir()
    tiny_models.save(eagle.model, model)
    eagle.save(head)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(speaking / name, model)
    planned = ReferenceBackend().open(model, print).plan(with_draft(head))
    assert planned.draft_bytes > 0
    assert any(note.startswith("The EAGLE-3 head") for note in planned.notes)
    runner = loaded(model, with_draft(head))
    assert runner.drafter.name == "the EAGLE-3 head"
    runner.close()
    with pytest.raises(ModelInvalid, match="and this model has 2"):
        ReferenceBackend().open(speaking, print).plan(with_draft(head))
    raw = json.loads((head / "config.json").read_text())
    for changed, why in (
        ({"vocab_size": 300}, "expects the vocabulary size 300, and this model has 257"),
        ({"num_hidden_layers": 2}, "2 layers of llama"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "this model has 4"),
    ):
        (head / "config.json").write_text(json.dumps({**raw, **changed}))
        with pytest.raises(ModelInvalid, match=why):
            ReferenceBackend().open(model, print).plan(with_draft(head))


def test_an_assistant_is_planned_and_drafts_for_its_model_alone(
    speaking: Path, tmp_path: Path
) -> None:
    assistant, model, own = Assistant(vocabulary=257), tmp_path / "model", tmp_path / "assistant"
    tiny_models.save(assistant.model, model)
    assistant.save(own)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(speaking / name, model)
    opened = ReferenceBackend().open(model, print)
    plain, drafting = opened.plan(SLOTS), opened.plan(with_draft(own))
    assert drafting.draft_bytes == drafting.compute_bytes - plain.compute_bytes > 0
    assert any(note.startswith("The assistant assistant takes") for note in drafting.notes)
    runner = loaded(model, with_draft(own))
    assert runner.drafter.name == "the model's assistant"
    assert runner.drafter.token_s > 0
    runner.close()
    with pytest.raises(ModelInvalid, match="the architecture gemma4, and this model has"):
        ReferenceBackend().open(speaking, print).plan(with_draft(own))
    two = LoadOptions(max_slots=2, context_tokens=256, draft=str(own), gpus=2)
    with pytest.raises(UsageError, match="an assistant, cannot draft for a model on several GPUs"):
        opened.plan(two)
    raw = json.loads((own / "config.json").read_text())
    text = raw["text_config"]
    for changed, why in (
        ({"backbone_hidden_size": 64}, "expects the hidden size 64, and this model has"),
        ({"text_config": {**text, "sliding_window": 7}}, "layer 0 expects keys of another shape"),
        ({"text_config": None}, "lacks text_config"),
        ({"use_ordered_embeddings": True, "num_centroids": 10}, "cannot have 10 centroids"),
    ):
        (own / "config.json").write_text(json.dumps({**raw, **changed}))
        with pytest.raises(ModelInvalid, match=why):
            opened.plan(with_draft(own))


def test_an_assistant_whose_groups_name_unknown_tokens_is_refused(
    speaking: Path, tmp_path: Path
) -> None:
    assistant = Assistant(vocabulary=257, centroids=257)
    assistant.assistant.masked_embedding.token_ordering[0] = 257
    model = tmp_path / "model"
    tiny_models.save(assistant.model, model)
    assistant.save(tmp_path / "assistant")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(speaking / name, model)
    with pytest.raises(ModelInvalid, match="names tokens outside its vocabulary"):
        loaded(model, with_draft(tmp_path / "assistant"))


HYBRID = parse_config(CONFIGS["qwen3.5:9b"][0], "it")
HEAD = [
    Tensor("mtp.fc.weight", (HYBRID.hidden, 2 * HYBRID.hidden), "BF16", 0, 0),
    Tensor("mtp.layers.0.mlp.down_proj.weight", (HYBRID.hidden, HYBRID.intermediate), "BF16", 0, 0),
]


def headers(*tensors: Tensor) -> list[SafetensorsHeader]:
    whole = header(18 * GB)
    return [whole, SafetensorsHeader("heads", {}, tensors, 0)] if tensors else [whole]


def test_a_head_is_planned_where_it_shortens_no_context() -> None:
    options = LoadOptions(max_slots=4, context_tokens=32_768)
    with_head = headers(*HEAD)
    roomy = plan(HYBRID, with_head, options, gpu(80 * GB))
    without = plan(HYBRID, headers(), options, gpu(80 * GB))
    assert roomy.prediction_head and not without.prediction_head
    weights = 2 * sum(tensor.shape[0] * tensor.shape[1] for tensor in HEAD)
    assert roomy.compute_bytes - without.compute_bytes == roomy.draft_bytes > weights
    off = LoadOptions(max_slots=4, context_tokens=32_768, speculation=False)
    assert not plan(HYBRID, with_head, off, gpu(80 * GB)).draft_bytes
    one = LoadOptions(max_slots=1, context_tokens=32_768, anyway=True)
    least = plan(HYBRID, headers(), one, gpu(24 * GB)).total_bytes
    tight = plan(HYBRID, with_head, one, gpu(least))
    assert tight.fits and not tight.prediction_head
    assert any("would be shorter" in note for note in tight.notes)


def test_a_second_layer_of_heads_or_an_embedding_of_their_own_is_left_out() -> None:
    options = LoadOptions(max_slots=4, context_tokens=32_768)
    for name in ("mtp.layers.1.mlp.down_proj.weight", "mtp.embed_tokens.weight"):
        other = HEAD[1]._replace(name=name)
        assert not plan(HYBRID, headers(*HEAD, other), options, gpu(80 * GB)).prediction_head


def test_planning_a_draft_model_reads_its_files_alone(speaking: Path) -> None:
    shape = draft_plan.read_draft(str(speaking), HYBRID, gpu=False)
    assert shape.headers
    assert draft_plan.text_tokens(shape.config, 100) == 100
    assert draft_plan.pool_tokens(shape.config, 100) == 256
