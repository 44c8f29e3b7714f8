"""The picture of `tiles`: the scores of attention over ranks, laid out once for browser and still picture."""
