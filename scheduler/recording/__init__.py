"""Recordings of what the scheduler was given and decided: snapshots of its state, calls, files, the recorder."""
