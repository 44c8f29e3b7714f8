"""Preparations for a pipeline: layers that are not built yet, where to cut them, and microbatches."""

from tplab.pipeline.checks import split_batch
from tplab.pipeline.layer_spec import LayerSpec, TiedSpec, layer_names
from tplab.pipeline.partition import Partition, partition

__all__ = ["LayerSpec", "Partition", "TiedSpec", "layer_names", "partition", "split_batch"]
