import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from sampling import draw, uniform

PROBABILITIES = torch.tensor(
    [[0.5, 0.0, 0.25, 0.25], [0.0, 0.125, 0.875, 0.0]], dtype=torch.float64
)


def drawn(row, u):
    tokens, log_probs = draw(PROBABILITIES[row : row + 1].log(), [u])
    return tokens.item(), log_probs.exp().item()


@pytest.mark.parametrize(
    ("row", "u", "token"),
    [(0, 0.0, 0), (0, 0.49, 0), (0, 0.51, 2), (0, 0.76, 3), (1, 0.0, 1), (1, 0.13, 2)],
)
def test_the_random_number_picks_the_token_in_whose_share_it_falls(row, u, token):
    assert drawn(row, u) == (token, pytest.approx(PROBABILITIES[row, token].item()))


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30),
    st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2.0**-53)),
)
def test_every_number_draws_some_token_with_its_log_probability(logits, u):
    row = torch.tensor([logits])
    tokens, log_probs = draw(row, [u])
    assert 0 <= tokens.item() < len(logits)
    expected = torch.log_softmax(row.double(), -1)[0, tokens.item()].item()
    assert log_probs.item() == expected


def test_the_last_number_draws_no_impossible_token():
    assert drawn(1, 1 - 2.0**-53)[0] == 2


def test_rows_are_drawn_apart():
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    numbers = [uniform(str(i)) for i in range(5)]
    tokens, log_probs = draw(logits, numbers)
    for i, u in enumerate(numbers):
        alone = draw(logits[i : i + 1], [u])
        assert (tokens[i], log_probs[i]) == (alone[0][0], alone[1][0])


def test_numbers_follow_from_their_names_and_spread_evenly():
    assert uniform("1234/0/5/0/9") == 0.2635840661031549
    numbers = [uniform(f"1/2/{i}/0/8") for i in range(4000)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= u < 1 for u in numbers)
    # 5 standard deviations of a count of 400 out of 4000.
    counts = [sum(k / 10 <= u < (k + 1) / 10 for u in numbers) for k in range(10)]
    assert all(abs(count - 400) < 5 * 19 for count in counts)
