"""Numbers of the sampling: one row in `parameters.py` and one field in each class here.

Settings, requests of every protocol and the engine's frames inherit `SamplingNumbers`; the runners get
`SamplingValues`. Written out rather than generated from the table, so that mypy knows the types.
"""

from dataclasses import dataclass

import msgspec


class SamplingNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that somebody may have chosen. None leaves one to a lower layer.

    Size: a field for each sampling parameter.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingValues:
    """Numbers in effect. The defaults apply if neither the user nor the model's maker chose one.

    Size: a field for each sampling parameter.
    """

    temperature: float = 0.7
    top_k: int = 0
    typical_p: float = 1.0
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
