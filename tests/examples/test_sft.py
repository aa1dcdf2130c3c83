"""The fine-tuning example: what of a line is trained, what is refused, what is drawn, and the
comparison of its logs."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")
import sft_figure
from json_lines import DataError, Writer, read_samples
from megatron.core.datasets.utils import Split
from sft_datasets import build_datasets, byte_level_tokenizer
from sft_log import Iteration, LogError, read_log

END = 256
BYTES = byte_level_tokenizer()


class Templated:
    """A byte-level tokenizer with a chat template; "$" is its end token."""

    eod = END
    chat_template = "{% ... %}"

    def __init__(self, template):
        self._template = template

    def tokenize(self, text):
        return [END if byte == ord("$") else byte for byte in text.encode()]

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, **more):
        assert not tokenize
        return self._template(messages, **more) + ("A:" if add_generation_prompt else "")


def written(message):
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls") or ()]
    return "".join([message.get("reasoning_content") or "", message["content"] or "", *calls])


def closing(messages, tools=None):
    """A template whose end mark closes an answer."""
    marks = {"assistant": "$\n"}
    texts = [f"{m['role'][0].upper()}:{written(m)}{marks.get(m['role'], '/')}" for m in messages]
    return "".join([f"T{json.dumps(tools)}/" if tools else "", *texts])


def opening(messages, **_):
    """A template whose end mark begins the next message."""
    return "".join(
        ("$" if at and messages[at - 1]["role"] == "assistant" else "")
        + f"{m['role'][0].upper()}:{written(m)}"
        for at, m in enumerate(messages)
    )


def closing_calls_first(messages):
    """A template that wants a tool's answer behind a call, as some do, and takes no tools."""
    for at, message in enumerate(messages[:-1]):
        assert not message.get("tool_calls") or messages[at + 1]["role"] == "tool"
    return closing(messages)


def texts_alone(messages, **_):
    """A template that writes neither tool calls nor reasoning."""
    return closing([{"role": m["role"], "content": m["content"]} for m in messages])


def forgetful(messages, **_):
    """A template that leaves out earlier texts."""
    return closing([m | {"content": ""} for m in messages[:-1]] + messages[-1:])


def thoughtless(messages, **_):
    """A template that leaves out the reasoning of all answers but the last."""
    return closing([m | {"reasoning_content": None} for m in messages[:-1]] + messages[-1:])


def needs_a_question(messages, **_):
    return closing(messages) if messages[0]["role"] == "user" else ""


def text(tokens):
    return "".join("$" if token == END else bytes([token]).decode("latin-1") for token in tokens)


USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"function": {"name": "add", "arguments": '{"x": 1}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
THINKING = ANSWER | {"reasoning_content": "hm"}
UNWEIGHTED = ANSWER | {"content": "b", "weight": 0}


def talk(*messages, **more):
    return {"messages": [*messages], **more}


TRAINED: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "completion": (None, {"prompt": "ab ", "completion": " c", "id": 1}, "ab  c$", " c$"),
    "no prompt": (None, {"prompt": "", "completion": "c"}, "$c$", "c$"),
    "question": (None, {"question": "ab", "answer": "c"}, "ab\nc$", "c$"),
    "plain": (
        None,
        talk(USER, ANSWER, {"role": "tool", "content": "ok"}, ANSWER, USER),
        "<|user|>\nq\n<|assistant|>\na$\n<|tool|>\nok\n<|assistant|>\na$",
        "a$a$",
    ),
    "assistant first": (None, talk(ANSWER), "<|assistant|>\na$", "a$"),
    "weight of 0": (
        None,
        talk(UNWEIGHTED, USER, ANSWER | {"weight": 1}),
        "<|assistant|>\nb$\n<|user|>\nq\n<|assistant|>\na$",
        "a$",
    ),
    "template": (closing, talk(USER, ANSWER, USER, ANSWER), "U:q/A:a$\nU:q/A:a$\n", "a$\na$\n"),
    "template, assistant first": (closing, talk(ANSWER), "A:a$\n", "a$\n"),
    "template, weight of 0": (closing, talk(UNWEIGHTED, USER, ANSWER), "A:b$\nU:q/A:a$\n", "a$\n"),
    "tool calls without content": (
        closing,
        talk(USER, CALLING),
        'U:q/A:{"name": "add", "arguments": {"x": 1}}$\n',
        '{"name": "add", "arguments": {"x": 1}}$\n',
    ),
    "a call, then anything but a user": (
        closing_calls_first,
        talk(USER, CALLING | {"content": "c"}, {"role": "tool", "content": "1"}, ANSWER),
        'U:q/A:c{"name": "add", "arguments": {"x": 1}}$\nT:1/A:a$\n',
        'c{"name": "add", "arguments": {"x": 1}}$\na$\n',
    ),
    "tools": (closing, talk(USER, ANSWER, tools=[1]), "T[1]/U:q/A:a$\n", "a$\n"),
    "reasoning": (closing, talk(USER, THINKING), "U:q/A:hma$\n", "hma$\n"),
    "end mark of the next message": (
        opening,
        talk(USER, ANSWER, USER, ANSWER),
        "U:qA:a$U:qA:a$",
        "a$a$",
    ),
}
"""By what people send: a chat template, the line's value, all of its text, and what is trained."""


