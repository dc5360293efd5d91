"""HTTP API: routes of OpenAI, SGLang, Headrace and operations over the parts of the front end."""
