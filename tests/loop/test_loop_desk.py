"""What the desk makes of a model's own advice, before any request is computed."""

from dataclasses import replace

from localchat.engine.request import GenerateRequest, Sampling, TokenIds
from localchat.loop.desk import Desk
from localchat.loop.scripted import Vocabulary
from tests.loop.loop_bench import _Model


def test_defaults_of_a_file_that_mean_nothing_are_left_out_and_named() -> None:
    model = _Model(Vocabulary())
    advised = (("temperature", float("nan")), ("top_k", -5.0), ("top_p", 0.5))
    model.info = replace(model.info, sampling=advised)
    said: list[str] = []
    desk = Desk(model, 400, {}, said.append)
    job, _ = desk.accept(1, GenerateRequest(TokenIds((1, 2))))
    assert (job.sampling.temperature, job.sampling.top_k, job.sampling.top_p) == (0.7, 0, 0.5)
    assert ["temperature nan" in said[0], "top_k -5" in said[1], len(said)] == [True, True, 2]
    asked, _ = desk.accept(2, GenerateRequest(TokenIds((1, 2)), Sampling(temperature=0.0)))
    assert asked.sampling.temperature == 0.0
