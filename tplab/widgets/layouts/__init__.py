"""What `layout_lab` computes and draws: plans to train a model, their seconds, and what each rank holds."""
