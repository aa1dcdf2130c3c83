"""Makes the bundled conversations of won arithmetic games, input of ``sft.sh``.

    python examples/data/game_conversations.py --out examples/data/arithmetic_conversations.jsonl

The game's part becomes messages of the user, the player's those of the assistant. Games that were
lost are left out, and of games that were played alike all but the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROLLOUTS = Path(__file__).with_name("arithmetic_rollouts.jsonl")
MAX_CHARACTERS = 800
"""Of all messages together: longer games are left out, so that a baseline that pads every sample to
the longest one ends in reasonable time."""


def conversation(game: dict[str, Any]) -> list[dict[str, str]]:
    """Messages of one recorded game, up to the player's last."""
    messages = [{"role": "user", "content": game["prompt"].strip()}]
    at = 0
    for start, end in game["environment_spans"]:
        messages.append({"role": "assistant", "content": game["response"][at:start].strip()})
        messages.append({"role": "user", "content": game["response"][start:end].strip()})
        at = end
    while messages[-1]["role"] == "user":
        messages.pop()
    return messages


def conversations(rollouts: Path) -> Iterator[list[dict[str, str]]]:
    """The conversations of a file of rollouts, as `arithmetic_game` writes it."""
    seen = set()
    for line in rollouts.read_text(encoding="utf-8").splitlines():
        game = json.loads(line)
        played = game["prompt"], game["response"]
        if game["reward"] < 1 or played in seen or sum(map(len, played)) > MAX_CHARACTERS:
            continue
        seen.add(played)
        yield conversation(game)


def main() -> None:
    parser = argparse.ArgumentParser(description="Conversations of won arithmetic games.")
    parser.add_argument("--rollouts", type=Path, default=ROLLOUTS, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    lines = [json.dumps({"messages": messages}) for messages in conversations(options.rollouts)]
    options.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
