"""The queues of requests, their shares and deadlines."""
