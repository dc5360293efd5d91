"""The words all parts share: requests, orders, events, errors, configuration slices. Standard library and msgspec only."""
