"""`headrace simulate`: capacity questions answered by replaying a trace through the scheduler in virtual time."""
