"""Megatron models without a training script: start-up."""
