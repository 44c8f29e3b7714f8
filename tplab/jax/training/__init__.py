"""Training a GPT over a mesh of data, pipeline and tensor parallelism."""