@pytest.mark.parametrize("name", TRAINED)
def test_what_of_a_line_is_trained(name):
    template, record, whole, trained = TRAINED[name]
    sample = Writer(Templated(template) if template else BYTES)(json.loads(json.dumps(record)))
    assert text(sample.ids) == whole
    assert text(sample.ids[sample.trained]) == trained


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text())), st.text())
def test_texts_are_used_unchanged(turns, last):
    turns.append(("assistant", last))
    sample = Writer(BYTES)(talk(*({"role": role, "content": content} for role, content in turns)))
    learnt = [[*content.encode(), END] for role, content in turns if role == "assistant"]
    assert sample.ids[sample.trained].tolist() == [*itertools.chain(*learnt)]
    assert not sample.trained[0]


ALONE = "only a chat template can write it, and this tokenizer has none"
IGNORED = "which would be ignored: take it out, or leave the line out"
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no object": (None, [1], r"it must be an object, got \[1\]"),
    "other keys": (None, {"prompt": "a", "text": "b"}, "question and answer, got prompt, text"),
    "number": (None, {"prompt": 3, "completion": "a"}, "prompt must be a text, got 3"),
    "label": (
        None,
        {"prompt": "a", "completion": "b", "label": False},
        f"it has 'label', {IGNORED}",
    ),
    "weight of a line": (None, talk(ANSWER, weight=0), f"it has 'weight', {IGNORED}"),
    "tools of a completion": (None, {"prompt": "", "completion": "", "tools": [1]}, IGNORED),
    "no list": (None, {"messages": "a"}, "messages must be a list, got 'a'"),
    "role": (None, talk({"role": "bot"}), "message 1 must have a role of system, user"),
    "parts": (
        None,
        talk(ANSWER | {"content": [1]}),
        r"content of message 1 must be a text, got \[1",
    ),
    "old calls": (
        None,
        talk(ANSWER | {"function_call": {"a": 1}}),
        f"message 1 has 'func.*{IGNORED}",
    ),
    "weight": (None, talk(ANSWER | {"weight": 0.5}), "weight of message 1 must be 0 or 1, got 0.5"),
    "no answer": (None, talk(USER), "nothing of it would be trained: leave the line out"),
    "weights of 0": (None, talk(UNWEIGHTED), "nothing of it would be trained"),
    "calls alone": (None, talk(USER, CALLING), f"tool_calls of message 2: {ALONE}"),
    "tools alone": (None, talk(USER, ANSWER, tools=[1]), f"tools of message 0: {ALONE}"),
    "reasoning alone": (None, talk(THINKING), f"reasoning_content of message 1: {ALONE}"),
    "calls unwritten": (texts_alone, talk(USER, CALLING | {"content": ""}), "leaves out 'add'"),
    "reasoning unwritten": (
        texts_alone,
        talk(USER, THINKING),
        "leaves out 'hm' of the assistant's",
    ),
    "rewritten": (forgetful, talk(USER, ANSWER), "rewrites what precedes message 2: give each"),
    "rewritten later": (
        thoughtless,
        talk(USER, THINKING, USER, ANSWER),
        "rewrites what precedes message 4",
    ),
    "broken": (needs_a_question, talk(ANSWER), "IndexError: list index out of range"),
    "surrogate": (None, {"prompt": "\ud800", "completion": ""}, "UnicodeEncodeError"),
}
"""By name: a chat template, the line's value, and the error."""


