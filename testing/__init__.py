"""The scheduler under a virtual clock, with a simulated engine and network: for tests of this project and of others."""
