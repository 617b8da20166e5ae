"""Charts of a quality comparison."""

import xml.etree.ElementTree as ElementTree

import pytest

from localchat.measure.plot import quality_svg
from localchat.measure.records import (
    DivergenceFigures,
    MachineRecord,
    QualityRecord,
    QualitySpec,
    VariantQuality,
)
from localchat.measure.variants import BenchVariant


def quality(
    kl: float | None, size_bytes: int, tokens_per_s: float | None, name: str
) -> VariantQuality:
    divergence = None
    if kl is not None:
        divergence = DivergenceFigures(kl, kl * 5, 1.0, 0.9, complete=True)
    return VariantQuality(
        variant=BenchVariant(name, name),
        model=name,
        quantization=name,
        file_bytes=size_bytes,
        divergence=divergence,
        tokens_per_s=tokens_per_s,
    )


@pytest.mark.parametrize("speed", [12.0, None])
def test_the_loss_is_drawn_by_size_and_by_speed(speed: float | None) -> None:
    spec = QualitySpec(
        variants=(),
        tests=("text",),
        text="sample text",
        text_digest="",
        window_tokens=512,
        most_windows=16,
        needle_lengths=(),
        needle_depths=0,
        tasks=0,
    )
    measured = (
        quality(None, 145_000_000, speed, "Q8_0"),
        quality(0.02, 98_000_000, speed, "Q4_1"),
        quality(0.31, 92_000_000, speed, "Q4_0"),
    )
    machine = MachineRecord("A processor", 2, 8_000_000_000, (), "Linux x86_64")
    record = QualityRecord(at="2026-11-29", machine=machine, spec=spec, measured=measured)
    drawn = ElementTree.fromstring(quality_svg(record))
    panels = [part for part in drawn if part.tag.endswith("g")]
    dots = [[dot for dot in panel.iter() if dot.tag.endswith("circle")] for panel in panels]
    assert [len(panel) for panel in dots] == ([3, 3] if speed else [3, 0])
    first, better, worse = (float(dot.attrib["cy"]) for dot in dots[0])
    assert first > better > worse  # the loss grows upwards
    largest, _, smallest = (float(dot.attrib["cx"]) for dot in dots[0])
    assert largest > smallest
    words = " ".join(part.text or "" for part in drawn.iter())
    assert "mean KLD 0.31" in words and ("--speed" in words) is (speed is None)
