"""Of Hugging Face's package what Megatron's ``SFTDataset`` calls."""

import json
from pathlib import Path


def load_dataset(kind, *, data_files, split):
    assert (kind, split) == ("json", "all")
    return [json.loads(line) for line in Path(data_files).read_text().splitlines()]
