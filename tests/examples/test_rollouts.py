import json
import pickle

import pytest
from arithmetic_game import games
from byte_tokens import BEGIN, END, decode, encode
from hypothesis import given
from hypothesis import strategies as st
from rollouts import Rollout, RolloutFileError, read_groups

GOOD = {"uid": "a", "prompt": "1+1=", "response": "2", "reward": 1}


def write(tmp_path, *rows):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_groups_keep_the_order_of_the_file(tmp_path):
    rows = [GOOD | {"uid": uid, "response": str(i)} for i, uid in enumerate(["b", "a", "b", 3])]
    groups = read_groups(write(tmp_path, *rows, ""))
    assert [[(r.uid, r.response) for r in group] for group in groups] == [
        [("b", "0"), ("b", "2")],
        [("a", "1")],
        [("3", "3")],
    ]


def test_the_generators_games_are_read_with_their_spans(tmp_path):
    made = list(games(3, 2, seed=1))
    read = [r for group in read_groups(write(tmp_path, *made)) for r in group]
    assert [r.environment_spans for r in read] == [
        tuple(map(tuple, game["environment_spans"])) for game in made
    ]


def test_gsm8k_example_model_solutions_are_read_as_they_are(tmp_path):
    question = {
        "question": "Two apples and one?",
        "ground_truth": "A: 3",
        "6b_finetuning": {"is_correct": False, "solution": "A: 2"},
        "175b_verification": {"is_correct": True, "solution": "2+1 = 3\nA: 3"},
    }
    (group,) = read_groups(write(tmp_path, question))
    assert group == [
        Rollout("Two apples and one?", "Two apples and one?\n", "A: 2", 0.0),
        Rollout("Two apples and one?", "Two apples and one?\n", "2+1 = 3\nA: 3", 1.0),
    ]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("{", r"not JSON"),
        ("[1]", r"expected a JSON object, got list"),
        ({k: v for k, v in GOOD.items() if k != "reward"}, r"lacks 'reward' \(float or int"),
        (GOOD | {"response": None}, r"'response' must be str, got None"),
        (GOOD | {"uid": True}, r"'uid' must be str or int, got True"),
        ('{"uid": "a", "prompt": "", "response": "", "reward": NaN}', r"'reward' must be finite"),
        (GOOD | {"environment_spans": [[0, 2]]}, r"inside the response of 1 characters"),
        (GOOD | {"environment_spans": [[1, 1], [0, 1]]}, r"ascending pairs"),
        ({"question": "?", "ground_truth": "!"}, r"at least one model's"),
        (
            {"question": "?", "ground_truth": "!", "m": {"solution": "x", "is_correct": 1}},
            r"'is_correct' must be bool, got 1",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, row, text):
    path = write(tmp_path, GOOD, row)
    with pytest.raises(RolloutFileError, match=text) as caught:
        read_groups(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.line) == (str(caught.value), 2)


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b'{"uid": "\xff"}')
    with pytest.raises(RolloutFileError, match=r":1: not JSON in UTF-8"):
        read_groups(path)


def test_a_missing_or_empty_file_says_so(tmp_path):
    with pytest.raises(RolloutFileError, match=r"cannot be read .*set --rollouts"):
        read_groups(tmp_path / "absent.jsonl")
    with pytest.raises(RolloutFileError, match="no rollouts"):
        read_groups(write(tmp_path, "", "  "))


text = st.text(st.characters(codec="utf-8"), max_size=20)


@given(prompt=text, response=text, ends=st.lists(st.integers(0, 20), max_size=6))
def test_tokens_give_back_the_text_and_mask_only_the_environments_bytes(prompt, response, ends):
    ends = sorted(min(end, len(response)) for end in ends)
    spans = tuple(zip(ends[::2], ends[1::2], strict=False))
    sample = encode(Rollout("u", prompt, response, 0.0, spans))
    assert decode(sample) == (prompt, response)
    assert sample.tokens[0] == BEGIN
    assert sample.tokens[-1] == END
    assert sample.response_length == len(sample.loss_mask) == len(response.encode()) + 1
    written = [i for start, end in spans for i in range(start, end)]
    of_the_policy = "".join(c for i, c in enumerate(response) if i not in written)
    kept = sample.tokens[-sample.response_length : -1][sample.loss_mask[:-1] != 0]
    assert bytes(kept.tolist()) == of_the_policy.encode()


def test_the_end_mark_is_trained_unless_the_environment_had_the_last_word():
    assert encode(Rollout("u", "", "ab", 0.0)).loss_mask.tolist() == [1, 1, 1]
    assert encode(Rollout("u", "", "ab", 0.0, ((0, 1),))).loss_mask.tolist() == [0, 1, 1]
    assert encode(Rollout("u", "", "ab", 0.0, ((1, 2),))).loss_mask.tolist() == [1, 0, 0]
