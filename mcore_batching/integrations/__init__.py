"""Who plugs the engine in: each framework that has batching of its own, one package each."""
