"""The reference: one process, one sample a forward pass, nothing packed.

Megatron's own model with its own local attention, on plain ``[1, length]`` batches; log-probs by
`torch.log_softmax`, the loss in one piece, `torch.optim.AdamW`. Run as ``python -m kit.reference
KIND OUT``; writes weights, log-probs, loss, gradients and the weights after one step.
"""

from __future__ import annotations

import sys

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from kit.model import (
    ADAM,
    CLIP_GRAD,
    MAX_SEQUENCE_LENGTH,
    gpt_options,
    named_parameters,
    transformer_config,
)
from kit.objective import plain_objective
from kit.samples import VOCABULARY, make_samples
from mcore_batching.megatron.bootstrap import (
    build_model,
    initialize_model_parallel,
    initialize_process_group,
    pipeline_config,
)
from mcore_batching.planning import Layout


def main(kind: str, out: str) -> None:
    """Write the reference results of a model kind."""
    initialize_process_group()
    layout = Layout()
    initialize_model_parallel(layout)
    config = transformer_config(kind, **pipeline_config(layout))
    (model,) = build_model(
        config,
        vocab_size=VOCABULARY,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        wrap=False,
        **gpt_options(kind),
        spec=lambda config: get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=False,
            qk_layernorm=config.qk_layernorm,
            normalization=config.normalization,
        ),
    )
    device = next(model.parameters()).device
    samples = {
        key: [v.to(device) if torch.is_tensor(v) else v for v in values]
        for key, values in make_samples().items()
    }
    weights = {name: p.detach().cpu().clone() for name, p in named_parameters([model])}
    log_probs = []
    for tokens, response in zip(samples["tokens"], samples["response_lengths"], strict=True):
        length = len(tokens)
        positions = torch.arange(length, device=device)[None]
        future = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
        logits = model(tokens[None], positions, future)[0].float()
        predicted = torch.log_softmax(logits, -1)[:-1].gather(1, tokens[1:, None])[:, 0]
        whole = torch.cat((torch.zeros(1, device=device), predicted))
        log_probs.append(whole[length - response :])
    objective = plain_objective(log_probs, samples)
    objective["loss"].backward()
    gradients = {name: p.grad.detach().cpu().clone() for name, p in named_parameters([model])}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
    torch.optim.AdamW(
        model.parameters(),
        lr=ADAM["lr"],
        eps=ADAM["adam_eps"],
        betas=(ADAM["adam_beta1"], ADAM["adam_beta2"]),
        weight_decay=0.0,
    ).step()
    torch.save(
        {
            "weights": weights,
            "log_probs": [values.detach().cpu() for values in log_probs],
            "metrics": {name: float(value.detach()) for name, value in objective.items()},
            "gradients": gradients,
            "grad_norm": float(norm),
            "updated": {n: p.detach().cpu() for n, p in named_parameters([model])},
        },
        out,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
