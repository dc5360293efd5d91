"""What GET /openapi.json says of the routes."""
