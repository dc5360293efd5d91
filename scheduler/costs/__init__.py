"""The cost model of forward passes: chunk lengths, predicted seconds, work by rank."""
