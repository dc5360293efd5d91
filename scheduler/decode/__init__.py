"""KV coming in from prefill servers, and generating tokens here."""
