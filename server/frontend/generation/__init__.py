"""From a request to text: at this server, or from a prefill server's KV."""
