"""The page for Prometheus."""

from collections import Counter

from localchat.engine.events import EngineStats, MetricsSnapshot
from localchat.server.metrics import Metrics
from localchat.server.tracker import RequestTracker
from tests.support.scripted_engine import ScriptedEngine


def test_a_model_that_is_loaded_twice_is_one_series_with_the_sum() -> None:
    first = EngineStats(MetricsSnapshot("decode", running=2), process_bytes=100)
    second = EngineStats(MetricsSnapshot("decode", running=1), process_bytes=50)
    page = Metrics(RequestTracker(8)).render(
        [("m", ScriptedEngine(), first), ("m", ScriptedEngine(), second)]
    )
    lines = [line for line in page.decode().splitlines() if not line.startswith("#")]
    assert max(Counter(line.rpartition(" ")[0] for line in lines).values()) == 1
    assert 'localchat_running{model="m"} 3.0' in lines
    assert 'localchat_process_bytes{model="m"} 150.0' in lines
