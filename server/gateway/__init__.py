"""Gateway: prefill servers on one side, decode engines on which nothing of Headrace is installed on the other."""
