"""The ranges of sampling: one table that the settings and the server narrow."""

import pytest

from localchat.config.parameters import SAMPLERS
from localchat.engine.request import Sampling


def test_every_sampling_field_with_a_number_has_a_range() -> None:
    assert set(SAMPLERS) == set(Sampling.__struct_fields__) - {
        "logit_bias",
        "text_bias",
        "seed",
        "dry_sequence_breakers",
    }


@pytest.mark.parametrize("name", SAMPLERS)
def test_settings_and_server_allow_nothing_that_the_engine_refuses(name: str) -> None:
    low, high = SAMPLERS[name].engine_range
    set_low, set_high = SAMPLERS[name].setting_range
    assert low <= set_low and set_high <= high
    served_low, served_high = SAMPLERS[name].client_range or SAMPLERS[name].engine_range
    # Clients may send -1 for off.
    assert (low <= served_low or name in ("top_k", "top_n_sigma")) and served_high <= high
