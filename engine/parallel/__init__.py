"""Pipeline parallelism: layers per stage, and the communication between stages."""
