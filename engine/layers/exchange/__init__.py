"""Expert exchange: brings tokens to the ranks that hold their experts, and the results back."""
