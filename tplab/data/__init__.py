"""The data dimension, as far as no framework is needed: which gradients travel together."""
