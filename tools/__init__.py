"""Tools beside a server: load and latency measurements, and the replay of traces without hardware."""
