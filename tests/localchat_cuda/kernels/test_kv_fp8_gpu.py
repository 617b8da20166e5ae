"""FP8 KV cache on an NVIDIA GPU: both decoders, whole models and CUDA graphs against references.

TRITON_INTERPRET=0 pytest tests/localchat_cuda."""

from pathlib import Path

import pytest
import torch

from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import kv_fp8
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention import reference as attention_reference
from localchat_cuda.kernels.attention.reference import AttentionBatch, Rules
from tests.support import tiny_models
from tests.support.kv_fp8_scenes import coded_scene
from tests.support.tiny_engine_core import ON_GPU, TinyLoop, request, tiny_runner
from tests.support.tiny_models import CPU, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU, or TRITON_INTERPRET is not 0"),
]
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ERRORS = {"fp16": 5e-4, "bf16": 4e-3}


def gpu_scene(
    work: list[tuple[int, int]], h: int, j: int, d: int, half: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch]:
    q, k, v, marks, batch = coded_scene(work, h, j, d)
    pool = torch.stack((k, v), 1).cuda()
    on_gpu = AttentionBatch(
        *(
            getattr(batch, name).cuda()
            for name in ("starts", "counts", "lengths", "slots", "tables")
        )
    )
    return q.to(HALVES[half]).cuda(), pool[:, 0], pool[:, 1], marks.cuda(), on_gpu


@pytest.mark.parametrize("decoder", [kv_fp8.PLAIN, kv_fp8.PACKED])
@pytest.mark.parametrize("half", sorted(HALVES))
@pytest.mark.parametrize("rules", [Rules(), Rules(window=50, soft_cap=20.0)])
@pytest.mark.parametrize(("h", "j", "d"), [(14, 2, 64), (6, 6, 96), (28, 4, 128), (8, 1, 256)])
def test_attention_matches_the_reference(
    h: int, j: int, d: int, rules: Rules, half: str, decoder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_fp8, "decoder_of", lambda device: decoder)
    work = [(3, 70), (16, 16), (1, 1000), (1, 64)]
    q, k, v, marks, batch = gpu_scene(work, h, j, d, half)
    wanted = attention_reference.reference(q, k, v, batch, rules, marks)
    partials = decode_attention.Partials.empty(3, 21, h, d, q.device)
    out = torch.full((21, h * d), float("nan"), device=q.device, dtype=q.dtype)
    decode_attention.attend(q, k, v, batch, 16, partials, rules, exponents=marks)
    decode_attention.merge(partials, out)
    assert float((out.float() - wanted.view(21, -1)).norm() / wanted.norm()) < ERRORS[half]
    work = [(65, 65), (40, 167), (1, 64), (300, 555)]
    q, k, v, marks, batch = gpu_scene(work, h, j, d, half)
    wanted = attention_reference.reference(q, k, v, batch, rules, marks)
    rows = prefill_attention.tile_config_for(d).rows
    listed = prefill_attention.tiles_of([c for c, _ in work], [n for _, n in work], rows)
    tiles = torch.tensor(listed, dtype=torch.int32, device=q.device)
    for _ in range(5):
        prefill_out = torch.full_like(q, float("nan"))
        prefill_attention.attend(q, k, v, batch, tiles, prefill_out, rules, exponents=marks)
        assert float((prefill_out.float() - wanted).norm() / wanted.norm()) < ERRORS[half]


@pytest.mark.parametrize("half", sorted(HALVES))
@pytest.mark.parametrize("kind", ["gemma3", "llama", "phi3-long", "qwen2"])
def test_model_matches_its_reference(kind: str, half: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference(kind), tmp_path)
    asked = request(tokens_of(51, 200), prompt_logprobs=0, max_tokens=1)

    def logs(*, fp8_kv: bool, **where: object) -> torch.Tensor:
        runner = tiny_runner(tmp_path, fp8_kv=fp8_kv, step=64, **where)  # type: ignore[arg-type]
        result = TinyLoop(runner).say(asked)
        return torch.tensor([entry.logprob for entry in result.prompt_logprobs])

    exact: dict[str, object] = {"device": CPU, "kernels": False, "dtype": torch.float32}
    wanted = logs(fp8_kv=True, **exact)
    plain = logs(fp8_kv=False, **exact)
    lost = float((wanted - plain).norm())
    rounded = float((logs(fp8_kv=False, dtype=HALVES[half]) - plain).norm())
    ours = float((logs(fp8_kv=True, dtype=HALVES[half]) - wanted).norm())
    print(
        f"{kind} {half}: {ours:.3f} from the reference; codes cost {lost:.3f}, {half} {rounded:.3f}"
    )
    # A rounded activation falls to a neighbouring code now and then, which costs as much as the codes do.
    assert ours < 1.5 * max(lost, rounded, 0.05)


def test_cuda_graphs_give_equal_logprobs(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("qwen3"), tmp_path)
    texts = []
    for graphs in (False, True):
        loop = TinyLoop(tiny_runner(tmp_path, graphs=graphs, fp8_kv=True))
        ids = [
            loop.ask(request(tokens_of(60 + i, 30), max_tokens=40, temperature=0.7, seed=i))
            for i in range(3)
        ]
        loop.run_until_idle()
        texts.append([loop.received[i].logprobs() for i in ids])
    assert texts[0] == texts[1]
