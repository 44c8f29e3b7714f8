"""Preparations for a pipeline: layers that are not built yet, where to cut them, and microbatches."""

from tplab.pipeline.checks import split_batch
from tplab.pipeline.partition import LayerSpec, Partition, TiedSpec, layer_names, partition

__all__ = ["LayerSpec", "Partition", "TiedSpec", "layer_names", "partition", "split_batch"]
