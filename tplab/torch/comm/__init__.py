"""Communication between ranks: collectives, regions, rings and messages, all of them differentiable."""
