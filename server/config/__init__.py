"""Configuration of a server: settings from flags, files and environment; checks; what the machine decides."""
