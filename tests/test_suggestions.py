"""Suggestions for words that are not known."""

from localchat.suggestions import closest, did_you_mean

KNOWN = ("temperature", "top_k", "top_p", "Seed")


def test_the_most_similar_words_come_first_whatever_their_case() -> None:
    assert closest("TOPK", KNOWN, count=2) == ("top_k", "top_p")
    assert closest("seeed", KNOWN) == ("Seed",)
    assert closest("colour", KNOWN) == ()
    assert closest("top", KNOWN, count=4, min_similarity=0.9) == ()


def test_a_hint_names_the_only_word_that_begins_so() -> None:
    assert did_you_mean("tem", KNOWN) == "did you mean temperature?"
    assert did_you_mean("temp", (*KNOWN, "theme")) == "did you mean temperature?"
    assert did_you_mean("t", KNOWN).startswith("valid names:")


def test_a_hint_names_one_word_or_all() -> None:
    assert did_you_mean("temprature", KNOWN) == "did you mean temperature?"
    assert did_you_mean("colour", KNOWN) == "valid names: Seed, temperature, top_k, top_p"
