"""Workers of NVIDIA Dynamo in front of Headrace servers and gateways: `headrace dynamo`."""
