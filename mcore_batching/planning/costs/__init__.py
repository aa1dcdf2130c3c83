"""Costs of passes, and of the layers that a model's config names.

cost           costs of samples and micro-batches, and of a step's stages
layer_costs    what a layer of each type costs, and stages as sums of their layers
layers_of      a model's layers and their sizes, read from its config
uneven_stages  how many of them each stage has, where Megatron does not cut them evenly
"""
