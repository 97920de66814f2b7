"""The mechanisms as pure functions, one file a mechanism."""
