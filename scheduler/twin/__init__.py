"""The twin: a copy of the scheduler that runs ahead in virtual time, on stages that take what is predicted."""
