"""Of Hugging Face's package what Megatron's ``SFTTokenizer`` calls, with a made tokenizer: bytes of
UTF-8 text, and a token for each mark ``<NAME>``."""

import re

import jinja2
import numpy as np

MARKS = ["<unk>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>"]


class AutoTokenizer:
    bos_token_id, eos_token_id, chat_template = None, 256 + 1, None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path):
        return cls()

    def __len__(self):
        return 256 + len(MARKS)

    def convert_tokens_to_ids(self, token):
        return 256 + MARKS.index(token)

    def apply_chat_template(
        self, conversation, *, chat_template, return_tensors=None, add_generation_prompt=False, **_
    ):
        text = jinja2.Template(chat_template, keep_trailing_newline=True).render(
            messages=conversation
        )
        parts = re.split("(" + "|".join(MARKS) + ")", text)
        ids = [
            token
            for part in parts
            for token in ([256 + MARKS.index(part)] if part in MARKS else part.encode())
        ]
        return np.array([ids]) if return_tensors == "np" else ids
