"""What the desk makes of a model's own advice, before any request is computed."""

from dataclasses import replace

from localchat.engine.request import GenerateRequest, Sampling, TokenIds
from localchat.loop.desk import Desk
from localchat.loop.scripted import Vocabulary
from tests.loop.loop_bench import _Model


def test_defaults_of_a_file_that_mean_nothing_are_left_out_and_named() -> None:
    model = _Model(Vocabulary())
    nan = float("nan")
    advised = (("temperature", nan), ("top_k", -1.0), ("top_p", 0.5), ("min_p", 7.0))
    model.info = replace(model.info, sampling=advised)
    said: list[str] = []
    desk = Desk(model, 400, {}, said.append)
    job, _ = desk.accept(1, GenerateRequest(TokenIds((1, 2))))
    drawn = job.sampling
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p) == (0.7, 0, 0.5, 0.05)
    assert ["temperature nan" in said[0], "min_p 7" in said[1], len(said)] == [True, True, 2]
    asked, _ = desk.accept(2, GenerateRequest(TokenIds((1, 2)), Sampling(temperature=0.0)))
    assert asked.sampling.temperature == 0.0
