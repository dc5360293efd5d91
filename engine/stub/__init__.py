"""The stub model's runner: real stages, pools and senders with set times and tokens in the place of matrices."""
