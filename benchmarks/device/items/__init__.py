"""One file per item. Its `tasks(place)` yields the item's checks."""
