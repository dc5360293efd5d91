"""The pure scheduler: requests, pages, the prefix tree, plans and orders. No I/O, no threads, no clock of its own."""
