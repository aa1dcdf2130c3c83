"""A training loop of one's own on dynamic micro-batches: old log-probs, then policy steps.

    MCORE_BATCHING_CPU=1 PYTHONPATH=examples/grpo torchrun --nproc-per-node 2 examples/loop.py \\
        --use-dynamic-batch-size --max-tokens-per-gpu 64

One data-parallel rank of two pipeline stages, on the CPU or on GPUs. `bootstrap` stands for what
sets up process groups and model: on megatron.training, `setup_model_and_optimizer`.
"""

import argparse

import bootstrap
import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_batching import ParallelDims, group_steps
from mcore_batching.batch import DEFAULT_SCHEMA, Kind, token_mean
from mcore_batching.megatron import (
    add_dynamic_batch_arguments,
    add_fields,
    forward_only,
    get_data_iterator,
    response_log_probs,
    train_step,
)

args = add_dynamic_batch_arguments(argparse.ArgumentParser()).parse_args()
dims = ParallelDims(pipeline_parallel=2)
bootstrap.initialize_process_group()
bootstrap.initialize_model_parallel(dims)
config = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    pipeline_dtype=torch.float32,
    calculate_per_token_loss=True,
    **bootstrap.pipeline_config(dims),
)
model = bootstrap.build_model(config, vocab_size=256, max_sequence_length=64)
optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), model)

# This data-parallel rank's samples, per-sample lists; any number.
total, response, uids = [40, 9, 23, 31], [20, 5, 11, 16], ["a", "a", "b", "b"]
rollout_data = {
    "tokens": [torch.randint(256, (n,)) for n in total],
    "total_lengths": total,
    "response_lengths": response,
    "advantages": [torch.ones(n) for n in response],
    "my_weights": [torch.ones(n) for n in response],
}
steps = group_steps(uids, 1)  # prompts of each optimizer step, of this rank's
schema = DEFAULT_SCHEMA.declare("my_weights", Kind.PER_RESPONSE_TOKEN)


def log_probs(logits, *, micro_batch):
    """What `forward_only` brings back: one tensor per sample."""
    return {"log_probs": response_log_probs(logits, micro_batch)}


def loss(logits, micro_batch, totals):  # on the last stage
    """A share of the step's mean, and what is to be logged."""
    new = response_log_probs(logits, micro_batch)
    old, advantages = micro_batch["log_probs"], micro_batch["advantages"]
    policy = [-(n - o).exp() * a for n, o, a in zip(new, old, advantages, strict=True)]
    share = token_mean(policy, micro_batch, totals)  # shares add up to the mean over the step
    return share, {"policy": share}


iterators, counts = get_data_iterator(args, model, rollout_data, steps=steps, schema=schema)
old = forward_only(log_probs, args, model, iterators, counts)
add_fields(iterators, old)  # one tensor per sample, in order, on the last stage; {} on others
for step in range(len(counts)):
    result = train_step(loss, args, model, iterators, counts, optimizer, step=step)
    print(step, result.metrics)  # {} but on the last stage
