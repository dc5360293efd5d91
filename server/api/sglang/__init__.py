"""SGLang's API: POST /generate."""
