"""Charts: a curve for each series."""

import xml.etree.ElementTree as ElementTree

from localchat.measure.plot import bench_svg
from tests.support.bench_samples import point, record


def test_a_chart_has_a_curve_for_each_series() -> None:
    points = [
        point(rate * at, at, variant=name)
        for name, rate in (("a", 9), ("<b>", 5))
        for at in (1, 2, 4)
    ]
    drawn = ElementTree.fromstring(bench_svg(record(*points, variants=("a", "<b>"))))
    lines = [one for one in drawn.iter() if one.tag.endswith("polyline")]
    assert len(lines) == 2 * (1 + 2 + 2)
    assert any("<b>" in (one.text or "") for one in drawn.iter())
    ElementTree.fromstring(bench_svg(record(point(0.01))))
