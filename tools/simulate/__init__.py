"""headrace simulate: what a deployment would do with a trace, on real Schedulers in virtual time."""
