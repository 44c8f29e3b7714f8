"""What `tiles` draws: the scores of attention over ranks, laid out once for the browser and for the still picture."""
