"""The ranges of sampling: one table that the settings and the server narrow."""

from typing import get_args, get_type_hints

import pytest

from localchat.config.parameters import SAMPLERS
from localchat.config.settings import Settings
from localchat.engine.request import Sampling


def test_every_sampling_field_with_a_number_has_a_range() -> None:
    assert set(SAMPLERS) == set(Sampling.__struct_fields__) - {
        "logit_bias",
        "text_bias",
        "seed",
    }


@pytest.mark.parametrize("name", SAMPLERS)
def test_settings_and_server_allow_nothing_that_the_engine_refuses(name: str) -> None:
    low, high = SAMPLERS[name].engine_range
    annotated = get_args(get_type_hints(Settings, include_extras=True)[name])[0]
    (meta,) = annotated.__metadata__
    assert low <= (meta.ge if meta.ge is not None else meta.gt + low)
    assert high >= (meta.le if meta.le is not None else high)
    served_low, served_high = SAMPLERS[name].client_range or SAMPLERS[name].engine_range
    assert (low <= served_low or name == "top_k") and served_high <= high
