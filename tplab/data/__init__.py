"""Data parallelism, where no framework is needed: gradient buckets, ZeRO, block quantisation."""

from tplab.data.quantization import Quantized, quantized_bytes
from tplab.data.zero_plus_plus import ZeroPlusPlus, secondary_bytes, step_bytes

__all__ = ["Quantized", "ZeroPlusPlus", "quantized_bytes", "secondary_bytes", "step_bytes"]
