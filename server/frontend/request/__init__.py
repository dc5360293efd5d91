"""What one request is in the front end, whichever API it came by."""
