"""The prompt-program language, its interpreter, clients and command line."""
