"""The data dimension, as far as no framework is needed: which gradients travel together; ZeRO; block quantisation."""

from tplab.data.quantization import Quantized, error_bound, quantized_bytes

__all__ = ["Quantized", "error_bound", "quantized_bytes"]
