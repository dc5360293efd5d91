"""Ways to move payload other than in frames. ZMQ carries page indices, acknowledgements and metadata rows with all."""
