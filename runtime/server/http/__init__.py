"""The HTTP side of a server: routes, the native and the OpenAI API, control and metrics."""
