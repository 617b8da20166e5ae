"""The time budget of a step."""

from localchat.backend_api.interface import PaddedWidth
from localchat.core.scheduler.token_budget import MIN_TOKENS, TokenBudget


def test_the_budget_follows_what_steps_take() -> None:
    token_budget = TokenBudget(0.25, 512)
    token_budget.observe(64, 0.064)
    assert token_budget.next_step() == 250
    for _ in range(50):
        token_budget.observe(64, 0.64)
    assert token_budget.next_step() == MIN_TOKENS


def test_narrow_steps_teach_nothing_about_wide_ones() -> None:
    token_budget = TokenBudget(0.25, 512)
    token_budget.observe(64, 0.064)
    token_budget.observe(1, 0.2)
    assert token_budget.next_step() == 250


def test_a_step_without_memory_halves_the_budget_and_good_ones_win_it_back() -> None:
    token_budget = TokenBudget(1.0, 512)
    token_budget.observe(64, 0.064)
    for _ in range(6):
        token_budget.halve()
    assert token_budget.next_step() == 8
    for _ in range(200):
        token_budget.observe(8, 0.01)
    assert token_budget.next_step() == 512


def test_the_fixed_cost_of_a_step_is_not_charged_to_its_tokens() -> None:
    token_budget = TokenBudget(0.1, 8192, shared_target_s=0.02)
    for tokens in (200, 4000, 600, 3000, 1000, 2000, 400, 4000, 800, 2500) * 3:
        token_budget.observe(tokens, 0.008 + 20e-6 * tokens)
    assert 4300 < token_budget.next_step() < 4900
    assert 500 < token_budget.next_step(shared=True) < 700


def test_decode_steps_do_not_count_for_the_cost_of_a_token() -> None:
    token_budget = TokenBudget(0.1, 8192)
    token_budget.observe(1000, 0.02)
    token_budget.observe(32, 0.5, prompt=False)
    assert token_budget.next_step() == 5000


def test_widths_that_hardly_differ_make_no_fixed_cost_out_of_noise() -> None:
    """It would pass for more than the target, and leave prompts nothing while others write."""
    token_budget = TokenBudget(0.1, 4096, shared_target_s=0.018)
    token_budget.observe(1, 0.0015, prompt=False)
    once_slow = ((583, 0.0497), (587, 0.0192), (1280, 0.0643), (1280, 0.0309))
    for tokens, elapsed_s in (*once_slow, (3328, 0.0741), (3328, 0.0779), (4096, 0.0888)):
        token_budget.observe(tokens, elapsed_s)
        assert token_budget.next_step(shared=True) > 200


def test_the_budget_follows_a_machine_that_became_slower() -> None:
    token_budget = TokenBudget(0.1, 4096)
    token_budget.observe(1, 0.001, prompt=False)
    for tokens in (500, 1000, 2000, 4000) * 200:
        token_budget.observe(tokens, 0.04 + 10e-6 * tokens)
    assert token_budget.next_step() == 4096


def test_a_width_is_afforded_by_the_time_that_its_own_steps_take() -> None:
    """A line through all widths says little about one: GPUs have good widths and bad ones."""
    token_budget = TokenBudget(0.2, 4096, shared_target_s=0.0225)
    good, bad, new = PaddedWidth(32, 896), PaddedWidth(32, 768), PaddedWidth(32, 1024)
    assert not token_budget.affords(good, shared=True), "nothing is known"
    for _ in range(5):
        token_budget.observe(768, 0.024, width=bad)
        token_budget.observe(896, 0.0215, width=good)
    assert token_budget.affords(good, shared=True)
    assert not token_budget.affords(bad, shared=True)
    assert token_budget.affords(bad)
    assert not token_budget.affords(new, shared=True), "expected to take 28 ms"


def test_a_width_that_was_slow_is_tried_again_after_a_while() -> None:
    token_budget = TokenBudget(0.2, 4096, shared_target_s=0.02)
    width = PaddedWidth(8, 512)
    token_budget.observe(512, 0.022, width=width)
    refused = 0
    while not token_budget.affords(width, shared=True):
        refused += 1
    assert 50 < refused < 200


def test_a_busy_machine_never_narrows_steps_below_the_efficient_width() -> None:
    budget = TokenBudget(0.25, 256)
    for _ in range(8):
        budget.observe(128, 10.0)
    assert budget.next_step() == 32
    assert budget.next_step(min_tokens=128) == 128
    budget.halve()
    assert budget.next_step(min_tokens=512) < 256
