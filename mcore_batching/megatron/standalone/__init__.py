"""A Megatron model without a training script around it: start-up, and timing a layer stack."""