@pytest.mark.parametrize("name", REFUSED)
def test_lines_that_would_train_something_else_are_named(tmp_path, name):
    template, record, problem = REFUSED[name]
    path = tmp_path / "data.jsonl"
    path.write_text('\ufeff{"prompt": "a", "completion": "b"}\r\n\n' + json.dumps(record))
    tokenizer = BYTES if template is None else Templated(template)
    with pytest.raises(DataError, match=rf"^{path}:3: .*{problem}"):
        read_samples(str(path), tokenizer)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file"),
        (b"", "no line in it"),
        (b"\n \n", "no line in it"),
        (b"\x1f\x8b\x08", "it is gzip: unpack it first"),
        (b"PAR1\x15", "it is parquet: write it as JSON lines first"),
        (b'{"prompt": "a"', "1: JSONDecodeError"),
        (b"\n\xff", "2: UnicodeDecodeError"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, content, problem):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{path}: ?{problem}"):
        read_samples(str(path), BYTES)


def test_a_tokenizer_that_adds_marks_to_every_text_is_refused():
    with pytest.raises(DataError, match="unset --tokenizer-hf-include-special-tokens"):
        Writer(SimpleNamespace(eod=END, tokenize=lambda text: [1, *text.encode()]))


def datasets(folder, counts, lines=10, **changed):
    path = folder / "data.jsonl"
    rows = [{"prompt": "p" * n, "completion": "c"} for n in range(1, lines + 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = {"data_path": [str(path)], "split": "60,20,20", "seed": 1234, "seq_length": 16}
    return build_datasets(SimpleNamespace(**args | changed), BYTES, counts)


def prompts(dataset):
    return [int((dataset[at]["tokens"] == ord("p")).sum()) for at in range(len(dataset))]


def test_an_item_is_shifted_by_one_token_and_padded(tmp_path):
    item = datasets(tmp_path, (1, 0, 0), lines=1, split="1,0,0", seq_length=4)[0][0]
    assert {name: values.tolist() for name, values in item.items()} == {
        "tokens": [ord("p"), ord("c"), END, END],
        "labels": [ord("c"), END, END, END],
        "loss_mask": [1, 1, 0, 0],
        "position_ids": [0, 1, 2, 3],
    }
    assert {str(values.dtype) for values in item.values()} == {"torch.int64", "torch.float32"}


def test_files_are_cut_as_split_says_and_epochs_have_orders_of_their_own(tmp_path):
    train, valid, test = datasets(tmp_path, (12, 2, 2))
    assert [each.split for each in (train, valid, test)] == list(Split)
    first, second = prompts(train)[:6], prompts(train)[6:]
    # The same in every version of numpy: a job resumed years later sees the same data.
    assert (first, second) == ([5, 6, 4, 2, 3, 1], [5, 4, 2, 6, 3, 1])
    assert (prompts(valid), prompts(test)) == ([7, 8], [9, 10])
    again, none, _ = datasets(tmp_path, (7, 0, 2))
    assert prompts(again) == [*first, second[0]]
    assert none is None
    assert prompts(datasets(tmp_path, (6, 2, 2), seed=1)[0]) != first
    # Three evaluations of 4 items each, of the same 3 samples; a share of 0 is no test.
    _, valid, test = datasets(tmp_path, (6, 12, 4), split="60,30,10")
    assert (prompts(valid), prompts(test)) == ([7, 8, 9, 7] * 3, [10] * 4)
    train, valid, test = datasets(tmp_path, (6, 2, 2), split="90,10,0")
    assert (len(train), len(valid), test) == (6, 2, None)


def test_lines_that_are_too_long_are_left_out_and_counted(tmp_path, capsys):
    train, *_ = datasets(tmp_path, (8, 0, 0), split="1,0,0", seq_length=9)
    assert sorted(prompts(train)) == [1, 2, 3, 4, 5, 6, 7, 8]
    said = "data.jsonl: 2 of 10 lines are longer than --seq-length: left out"
    assert said in capsys.readouterr().out
    with pytest.raises(DataError, match="no line is left for the valid dataset: raise its share"):
        datasets(tmp_path, (8, 2, 2), split="1,0,0")
    with pytest.raises(DataError, match="no line is left for the train dataset"):
        datasets(tmp_path, (8, 2, 2), data_path=None)


ARGUMENTS = """
------------------------ arguments ------------------------
  context_parallel_size ........................... 2
  data_parallel_size .............................. 2
  max_tokens_per_gpu .............................. 1000
  seq_length ...................................... 512
-------------------- end of arguments ---------------------
"""
LINE = (
    " [2026-11-21 06:25:36.852329] iteration {:8d}/      12 | consumed samples: {:12d} | elapsed "
    "time per iteration (ms): {:.1f} | learning rate: 2.954000E-03 | global batch size:    16 | lm "
    "loss: {:.6E} |{} loss scale: 1.0 | grad norm: 2.321 | number of skipped iterations:   0 |\n"
)
BATCHING = (
    " batching/fill: {:.6E} | batching/padding: {:.6E} | batching/micro-batches a rank: {:.6E} |"
)
STEPS = [(1, 900, 6.0), (2, 700, 5.5), (3, 450, 4.5)]
BATCHES = [(0.5, 0.25, 3), (0.6, 0.125, 4), (0.75, 0.0, 4)]


def log(path, iterations, batching=()):
    """A log as Megatron writes it: ``(number, ms, loss)`` of each iteration's line."""
    extra = [BATCHING.format(*values) for values in batching] or [""] * len(iterations)
    lines = [
        LINE.format(number, 16 * number, ms, loss, each)
        for (number, ms, loss), each in zip(iterations, extra, strict=True)
    ]
    noise = "Number of in-flight microbatches: 2\n validation loss at iteration 3 | lm loss: 1 |\n"
    path.write_text(ARGUMENTS + noise.join(lines))
    return path


def test_logs_that_do_not_tell_are_refused(tmp_path):
    path = tmp_path / "x.log"
    path.write_text(ARGUMENTS + "Error\n")
    with pytest.raises(LogError, match="has no iteration: the job ended before its first one"):
        read_log(path)
    with pytest.raises(LogError, match=r"has iterations \[1, 3\], expected \[1, 2\]"):
        read_log(log(path, [STEPS[0], STEPS[2]]))
    path.write_text(log(path, STEPS[:1]).read_text().replace("seq_length", "length"))
    with pytest.raises(LogError, match="does not tell 'seq_length'"):
        read_log(path)


def test_logs_of_two_runs_are_read_compared_in_words_and_drawn(tmp_path, capsys):
    """A job's second line holds the mean of its first two iterations."""
    dynamic = read_log(log(tmp_path / "dynamic.log", STEPS, BATCHES))
    # 3, 5 and 4 micro-batches of each of 2 ranks, of 2 x 1000 tokens at most.
    tokens = [0.5 * 12000 / 0.75, 0.7 * 20000, 0.75 * 16000]
    assert [each.computed_tokens for each in dynamic] == pytest.approx(tokens)
    assert [each.loss for each in dynamic] == [6.0, 5.0, 4.5]
    with pytest.raises(SystemExit, match=r"padded\.log"):
        sft_figure.main([str(tmp_path)])
    padded = log(tmp_path / "padded.log", [(1, 900, 6.0), (2, 1450, 5.625), (3, 1000, 4.5)])
    assert read_log(padded) == [
        Iteration(1, 16, 6.0, 0.9, 8192),
        Iteration(2, 32, 5.25, 2.0, 8192),
        Iteration(3, 48, 4.5, 1.0, 8192),
    ]
    sft_figure.main([str(tmp_path)])
    assert capsys.readouterr().out.startswith(
        "largest difference in loss over 3 steps: 2.5e-01 (logged to 7 digits)\n"
        "tokens computed per step: 11,333 instead of 8,192, 0.7 times fewer\n"
        "median step: 0.47 s instead of 1.50 s, 3.2 times faster\n"
    )
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    log(tmp_path / "padded.log", STEPS[:2])
    with pytest.raises(SystemExit, match="run both with the same arguments"):
        sft_figure.main([str(tmp_path)])
