"""`Options`: Megatron's arguments as far as this package reads them, parsed in one place."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch

from mcore_batching.batch.values import as_number
from mcore_batching.flags import (
    CUDA_ROW_MULTIPLE,
    DEFAULT_TIMEOUT_SECONDS,
    FIXED,
    FLAGS,
    LEARNT,
    PLANNER_DEFAULTS,
    PREFIX,
    removed_settings,
)
from mcore_batching.megatron import cpu_emulation
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.planning import ConfigError, CostModel, ParallelDims, PlannerConfig, at_least
from mcore_batching.planning.files import read_document
from mcore_batching.planning.integers import as_integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings as they were given: read from any arguments, checked where they are used, so that a
    rank with a wrong one can report it to the others.

    First the arguments of this package (`FLAGS`), then those of Megatron.
    """

    use_dynamic_batch_size: bool = True
    max_tokens_per_gpu: Any = None
    # The fields of `PlannerConfig` that arguments set.
    planner: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(PLANNER_DEFAULTS))
    cost_model: str | None = None
    exchange: bool | None = None
    share_prefixes: bool = False
    forward_only_max_tokens_per_gpu: Any = None
    logits_in_model_dtype: bool = False
    fuse_output_layer: bool = False
    record: str | None = None
    consensus_timeout_seconds: Any = DEFAULT_TIMEOUT_SECONDS
    no_planned_shapes: bool = False
    on_nonfinite: str = "error"

    global_batch_size: Any = None
    pad_token_id: Any = None
    padded_vocab_size: int | None = None
    check_for_nan_in_loss_and_grad: bool = True
    distributed_timeout_minutes: float | None = None

    @classmethod
    def of(cls, args: Any) -> Options:
        """Options from Megatron's arguments, or any object with some of them; the rest is default.

        Raises:
            DynamicBatchArgumentError: a removed flag is set.
        """
        if problems := removed_settings(args):
            raise DynamicBatchArgumentError("; ".join(problems))

        own = {each.name for each in dataclasses.fields(cls)} - {"planner"}
        given: dict[str, Any] = {}
        for name in own | PLANNER_DEFAULTS.keys():
            # argparse's destinations: "--max-tokens-per-gpu" is args.max_tokens_per_gpu.
            destination = FLAGS.get(name, name).lstrip("-").replace("-", "_")
            if hasattr(args, destination):
                given[name] = getattr(args, destination)
        planner = {name: given.get(name, usual) for name, usual in PLANNER_DEFAULTS.items()}
        return cls(planner=planner, **{name: given[name] for name in own & given.keys()})

    @property
    def max_context_parallel(self) -> int | None:
        """Most ranks that may share a row; None without ``--dynamic-batch-context-parallel``."""
        most: int | None = self.planner["max_context_parallel"]
        return most

    @property
    def exchanges_samples(self) -> bool:
        """True if the samples of all data-parallel ranks are planned together, and move to the
        ranks that run them."""
        return self.exchange is not False

    @property
    def has_own_forward_cap(self) -> bool:
        """True if forward passes alone have a cap of their own, and so another plan."""
        return self.forward_only_max_tokens_per_gpu is not None

    @property
    def learns_cost_model(self) -> bool:
        """True if costs are learnt from training's own passes."""
        return self.cost_model == LEARNT

    def checked_timeout_seconds(self) -> float:
        """Seconds that a rank waits for the others in an agreement."""
        given = self.consensus_timeout_seconds
        seconds, most = as_number(given), 10**9  # process groups count nanoseconds in 64 bits
        if seconds is None or not 1 <= seconds <= most:
            raise DynamicBatchArgumentError(
                f"{FLAGS['consensus_timeout_seconds']} must be a number of seconds from 1 to "
                f"{most}, got {given!r}: leave it out"
            )
        return seconds

    def checked_pad_token_id(self) -> Any:
        """The tokenizer's padding id; 0 where it has none, or a negative number in its place."""
        given = self.pad_token_id
        return 0 if given is None or (as_integer(given) or 0) < 0 else given

    def planner_config(self, dims: ParallelDims) -> PlannerConfig:
        """The planner's settings.

        Raises:
            DynamicBatchArgumentError: micro-batches have no cap, or settings contradict each other.
            ConfigError: a value is out of range.
        """
        if self.max_context_parallel is not None and not self.exchanges_samples:
            raise DynamicBatchArgumentError(
                f"{FLAGS['max_context_parallel']} lets ranks share samples, which have to move to "
                f"them: unset --no{FLAGS['exchange'][1:]}"
            )
        if not self.use_dynamic_batch_size:
            raise DynamicBatchArgumentError(
                "micro-batches are packed under a cap: set --use-dynamic-batch-size and "
                f"--max-tokens-per-gpu, for a number of samples {FLAGS['max_samples_per_row']}"
            )
        if self.max_tokens_per_gpu is None:
            raise DynamicBatchArgumentError(
                "--use-dynamic-batch-size needs a cap: set --max-tokens-per-gpu to the most tokens "
                "of a micro-batch that fit into a GPU (16384, say)"
            )
        # Kernels on a GPU are chosen by the row's length: multiples let it find them again.
        chosen = dict(self.planner)
        on_cuda = torch.cuda.is_available() and not cpu_emulation.is_enabled()
        if chosen["pad_total_to"] is None and on_cuda:
            smallest = dims if self.max_context_parallel is None else dims.for_rows_on(1)
            chosen["pad_total_to"] = _default_row_multiple(self.max_tokens_per_gpu, smallest)
        config = PlannerConfig(max_tokens_per_gpu=self.max_tokens_per_gpu, **chosen)
        config.check_max_context_parallel(dims)
        self.forward_only_config(config, dims)
        return config

    def forward_only_config(self, training: PlannerConfig, dims: ParallelDims) -> PlannerConfig:
        """The planner's settings for forward passes alone: training's, under a cap of their own."""
        if not self.has_own_forward_cap:
            return training
        given = self.forward_only_max_tokens_per_gpu
        cap = at_least("forward_only_max_tokens_per_gpu", given, 1, ConfigError)
        multiple = training.pad_total_to
        if self.planner["pad_total_to"] is None and multiple is not None:
            multiple = _default_row_multiple(cap, dims)  # CUDA's, as it divides this cap
        return dataclasses.replace(training, max_tokens_per_gpu=cap, pad_total_to=multiple)

    def given_cost_model(self) -> CostModel | None:
        """The cost model in the file of ``--dynamic-batch-cost-model``; None if it names none."""
        chosen = self.cost_model
        return None if chosen in (None, LEARNT, FIXED) else _read_cost_model(str(chosen))


def _default_row_multiple(max_tokens_per_gpu: Any, dims: ParallelDims) -> int:
    """`CUDA_ROW_MULTIPLE` of each rank as far as it divides the cap: none is oversize for it."""
    cap = as_integer(max_tokens_per_gpu) or 1
    return dims.context_parallel * math.gcd(CUDA_ROW_MULTIPLE * dims.tensor_parallel, cap)


@functools.cache
def _read_cost_model(path: str) -> CostModel:
    try:
        return CostModel.from_json(read_document(path))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise DynamicBatchArgumentError(
            f"{PREFIX}cost-model {path}: {error}; set it to the cost_model.json that a job writes "
            f"under {PREFIX}record, to auto or to fixed"
        ) from None
