"""What `memory_timeline` draws: areas on top of each other, laid out once for the browser and for the still picture."""
