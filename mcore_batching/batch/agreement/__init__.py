"""Agreements: messages between ranks, so that all act on the same or raise together."""
