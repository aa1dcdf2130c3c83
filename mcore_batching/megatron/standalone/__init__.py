"""Megatron models without a training script: start-up, and timing of a layer stack."""
