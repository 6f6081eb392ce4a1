"""Processes, HTTP, RPC and the command line of a server."""
