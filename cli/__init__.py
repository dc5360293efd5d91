"""The command line: headrace serve, gateway, stage, up, check, demo, bench, simulate, replay."""
