"""The default rollout function of slime or miles; importing this module hooks the plan.

For ``--rollout-function-path``: the rollout manager imports the function's module in its own
process, where it also plans.
"""

from __future__ import annotations

import importlib
from typing import Any

from mcore_batching.integrations.slime.rollout_manager import framework, hook_schedule

hook_schedule()


def _default() -> Any:
    if framework("utils.misc") == "slime":
        return importlib.import_module("slime.rollout.sglang_rollout").generate_rollout
    # In miles a class, or the function of slime's name where MILES_USE_LEGACY_ROLLOUT_V1 is set.
    if importlib.import_module("miles.utils.environ").use_legacy_rollout_v1():
        return importlib.import_module("miles.rollout.sglang_rollout").generate_rollout
    name = "miles.rollout.inference_rollout.inference_rollout_common"
    return importlib.import_module(name).InferenceRolloutFn


generate_rollout = _default()
