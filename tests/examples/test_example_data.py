"""Bundled files are what their scripts write; rollouts are read, or refused by line."""

import json
import runpy
import sys

import pytest
from arithmetic_game import games
from byte_tokens import BEGIN, END, encode, text_of
from game_conversations import ROLLOUTS, conversations
from hypothesis import given
from hypothesis import strategies as st
from rollouts import Rollout, RolloutFileError, read_groups

GOOD = {"uid": "a", "prompt": "1+1=", "response": "2", "reward": 1}
QUESTION = {"question": "1+1?", "ground_truth": "2"}


def test_bundled_files_are_what_the_scripts_write():
    made = {
        "arithmetic_rollouts.jsonl": list(games(128, 4, seed=7)),
        "arithmetic_conversations.jsonl": [{"messages": each} for each in conversations(ROLLOUTS)],
    }
    for name, rows in made.items():
        lines = ROLLOUTS.with_name(name).read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows


def test_the_first_picture_shows_what_the_readme_says(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    examples, picture = ROLLOUTS.parents[1], tmp_path / "step.png"
    script = str(examples / "figures" / "step_figure.py")
    monkeypatch.setattr(sys, "argv", [script, "--out", str(picture)])
    made = runpy.run_path(script, run_name="__main__")
    assert picture.stat().st_size > 10_000
    theirs, ours = (made["end_of"](made["planned"](balance)) for balance in ("tokens", "auto"))
    saving = f"ends at 100, planned at {100 * ours / theirs:.0f}]"
    assert saving in (examples.parent / "README.md").read_text()


def write(tmp_path, *rows):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


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
        (QUESTION, r"at least one model's"),
        (QUESTION | {"m": {"solution": "x", "is_correct": 1}}, r"'is_correct' must be bool, got 1"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, row, text):
    path = write(tmp_path, GOOD, row)
    with pytest.raises(RolloutFileError, match=text) as caught:
        read_groups(path)
    assert str(caught.value).startswith(f"{path}:2: ")


text = st.text(st.characters(codec="utf-8"), max_size=20)


@given(prompt=text, response=text, ends=st.lists(st.integers(0, 20), max_size=6))
def test_tokens_are_the_texts_bytes_and_the_mask_leaves_out_the_environments(
    prompt, response, ends
):
    ends = sorted(min(end, len(response)) for end in ends)
    spans = tuple(zip(ends[::2], ends[1::2], strict=False))
    sample = encode(Rollout("u", prompt, response, 0.0, spans))
    assert (sample.tokens[0], sample.tokens[-1]) == (BEGIN, END)
    assert text_of(sample.tokens[1:-1].tolist()) == prompt + response
    assert sample.response_length == len(sample.loss_mask) == len(response.encode()) + 1
    written = [i for start, end in spans for i in range(start, end)]
    of_the_policy = "".join(c for i, c in enumerate(response) if i not in written)
    kept = sample.tokens[-sample.response_length : -1][sample.loss_mask[:-1] != 0]
    assert bytes(kept.tolist()) == of_the_policy.encode()


@pytest.mark.parametrize(
    ("spans", "mask"), [((), [1, 1, 1]), (((0, 1),), [0, 1, 1]), (((1, 2),), [1, 0, 0])]
)
def test_the_end_mark_is_trained_unless_the_environment_had_the_last_word(spans, mask):
    assert encode(Rollout("u", "", "ab", 0.0, spans)).loss_mask.tolist() == mask
