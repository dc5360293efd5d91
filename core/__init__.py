"""The words all parts share: requests, orders, events, errors, configuration. Standard library and msgspec only."""
