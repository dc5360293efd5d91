"""What a request is: sampling, constraints, drafts, logprobs, outcomes, tenants."""
