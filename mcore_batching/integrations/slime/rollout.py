"""The default rollout function of slime or miles; importing this module hooks the plan.

For ``--rollout-function-path``: the rollout manager imports the function's module in its own
process, where it also plans.
"""

from __future__ import annotations

import importlib

from mcore_batching.integrations.slime.rollout_manager import framework, hook_schedule

hook_schedule()


_name = framework("utils.misc")
_module, _function = f"{_name}.rollout.sglang_rollout", "generate_rollout"
# In miles a class, or the function of slime's name where MILES_USE_LEGACY_ROLLOUT_V1 is set.
if _name == "miles" and not importlib.import_module("miles.utils.environ").use_legacy_rollout_v1():
    _module = "miles.rollout.inference_rollout.inference_rollout_common"
    _function = "InferenceRolloutFn"

generate_rollout = getattr(importlib.import_module(_module), _function)
