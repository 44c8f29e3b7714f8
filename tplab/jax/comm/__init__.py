"""Communication between ranks: collectives, regions and rings, all of them differentiable."""
