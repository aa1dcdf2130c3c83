"""Supervised fine-tuning data for a stock training script: JSON lines, tokens, datasets."""
