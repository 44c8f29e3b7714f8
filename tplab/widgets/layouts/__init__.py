"""The parts of `layout_lab`: plans for training a model, their seconds, and what each rank holds."""
