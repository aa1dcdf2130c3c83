"""Placeholders, shared prefixes, and tensors side by side in one buffer."""
