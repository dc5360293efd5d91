"""Plans: which rows go into the next forward pass, and the stages that compute them."""
