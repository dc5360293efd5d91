"""The scheduler under a virtual clock, with a simulated engine and network."""
