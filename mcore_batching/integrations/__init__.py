"""Integrations of the engine, one package per framework that has batching of its own."""
