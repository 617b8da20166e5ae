import torch


def seeded(seed: int) -> torch.Generator:
    """Return a generator of torch's default device, which is a GPU where kernels run on one."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
