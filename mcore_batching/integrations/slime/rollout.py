"""slime's default rollout function, for ``--rollout-function-path``; importing it hooks the plan.

The rollout manager imports the function's module in its own process, where it also plans.
"""

from __future__ import annotations

import importlib

from mcore_batching.integrations.slime.schedule import hook_schedule

hook_schedule()

generate_rollout = importlib.import_module("slime.rollout.sglang_rollout").generate_rollout
"""``slime.rollout.sglang_rollout.generate_rollout``."""
