"""Votes: the leader, and when it cannot be caught any more."""

from itertools import product

from localchat.tries.vote import Vote


def _vote(tries: int, *answers: str | None) -> Vote:
    vote = Vote(tries)
    for number, answer in enumerate(answers):
        vote.add(number, answer)
    return vote


def test_a_vote_is_decided_exactly_when_no_ending_can_equal_its_leader() -> None:
    for tries in range(1, 6):
        for ended in range(tries):
            for answers in product(("a", "b", None), repeat=ended):
                vote = _vote(tries, *answers)
                leader = vote.leader
                rest = product(("a", "b", "c"), repeat=tries - ended)
                counts = [_vote(tries, *answers, *end).counts for end in rest]
                safe = leader is not None and all(
                    count[leader] > max([n for a, n in count.items() if a != leader], default=0)
                    for count in counts
                )
                assert vote.decided == safe, (tries, answers)


def test_three_of_five_decide() -> None:
    assert not _vote(5, "a", "a").decided
    assert _vote(5, "a", "a", "a").decided


def test_an_equal_vote_goes_to_the_lowest_try_however_they_ended() -> None:
    vote = Vote(4)
    for number, answer in ((3, "b"), (1, "b"), (2, "a"), (0, "a")):
        vote.add(number, answer)
    assert (vote.leader, vote.chosen) == ("a", 0)


def test_tries_without_an_answer_are_no_votes() -> None:
    vote = _vote(3, None, None, "a")
    assert (vote.leader, vote.chosen, vote.decided) == ("a", 2, True)
    assert (_vote(2, None, None).leader, _vote(2, None, None).chosen) == (None, 0)
