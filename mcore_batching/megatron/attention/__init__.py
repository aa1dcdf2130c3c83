"""Attention over packed rows without Transformer Engine, and layer specs with it."""
