"""What the rows of `FAULTS.md` call, on a small model: planning, forward passes, training.

Each with its arguments, and without any as it is right.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from kit.model import adam, arguments, small_model
from kit.objective import log_probs_of, packed_objective
from kit.samples import VOCABULARY, make_samples, share, take
from mcore_batching.batch import DEFAULT_SCHEMA, Kind
from mcore_batching.integrations.megatron_lm.forward_backward import run_packed
from mcore_batching.integrations.megatron_lm.stock_steps import StockSteps
from mcore_batching.megatron import (
    add_fields,
    forward_only,
    get_data_iterator,
    response_log_probs,
    train_step,
)
from mcore_batching.planning import ParallelDims

Function = Callable[..., Any]
TABLES = Path(__file__).resolve().parents[1] / "FAULTS.md"


def my_samples(dims: ParallelDims, spread: str = "uneven") -> dict[str, list[Any]]:
    """The samples of this rank's replica."""
    samples = make_samples()
    rank = parallel_state.get_data_parallel_rank()
    return take(samples, share(samples, spread, rank, dims.data_parallel))


def on_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def error_of(call: Any) -> str:
    """Type and text of what a call raises; "" if it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def printed(*calls: Callable[[], Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for call in calls:
            call()
    return said.getvalue()


class Calls:
    """A model, a plan of its samples, and calls."""

    def __init__(
        self,
        dims: ParallelDims,
        spread: str = "uneven",
        model: dict[str, Any] | None = None,
        **planner: Any,
    ) -> None:
        self.dims, self.planner = dims, planner
        self.model = small_model(dims, **(model or {}))
        self.args = arguments(self.dims, **planner)
        self.data: Any = my_samples(dims, spread)
        self.iterators, self.counts = self.plan()
        self.optimizer = adam(self.model, distributed=False)
        self.scheduler: Any = None

    def with_flags(self, flags: dict[str, Any]) -> Any:
        return arguments(self.dims, **self.planner | flags) if flags else self.args

    def patched(self, call: str, owner: Any, name: str, value: Any) -> Any:
        """A call without arguments, with something in another's place."""
        with mock.patch.object(owner, name, value):
            return getattr(self, call)()

    def plan(self, **fields: Any) -> Any:
        return self.plan_of(self.data | fields if fields else self.data)

    def plan_of(self, data: Any, **options: Any) -> Any:
        return get_data_iterator(self.args, self.model, data, **options)

    def planned(self, **flags: Any) -> Any:
        return get_data_iterator(self.with_flags(flags), self.model, self.data)

    def planned_with(self, **options: Any) -> Any:
        return self.plan_of(self.data, **options)

    def plan_sharing_prefixes(self, turned: bool = False) -> Any:
        """The tokens of a sample that others begin are turned round."""
        tokens = [*self.data["tokens"]]
        if turned:
            tokens[9] = tokens[9].flip(0)
        args = self.with_flags({"dynamic_batch_share_prefixes": True})
        return get_data_iterator(args, self.model, self.data | {"tokens": tokens})

    def plan_with_images(self, made: Callable[[], Any] = lambda: None) -> Any:
        data = self.data | {"image": [made() for _ in self.data["tokens"]]}
        return self.plan_of(data, schema=DEFAULT_SCHEMA.declare("image", Kind.METADATA))

    def add(self, **fields: Any) -> None:
        add_fields(self.iterators, fields)

    def forward(self, f: Any = log_probs_of, **changes: Any) -> Any:
        given = {"data_iterator": self.iterators, "num_microbatches": self.counts} | changes
        return forward_only(f, **{"args": self.args, "model": self.model} | given)

    def train(self, loss: Any = packed_objective, step: int = 0, **changes: Any) -> Any:
        given = {"data_iterator": self.iterators, "num_microbatches": self.counts} | changes
        given = {"args": self.args, "model": self.model, "optimizer": self.optimizer, **given}
        return train_step(loss, **given, step=step)

    def train_planned(self, planned: Any, loss: Any = packed_objective, step: int = 0) -> Any:
        iterators, counts = planned
        return self.train(loss, step, data_iterator=iterators, num_microbatches=counts)

    def train_of_two(self, step: int = 0, *replaced: Any) -> Any:
        """One of two steps, of which the second is planned with something in another's place."""
        places = range(len(self.data["tokens"]))
        planned = self.planned_with(steps=[places[::2], places[1::2]])
        with mock.patch.object(*replaced) if replaced else contextlib.nullcontext():
            return self.train_planned(planned, step=step)

    def train_masked(self, first: float = 1.0) -> Any:
        """With this weight of every sample's first response token."""
        masks = [torch.ones(n) for n in self.data["response_lengths"]]
        for mask in masks:
            mask[:1] = first
        return self.train_planned(self.plan(loss_masks=masks))

    def train_at(self, temperature: float = 1.0) -> Any:
        def loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
            log_probs = response_log_probs(logits, row, temperature=temperature)
            return -torch.cat(log_probs).sum() / totals.num_tokens, {}

        return self.train(loss)

    def train_failing_in_shared_rows(self) -> Any:
        """Of data that one stage of one replica alone has to be sent."""

        def loss(logits: torch.Tensor, row: Any, totals: Any) -> Any:
            if row.context_parallel_size > 1:
                raise ZeroDivisionError("in the loss")
            return packed_objective(logits, row, totals)

        return self.train_planned(self.plan_of(self.data if dist.get_rank() != 2 else None), loss)

    def stock_step(self, longer: bool = False) -> Any:
        """Of a stock script, whose first sample may have a token more."""
        tokens = [*self.data["tokens"]]
        if longer:
            tokens[0] = torch.nn.functional.pad(tokens[0], (0, 1))
        args = self.with_flags({"padded_vocab_size": VOCABULARY})
        return stock_step(args, self.model, {"tokens": tokens})

    def step(self, loss: Any = packed_objective) -> dict[str, Any]:
        """Metrics of a step that is planned, too: of the last where the batch size cuts several."""
        self.iterators, self.counts = self.plan()
        options = {"opt_param_scheduler": self.scheduler, "increment": 1}
        done = self.train(loss, len(self.counts) - 1, **options)
        return {**done.metrics, "grad_norm": done.grad_norm}

    def in_layer(self, happens: Callable[[], Any]) -> None:
        """In the second micro-batch from now on, if there is one, this happens in a layer."""
        calls = iter(range(1000))
        self.layer.register_forward_pre_hook(lambda *_: happens() if next(calls) == 1 else None)

    @property
    def layer(self) -> Any:
        return unwrap_model(self.model[-1]).decoder.layers[-1]

    def longer(self) -> dict[str, Any]:
        """Every sample has a token more."""
        return {
            "tokens": [torch.cat((each, each[-1:])) for each in self.data["tokens"]],
            "total_lengths": [length + 1 for length in self.data["total_lengths"]],
        }

    def with_token(self, token: int) -> dict[str, Any]:
        """A token of the second sample is this one."""
        tokens = [each.clone() for each in self.data["tokens"]]
        tokens[1][2] = token
        return {"tokens": tokens}

    def shortened(self, length: int) -> dict[str, Any]:
        """The first sample has so many tokens, none of them a response."""
        data = {name: [*values] for name, values in self.data.items()}
        data["tokens"][0] = data["tokens"][0][:length]
        data["total_lengths"][0], data["response_lengths"][0] = length, 0
        return data


