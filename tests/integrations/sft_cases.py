"""What the tests of supervised fine-tuning data share."""

import json

from mcore_batching.integrations.megatron_lm.sft.records import Conversation
from mcore_batching.integrations.megatron_lm.sft.tokenization import (
    SampleTokenizer,
    byte_level_tokenizer,
)

END = 256
BYTES = SampleTokenizer(byte_level_tokenizer())


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def trained_text(sample):
    """What is trained, END as "$"."""
    return "".join(
        "$" if token == END else bytes([token]).decode("latin-1")
        for token, trained in zip(sample.ids, sample.trained, strict=True)
        if trained
    )


def whole_text(sample):
    return "".join("$" if t == END else bytes([t]).decode("latin-1") for t in sample.ids)


def conversation(*turns):
    return Conversation(tuple({"role": role, "content": content} for role, content in turns))


class Wrapped:
    """A byte-level tokenizer that adds marks to every text, and has a chat template."""

    eod = END
    chat_template = "{% ... %}"

    def __init__(self, adds=(), template=None):
        self.before, self.after = adds or ([], [])
        self.render = template
        if template is None:
            self.chat_template = None

    def tokenize(self, text):
        return [*self.before, *text.encode(), *self.after]

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
        assert not tokenize
        return self.render(conversation) + ("A:" if add_generation_prompt else "")
