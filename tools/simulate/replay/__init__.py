"""Replays a trace of requests through real Schedulers in virtual time, on stages that take a modelled time."""
