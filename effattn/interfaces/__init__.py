"""The arguments that every implementation of a core receives: static configuration and inputs."""