def get_batch(data_iterator: Any) -> Any:
    """What `run_packed` replaces, as in a stock script."""
    raise NotImplementedError


def _forward_step(data_iterator: Any, model: Any) -> Any:
    tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params = get_batch(
        data_iterator
    )
    given = {"labels": labels, "packed_seq_params": packed_seq_params}
    output = model(tokens, position_ids, attention_mask, **given)

    def loss(losses: torch.Tensor) -> Any:
        total, count = (losses.float() * loss_mask).sum(), loss_mask.sum()
        return total, count.int(), {"lm loss": torch.stack((total.detach(), count)).clone()}

    return output, loss


def stock_step(
    args: Any,
    model: list[Any],
    samples: dict[str, Any],
    *,
    has_data: bool = True,
    forward_only: bool = False,
) -> None:
    """One step of a stock script, whose ordinary micro-batches hold one sample each."""
    batches = [
        {
            "tokens": tokens[None],
            "labels": tokens.roll(-1)[None],
            "loss_mask": torch.ones(1, len(tokens)),
            "position_ids": torch.arange(len(tokens))[None],
        }
        for tokens in samples["tokens"]
    ]
    run_packed(
        get_forward_backward_func(),
        args,
        StockSteps(args),
        forward_step_func=_forward_step,
        data_iterator=iter(batches) if has_data else None,
        model=model,
        num_microbatches=len(batches),
        micro_batch_size=1,
        forward_only=forward_only,
        seq_length=1,
    )


class Fault(NamedTuple):
    """A row of `FAULTS.md`."""

    layouts: list[str]
    name: str
    call: Callable[[Calls], Any]  # on the rank at fault
    others: Callable[[Calls], Any]
    error: str
    text: str  # in the error's message
    where: str  # the rank at fault, or the exit code of its process


def read_faults(header: str, names: dict[str, Any], others: str = "") -> list[Fault]:
    """The rows of the table with this header; cells of code see these names.

    ``others`` is what other ranks call; "": the row's call without arguments.
    """
    columns = [each.strip() for each in header.split("|")[1:-1]]
    _, *lines = TABLES.read_text().partition(f"{header}\n")[2].splitlines()
    found = []
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines):
        cells = [each.strip() for each in line.split("|")[1:-1]]
        row = dict(zip(columns, cells, strict=True))
        call, text = row["call"].strip("`"), row["text"].strip("`").replace("\\n", "\n")
        right = row["others"].strip("`") or others or f"{call.partition('(')[0]}()"
        both = [eval(f"lambda calls: {code}", names) for code in (call, right)]
        layouts, where = row.get("layout") or row["layouts"], row.get("rank") or row["ends"]
        found.append(Fault(layouts.split(", "), row["fault"], *both, row["error"], text, where))
    return found


def f_with(change: Function) -> Function:
    """The usual f, with ``change(outputs, number)`` for what it returns of real samples."""
    numbers = iter(range(1000))

    def f(logits: torch.Tensor, *, micro_batch: Any) -> Any:
        number = 0 if micro_batch.is_placeholder else next(numbers)
        return change(log_probs_of(logits, micro_batch=micro_batch), number)

    return f


def loss_with(change: Function) -> Function:
    """The usual loss function, with ``change(loss, metrics, number)`` for what it returns."""
    numbers = iter(range(1000))
    return lambda *given: change(*packed_objective(*given), next(numbers))
