"""What an engine holder passes on."""

from localchat.session.engine_holder import EngineHolder
from tests.support.cli_program import INFO, ScenarioEngine


def test_a_remark_comes_once_for_each_cause_and_again_from_another_engine() -> None:
    heard: list[str] = []
    holder = EngineHolder()
    holder.listen(heard.append)
    for _ in range(2):

        def opened(notify: object) -> ScenarioEngine:
            assert callable(notify)
            notify("Slower than usual: other programs are busy. Computing with 3 threads now.")
            notify("Slower than usual: other programs are busy. Computing with 1 thread now.")
            notify("the context was shortened to 4,096 tokens")
            return ScenarioEngine(about=INFO)

        holder.open(opened)
        holder._future.result(60)
    holder.close()
    one = ["Slower than usual: other programs are busy. Computing with 3 threads now."]
    one += ["the context was shortened to 4,096 tokens"]
    assert heard == one * 2
