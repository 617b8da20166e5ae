import torch

from localchat_cuda.kernels.sampling.publish import publish
from tests.support.seeded import seeded


def test_tokens_go_to_the_table_and_with_their_log_probabilities_to_the_host() -> None:
    count, width = 130, 132
    results = torch.arange(3 * width, dtype=torch.int32).view(3, width) * 7
    results[0, 5] = -1  # no usable logits
    table = torch.full((400,), -9, dtype=torch.int32)
    targets = torch.randperm(400, generator=seeded(1))[:count]
    host = torch.full((2, width), -9, dtype=torch.int32)
    publish(results, targets, table, torch.tensor([host.data_ptr()]))
    assert torch.equal(host[:, :count], results[:2, :count])
    assert bool((host[:, count:] == -9).all())
    assert torch.equal(table[targets], results[0, :count].clamp(min=0))
    assert int((table == -9).sum()) == 400 - count
